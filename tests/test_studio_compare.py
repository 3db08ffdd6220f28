"""`park compare` over several profiles, prompts and seeds, from a picture, and with a LoRA: on pipelines of a few
thousand weights.
"""

import dataclasses
import json
import shlex
import sys

import numpy as np
import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")
pytest.importorskip("PIL")

import tiny_pipelines as tiny
from parkattn import METHODS
from parklab import cli
from parklab.sprites.grammar import EXAMPLE
from parklab.store import sealed
from parklab.studio import checkpoints, compare, video
from parklab.studio.page import render_page
from parklab.studio.request import Request
from test_studio import asked, model  # noqa: F401 (a fixture)

# numpy's complaint about schedulers of diffusers
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OTHER = EXAMPLE.replace("red", "green")


def run(request, out, **options):
    """What was made and what was kept, and the report."""
    events = []
    options = {"methods": ["dense", "park"], "recall_rows": 8} | options
    report = compare.compare(request, out=out, announce=lambda *event: events.append(event), **options)
    return (
        [name for name, event in events if event == "done"],
        [name for name, event in events if event == "kept"],
        report,
    )


@pytest.fixture(scope="module")
def gallery(model, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("gallery")
    (folder / "prompts.txt").write_text(f"# two\n{EXAMPLE}\n{OTHER}\n")
    request = asked(model, steps=2)
    return request, folder, run(request, folder / "out", prompts=folder / "prompts.txt", seeds=(0, 1))


def test_every_prompt_is_made_with_every_seed_in_one_folder(gallery):
    _, folder, (made, kept, report) = gallery
    cases = report["cases"]
    assert [(case["prompt"], case["seed"]) for case in cases] == [(EXAMPLE, 0), (EXAMPLE, 1), (OTHER, 0), (OTHER, 1)]
    assert len(made) == 8 and not kept
    names = {path.name for path in (folder / "out").iterdir()}
    for case in cases:
        assert {*case["videos"].values(), case["side_by_side"]} <= names
    first, second = (video.read_mp4(folder / "out" / case["videos"]["dense"]) for case in cases[:2])
    assert not np.array_equal(first, second)
    lines = (folder / "out" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 2 and {line.rsplit(",", 1)[1] for line in lines[1:]} == {
        case["name"] for case in cases
    }


def test_recall_that_was_not_measured_is_not_taken_for_measured(model, tmp_path):  # noqa: F811
    request = asked(model, steps=2)
    run(request, tmp_path, recall_rows=0)
    assert run(request, tmp_path, recall_rows=0)[:2] == ([], ["dense", "park-quality"])
    with pytest.raises(ValueError, match=r"made with other settings \(recall_rows = 0, asked 8\); pass --overwrite"):
        run(request, tmp_path)
    assert run(request, tmp_path, overwrite=True)[2]["methods"][1]["recall"] is not None
    path = tmp_path / "park-quality.json"
    record = json.loads(path.read_text())
    del record["measured"]
    path.write_text(json.dumps(sealed(record)))
    with pytest.raises(
        ValueError,
        match=r"out: expected .*park-quality.json as park compare writes it, got none of steps; pass --overwrite",
    ):
        run(request, tmp_path)


@pytest.mark.parametrize("word", ["__VIDEOS__", "__DATA__", "__STYLE__", "__SCRIPT__"])
def test_a_mark_of_the_template_in_a_prompt_or_path_is_data(word):
    page = render_page({"prompt": word, "command": f"--out {word}/x"}, [{"dense": b"mp4"}])
    for name, text in (("data", json.dumps({"prompt": word, "command": f"--out {word}/x", "stills": []}, separators=(",", ":"))),
                       ("videos-0", '{"dense":"bXA0"}')):  # fmt: skip
        assert page.count(f'<script id="{name}" type="application/json">{text}</script>') == 1


def test_the_row_over_all_cases_is_the_mean_and_the_speed_of_all_seconds(gallery):
    report = gallery[2][2]
    rows = [case["methods"][1] for case in report["cases"]]
    whole = report["methods"][1]
    assert whole["psnr"]["mean"] == pytest.approx(np.mean([row["psnr"]["mean"] for row in rows]))
    assert whole["psnr"]["worst"] == min(row["psnr"]["worst"] for row in rows)
    dense = sum(case["methods"][0]["seconds"]["denoise"] for case in report["cases"])
    assert whole["speedup"] == pytest.approx(dense / sum(row["seconds"]["denoise"] for row in rows))


def test_a_second_run_makes_nothing_and_a_line_added_later_leaves_the_rest(gallery, monkeypatch):
    request, folder, (made, _, report) = gallery
    out, stamps = folder / "out", {}
    for path in (folder / "out").iterdir():
        stamps[path] = path.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "load_pipeline", lambda *_, **__: pytest.fail("a finished run loaded the model"))
        again = run(request, out, prompts=folder / "prompts.txt", seeds=(0, 1))
    assert again == ([], made, report) and stamps == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (folder / "more.txt").write_text(f"{OTHER}\n{EXAMPLE.replace('red', 'white')}\n{EXAMPLE}\n")
    added, kept, _ = run(request, out, prompts=folder / "more.txt", seeds=(1,))
    assert len(added) == 2 and all("white" in name and "seed-1" in name for name in added) and len(kept) == 4


def test_a_gallery_that_was_stopped_goes_on_where_it_stopped(gallery, tmp_path):
    request, folder, (made, _, whole) = gallery
    begun = []

    def stop_in_the_third(report):
        begun.append(report.step == 0)
        if sum(begun) == 3:
            raise KeyboardInterrupt

    options = {"prompts": folder / "prompts.txt", "seeds": (0, 1)}
    with pytest.raises(KeyboardInterrupt):
        run(request, tmp_path / "out", progress=stop_in_the_third, **options)
    again, kept, report = run(request, tmp_path / "out", **options)
    assert (kept, again) == (made[:2], made[2:])
    psnr = [[[row["psnr"] for row in case["methods"]] for case in each["cases"]] for each in (report, whole)]
    assert psnr[0] == psnr[1]


def test_layers_by_step_are_in_the_record(gallery):
    dense, park = gallery[2][2]["cases"][0]["methods"]
    assert park["map"]["layers"] == [["transformer", 0], ["transformer", 1]]
    assert np.shape(park["map"]["density"]) == np.shape(park["map"]["recall"]) == (2, 2)
    density, recall = np.array(park["map"]["density"], float), np.array(park["map"]["recall"], float)
    assert (density[:, 0] == 1).all() and (density[:, 1] < 1).all()  # the first step is dense
    assert np.isnan(recall[:, 0]).all() and ((recall[:, 1] > 0) & (recall[:, 1] < 1)).all()
    for step in (0, 1):  # equal layers: the mean of a step's row is that step
        assert density[:, step].mean() == pytest.approx(park["steps"][step]["density"])
    assert dense["map"]["recall"] is None and (np.array(dense["map"]["density"]) == 1).all()


def test_a_record_of_before_the_map_still_makes_a_page(model, tmp_path):  # noqa: F811
    _, _, report = run(asked(model, steps=2), tmp_path)
    records = {}
    for method in ("dense", "park-quality"):
        record = json.loads((tmp_path / f"{method}.json").read_text())
        del record["measured"]["map"]
        records[method] = sealed(record)
    case = compare.Case("", EXAMPLE, 0)
    again = compare.write_report({case: records}, tmp_path)
    assert "map" not in again["cases"][0]["methods"][1] and "map" in report["cases"][0]["methods"][1]


def test_a_record_of_before_pictures_and_loras_is_kept(model, tmp_path):  # noqa: F811
    run(asked(model, steps=2), tmp_path)
    for method in ("dense", "park-quality"):
        record = json.loads((tmp_path / f"{method}.json").read_text())
        for name in ("image", "image_hash", "lora", "lora_hash"):
            del record["request"][name]
        (tmp_path / f"{method}.json").write_text(json.dumps(sealed(record)))
    assert run(asked(model, steps=2), tmp_path)[:2] == ([], ["dense", "park-quality"])


def test_the_printed_command_asks_for_the_same_cells(gallery, monkeypatch):
    """Every option of it is one that the command has; what it asks for is finished already."""
    _, folder, (_, _, report) = gallery
    words = shlex.split(report["command"])
    words[words.index("--out") + 1] = str(folder / "out")
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(
        checkpoints, "load_pipeline", lambda *_, **__: pytest.fail("the command asks for something else")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seeds": (0, 0)}, "seeds: expected each once, got 0, 0"),
        ({"seeds": (-1,)}, "seeds: expected"),
        ({"seeds": (2**64, 1)}, "seeds: expected"),
    ],
)
def test_seeds_that_make_no_sense_are_refused(model, tmp_path, options, said):  # noqa: F811
    with pytest.raises(ValueError, match=said):
        run(asked(model), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "i2v"
    tiny.wan_image_to_video().save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    from PIL import Image

    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(np.linspace(0, 255, 60 * 90 * 3).reshape(60, 90, 3).astype(np.uint8)).save(path)
    return path


def image_request(folder, **changes) -> Request:
    small = {
        "steps": 2, "height": 32, "width": 48, "frames": 5, "text_tokens": 32, "guidance": 1.0, "dtype": "float32",
        "device": "cpu",
    }  # fmt: skip
    return Request(
        prompt="a cat", model=str(folder), changes={"query_clusters": 2, "key_clusters": 4}, **(small | changes)
    )


def test_an_image_to_video_model_begins_with_the_picture(image_model, picture, tmp_path):
    request = image_request(image_model, image=str(picture))
    made, _, report = run(request, tmp_path / "a")
    assert made == ["dense", "park-quality"] and report["settings"]["image_hash"] and "--image" in report["command"]
    darker = tmp_path / "b.png"
    from PIL import Image

    Image.new("RGB", (90, 60)).save(darker)
    run(dataclasses.replace(request, image=str(darker)), tmp_path / "b")
    assert not np.array_equal(video.read_mp4(tmp_path / "a/dense.mp4"), video.read_mp4(tmp_path / "b/dense.mp4"))
    # another picture under the same name is another request
    picture_bytes = picture.read_bytes()
    try:
        picture.write_bytes(darker.read_bytes())
        with pytest.raises(ValueError, match="image_hash = "):
            run(request, tmp_path / "a")
    finally:
        picture.write_bytes(picture_bytes)


def test_a_picture_and_its_model_belong_together(image_model, model, picture, tmp_path):  # noqa: F811
    with pytest.raises(
        ValueError,
        match=r"image: expected a picture, which WanImageToVideoPipeline begins with, got none; pass --image",
    ):
        run(image_request(image_model), tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"image: expected none, since WanPipeline takes no picture.*leave out --image"
    ):
        run(asked(model, image=str(picture)), tmp_path / "b")


def test_a_lora_is_in_every_method_and_another_file_is_another_request(tmp_path):
    peft = pytest.importorskip("peft")
    pipe = tiny.wan()
    pipe.save_pretrained(tmp_path / "model", safe_serialization=True)
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    layers = peft.utils.get_peft_model_state_dict(pipe.transformer)
    type(pipe).save_lora_weights(tmp_path, transformer_lora_layers=layers)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    request = image_request(tmp_path / "model")
    run(request, tmp_path / "plain")
    made, _, report = run(dataclasses.replace(request, lora=str(file)), tmp_path / "adapted")
    assert made == ["dense", "park-quality"] and "--lora" in report["command"] and report["settings"]["lora_hash"]
    for method in made:
        assert not np.array_equal(
            *(video.read_mp4(tmp_path / folder / f"{method}.mp4") for folder in ("plain", "adapted"))
        )


@pytest.fixture(scope="module")
def profiles(model, tmp_path_factory):  # noqa: F811
    request, out = asked(model, steps=4), tmp_path_factory.mktemp("profiles")
    methods = ["dense", "park", "sta"]
    return request, methods, out, run(request, out, methods=methods, profiles=["paper", "fast"])


def test_profiles_stand_beside_each_other_and_beside_methods_that_have_none(profiles):
    _, _, out, (made, _, report) = profiles
    assert made == ["dense", "park-paper", "park-fast", "sta"]
    assert [row["label"] for row in report["methods"]] == ["dense", "PARK, paper", "PARK, fast", "sta"]
    paper, fast = report["methods"][1:3]
    assert fast["changes"] == profiles[0].changes and not report["methods"][0]["changes"]
    assert (paper["config"]["anchors"], fast["config"]["anchors"]) == (None, 7) and fast["profile"] == "fast"
    assert not np.array_equal(*(video.read_mp4(out / f"park-{name}.mp4") for name in ("paper", "fast")))
    assert fast["verdict"].startswith("PARK, fast: ") and "PARK, fast" in (out / "index.html").read_text()
    lines = [line.split(",")[:2] for line in (out / "metrics.csv").read_text().splitlines()]
    assert lines == [["method", "profile"], ["dense", ""], ["park", "paper"], ["park", "fast"], ["sta", ""]]
    assert "--profile paper,fast" in report["command"]


def test_a_profile_that_is_added_later_leaves_the_others(profiles, monkeypatch):
    request, methods, out, (made, _, _) = profiles
    added, kept, report = run(request, out, methods=methods, profiles=["paper", "quality", "fast"])
    assert added == ["park-quality"] and kept == made
    assert [row["name"] for row in report["methods"]] == ["dense", "park-paper", "park-quality", "park-fast", "sta"]
    monkeypatch.setattr(
        checkpoints, "load_pipeline", lambda *_, **__: pytest.fail("one profile is a variant of the several")
    )
    assert run(dataclasses.replace(request, preset="fast"), out, methods=methods)[1] == ["dense", "park-fast", "sta"]


def test_two_variants_of_one_name_are_refused(model, monkeypatch):  # noqa: F811
    entry = dataclasses.replace(METHODS["sta"], name="park-fast")
    monkeypatch.setitem(METHODS.data, "park-fast", entry)
    with pytest.raises(ValueError, match="profile: expected names that tell methods apart, got park-fast twice"):
        compare.choose_variants(asked(model), ["dense", "park", "park-fast"], ["fast"])
