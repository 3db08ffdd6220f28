"""What video commands say: wrong options in one line before a model is loaded, and what takes long before the first bar."""

import sys

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")

import parkattn
from fuzz_calls import ONE_LINE
from parkattn.methods import configured_method
from parklab import cli
from parklab.sprites.grammar import EXAMPLE
from parklab.studio import checkpoints, commands, compare, generate, terminal
from parklab.studio.generate import LOADING, READING, StepReport
from test_studio import asked, model  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

CASES = {
    "a seed no generator takes": (f"generate EXAMPLE --seed {2**64}", "seed: expected", str(2**64)),
    "a seed below 0": ("generate EXAMPLE --seed -1", "seed: expected at least 0", "-1"),
    "more steps than schedulers have": ("generate EXAMPLE --steps 1001", "steps: expected at most 1000", "got 1001"),
    "more text than encoders read":
        ("compare --text-tokens 99999999", "text_tokens: expected at most 4096", "got 99999999"),
    "guidance NaN": ("reproduce all --quick --guidance 1,nan", "guidance: expected a number from 0 to 1000", "got nan"),
    "guidance beyond all use":
        ("generate EXAMPLE --guidance=1e9", "guidance: expected a number from 0 to 1000", "got 1000000000.0"),
    "more frames a second than a player shows":
        ("generate EXAMPLE --fps=1001", "fps: expected at most 1000", "got 1001"),
    "guidance below 0": ("reproduce frontier --guidance=-5", "guidance: expected a number from 0 to 1000", "got -5"),
    "no height": ("generate EXAMPLE --height 0", "height: expected at least 1", "0"),
    "a setting nearly right": ("generate EXAMPLE --set topp=0.8", "got topp", "did you mean top_p?"),
    "a method nearly right": ("generate EXAMPLE --method prak", "method: expected one of", "did you mean park?"),
    "a word nearly right": ("generate MISSPELT", "unknown word 'circel'", "did you mean circle?"),
    "methods nearly right": ("compare --methods dense,parc", "methods: expected all or some of", "did you mean park?"),
    "a prompt and a file of prompts": ("compare EXAMPLE --prompts x.txt", "prompt: expected either", "got both"),
    "no file of prompts":
        ("compare --prompts x.txt", "prompts: expected a text file", "got x.txt (No such file or directory)"),
    "a seed and seeds": ("compare --seed 3 --seeds 0,1", "seeds: expected either --seed or --seeds", "got 3 and 0,1"),
    "seeds that are none": ("compare --seeds 0,x", "seeds: expected whole numbers", "got '0,x'"),
    "one seed twice": ("compare --seeds 1,1", "seeds: expected each once", "got 1, 1"),
    "no picture": ("compare --image x.png", "image: expected a file", "'x.png'"),
    "no LoRA": ("generate EXAMPLE --lora x.safetensors", "lora: expected a LoRA in a safetensors file", "no such file"),
    "a pickled LoRA": ("compare --lora .", "lora: expected a LoRA in a safetensors file", "a pickle can run code"),
    "a setting of no method": ("compare --methods dense,park --set topp=0.8", "got topp", "did you mean top_p?"),
    "a profile nearly right":
        ("compare --profile paper,fats", "profile: expected one of paper, quality, fast", "did you mean fast?"),
    "no profile": ("compare --profile ,", "profile: expected names separated by commas", "got ','"),
    "a profile of no method":
        ("compare --methods dense --profile fast", "profile: expected none", "dense has no profiles"),
    "no sparse step": ("ablation --steps 1", "steps: expected more than the 1 that are dense", "got 1"),
    "seeds no generator takes": (f"ablation --seeds 0,{2**64}", "seeds: expected", str(2**64)),
    "no method": ("ablation --methods ,", "expected", "got ''"),
    "a guidance of doctor that is none":
        ("doctor --guidance 1e9", "guidance: expected a number from 0 to 1000", "1000000000"),
    "a model nearly right": ("doctor --model wan2.1-14", "model: expected one of", "did you mean wan2.1-14b?"),
}  # fmt: skip


def refusal(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["park", *map(str, words)])
    monkeypatch.setattr(terminal, "LONG", 1e6)  # what a slow machine is told while it waits is no part of the refusal
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = capsys.readouterr().err.rstrip("\n")
    assert ended.value.code == 2 and ONE_LINE.fullmatch(line), line
    return line


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_option_is_one_line_before_a_model_is_loaded(case, tmp_path, monkeypatch, capsys):
    def loaded(*_, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(checkpoints, "load_pipeline", loaded)
    monkeypatch.chdir(tmp_path)
    words, *said = CASES[case]
    sentences = {"EXAMPLE": EXAMPLE, "MISSPELT": EXAMPLE.replace("circle", "circel")}
    line = refusal(monkeypatch, capsys, [sentences.get(word, word) for word in words.split()])
    assert all(part in line for part in said), line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True), ("true", True), ("False", False), ("None", None), ("null", None), (".5", 0.5), ("5.", 5.0), ("-.5e1", -5.0),
        ("0.1", 0.1), ("[1,2]", [1, 2]), ("pama", "pama"), (".", "."), ("None1", "None1"), ("[" * 10**5, "[" * 10**5),
        ("(0.7, 0.9)", [0.7, 0.9]), ("[.7,.9]", [0.7, 0.9]), (".3,.7,.3", [0.3, 0.7, 0.3]), ("(128, None)", [128, None]), ("(0.7,", "(0.7,"),
        ("1-2", "1-2"), ("a/(1, 2)", "a/(1, 2)"), ("(" * 10**5, "(" * 10**5), ("٠.5", "٠.5"),
    ],
)  # fmt: skip
def test_a_setting_is_read_as_json_or_as_python_writes_it(text, value):
    assert commands.changes_from([f"x={text}"]) == {"x": value}


def test_settings_in_pythons_spelling_are_accepted(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "parklab.studio.generate.generate_video", lambda request, out, **_: (seen.update(request.changes), False)
    )
    for words in (["compensate=True", "top_p=.5", "anchors=None"], ["top_p=None", "top_k=0.1"]):
        monkeypatch.setattr(
            sys, "argv", ["park", "generate", EXAMPLE, *(word for setting in words for word in ("--set", setting))]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        configured_method("park", "quality", **seen)
    assert seen == {"compensate": True, "top_p": None, "anchors": None, "top_k": 0.1}


@pytest.mark.parametrize("prompt", ["a cat [/red] sits", "a [bold]cat[/bold] :cat: sits"])
def test_brackets_in_a_prompt_are_shown_as_they_are(tmp_path, monkeypatch, capsys, prompt):
    row = {"label": "dense", "psnr": {"mean": 100.0}, "ssim": {"mean": 1.0}, "density": 1.0, "recall": None,
           "seconds": {"denoise": 2.0, "attention": 1.0}, "speedup": 1.0}  # fmt: skip
    report = {"tokens": 7128, "timing_warning": None, "methods": [row | {"label": "[/x]"}]}
    monkeypatch.setattr(compare, "compare", lambda *_, **__: report)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["park", "compare", prompt, "--out", str(tmp_path / "o[/b]x")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out
    assert ended.value.code == 0 and prompt in said and "[/x]" in said


def test_a_dense_layer_that_the_model_has_not_is_refused(tmp_path, monkeypatch, capsys):
    words = ["generate", EXAMPLE, "--set", "dense_layers=[99]", "--out", tmp_path / "a.mp4"]
    assert "dense_layers: expected layers from 0 to" in refusal(monkeypatch, capsys, words)
    assert not (tmp_path / "a.mp4").exists()


def test_the_demo_is_the_comparison_of_dense_and_park_with_the_shipped_model(tmp_path, monkeypatch):
    asked = {}

    def run(request, names, out, **options):
        asked.update(request=request, names=names, out=out)
        return {"tokens": 7128, "timing_warning": None, "methods": [{"label": "dense", "psnr": {"mean": 100.0}, "ssim": {"mean": 1.0}, "density": 1.0,
                "recall": None, "seconds": {"denoise": 2.0, "attention": 1.0}, "speedup": 1.0}]}  # fmt: skip

    monkeypatch.setattr(compare, "compare", run)
    commands.demo(out=tmp_path / "demo")
    assert asked["names"] == ["dense", "park"] and asked["request"].model is None
    assert (asked["request"].height, asked["request"].width) == commands.DEMO_SIZE
    assert asked["request"].prompt == commands.DEMO_PROMPT


def test_every_way_in_takes_the_same_profile_where_none_is_named(monkeypatch):
    def generate_video(request, out, **options):
        raise LookupError(request.preset)

    monkeypatch.setattr(generate, "generate_video", generate_video)
    for method, profile in (("park", "quality"), ("svg2", None)):
        with pytest.raises(LookupError) as asked:
            commands.generate(EXAMPLE, method=method)
        assert asked.value.args == (profile,)
    assert (
        compare.default_profiles(compare.DEFAULT_METHODS) == compare.default_profiles(["dense", "park"]) == ["quality"]
    )
    assert compare.default_profiles(["dense", "svg2"]) == [] and parkattn.ParkConfig.DEFAULT_PROFILE == "quality"


def test_the_command_in_a_record_names_the_profile_that_was_meant(tmp_path):
    from parklab.studio.request import Request, repeat_command

    def command(**asked) -> str:
        return repeat_command(Request(prompt="a cat", **asked), tmp_path / "a.mp4")

    assert "--preset paper" in command(method="park")
    assert "--preset fast" in command(method="park", preset="fast")
    assert "--preset" not in command(method="svg2")


# What takes long before the first bar is told on stderr, and nothing else is ----------------------------


def test_a_stage_that_takes_long_is_one_line_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LONG", 0.0)
    wait = terminal.WaitingNotice()
    wait.begin("loading the model")
    wait._timer.join()
    shown = capsys.readouterr()
    assert shown.err == "park: loading the model ...\n" and shown.out == ""


def test_a_stage_that_is_over_soon_is_not_told(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LONG", 3600.0)
    with terminal.step_bars() as bars:
        bars.stage(READING)
        first = bars._waiting._timer
        bars.stage(LOADING)
        second = bars._waiting._timer
        bars.begin("park")(StepReport(0, 1, "dense", 1.0))
        bars.stage("measuring")
        third = bars._waiting._timer
    for timer in (first, second, third):
        timer.join()  # the next stage, the first step or the end took it back: it does not wait for the hour
    assert capsys.readouterr().err == ""


def test_generate_and_compare_tell_what_they_are_doing_in_order(model, tmp_path):  # noqa: F811
    told = []
    request = asked(model, steps=2)
    generate.generate_video(request, tmp_path / "a.mp4", stage=told.append)
    assert told == [READING, LOADING, "encoding the prompt"]
    told.clear()
    compare.compare(request, ["dense", "park"], tmp_path / "out", recall_rows=0, stage=told.append)
    warming = "warming up, untimed"
    assert told == [READING, LOADING, warming, warming, "measuring the videos and writing the page"]
