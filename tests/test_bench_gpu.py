"""What measures the GPU kernels, as far as it can be checked without one: rows of a table, fits, plots, refusals, the gates'
own teeth, the sanitizers.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import json
import os
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from parkattn.ops.attend.definition import attend, attend_with_lse
from parkattn.plan import Blocks
from parklab.bench import attend as attention
from parklab.bench import gpu, layer, official, plans, sanitize, timing
from parklab.bench.gates import against_exact
from parklab.bench.problems import TINY, Shape, random_plan, rows, tiled_plan
from parklab.bench.registry import BENCHES

CPU = torch.device("cpu")


def test_tiles_of_a_plan_keep_what_their_block_keeps_or_as_much_each_their_own():
    shape = Shape(2, 200, 4, 16, 32)
    plan = random_plan(shape, 0.3, CPU, empty=True)
    q, k, v = rows(shape, CPU, torch.float32)
    tiles, apart = (tiled_plan(plan, 16, apart=each) for each in (False, True))
    assert tiles.mask.shape[2] == 200 // 16 + 4
    torch.testing.assert_close(tiles.density(), plan.density())
    outs = [attend(q, k, v, each.queries, each.keys, each.mask) for each in (plan, tiles)]
    torch.testing.assert_close(*outs)
    assert torch.equal(apart.mask.sum(-1), tiles.mask.sum(-1)) and not torch.equal(apart.mask, tiles.mask)


def test_rows_are_timed_in_two_rounds_and_compared_with_the_first_or_the_one_they_name(monkeypatch):
    times = iter([2.0, 4.0, 1.0, 3.0, 2.0, 4.0])  # a, b, c and then c, b, a
    monkeypatch.setattr(timing, "_each_ms", lambda call, repeats: [next(times)] * repeats)
    table = {name: timing.Row(int) for name in "ab"} | {"c": timing.Row(int, 4e9, "b", {"bar": 0.5})}
    a, b, c = timing.measured("x", table, 3, {"tflops": 8.0}, case="tiny")
    assert [row["ms"] for row in (a, b, c)] == [3.0, 3.0, 2.0] and a["ratio"] == b["ratio"] == 1
    assert (a["baseline"], c["baseline"], c["ratio"]) == ("a", "b", 2 / 3)
    assert (a["useful_tflops"], c["useful_tflops"], c["share_of_roofline"]) == (None, 2.0, 0.25)
    assert c["benchmark"] == "x" and c["case"] == "tiny" and c["kernel"] == "c" and c["bar"] == 0.5


@pytest.mark.parametrize(("off", "units", "ok"), [(3, 1, True), (4, 1, False), (4, 2, True), (torch.nan, 9, False)])
def test_an_error_may_be_twice_pytorchs_and_a_unit(off, units, ok):
    exact = torch.ones(3, dtype=torch.float64)
    found, plain = ((exact + error * 2**-7).bfloat16() for error in (off, 1))
    assert against_exact("rule", found, exact, plain, units=units)["ok"] is ok


def points(over: str, part: str, law) -> list[dict]:
    return [{"benchmark": "scaling", "over": over, "part": part, over: x, "ms": law(x)} for x in (0.1, 0.2, 0.5, 1.0)]


def test_a_fit_finds_the_exponent_and_the_fixed_cost():
    measured = points("density", "attention", lambda x: 3 + 40 * x) + points("length", "dense", lambda x: 7 * x**2)
    density, length = layer.fits(measured)
    assert (density["part"], length["part"]) == ("attention: fit", "dense: fit")
    assert (density["ms_fixed"], density["ms_per_density"]) == pytest.approx((3, 40))
    assert density["worst_residual"] < 1e-12 and density["exponent"] < 1, "a fixed cost bends the curve"
    assert (length["exponent"], length["exponent_of_last_doubling"]) == pytest.approx((2, 2))


def test_the_plot_is_drawn_from_records_and_from_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    measured = points("density", "attention", lambda x: 50 * x) + points("length", "attention", lambda x: x**2)
    record, plot = tmp_path / "scaling.jsonl", tmp_path / "new" / "scaling.svg"
    record.write_text("".join(json.dumps(p) + "\n" for p in measured + list(layer.fits(measured))) + '{"torn')
    layer.draw(record, plot)
    assert plot.read_text().count("<svg") == 1
    record.write_text('{"benchmark": "pama"}\n')
    with pytest.raises(ValueError, match="measure first"):
        layer.draw(record, plot)


@pytest.mark.parametrize(
    ("kernel", "small", "large"),
    [
        ("off by 5 %", [False, True], [False, True]),  # wrong, but the same with and without the other heads
        ("leaky", [True, True], [True, False]),  # a head depends on the others
    ],
)
def test_pama_gates_fail_a_kernel_that_is_wrong(monkeypatch, kernel, small, large):
    def wrong(q, ends, centroids, sizes, *, out=None):
        exact = plans.pama_torch(q, ends, centroids, sizes, dtype=torch.float64).float()
        return exact.mul(1.05) if kernel == "off by 5 %" else exact + 1e-7 * q.shape[0]

    monkeypatch.setattr(plans, "pama_kernels", lambda key_blocks: {kernel: wrong})
    assert [case["ok"] for case in plans.gate_pama(CPU, rehearse=True)] == small
    assert [case["ok"] for case in plans.gate_large_pama(CPU, rehearse=True)] == large


@pytest.mark.parametrize("lost", [False, True])
def test_rows_that_quick_exponentials_lose_fail_the_gate_where_nobody_writes_them(monkeypatch, lost):
    def kernel(q, k, v, ends, key_ends, mask, *, out, with_lse, quick=True):
        blocks = (
            Blocks(torch.zeros(x.shape[:2])[None], None, x_ends[None]) for x, x_ends in ((q, ends), (k, key_ends))
        )
        found, lse = attend_with_lse(q[None], k[None], v[None], *blocks, mask[None])
        steep = q.abs().amax((1, 2), keepdim=True) > 100
        return torch.where(steep & quick & lost, out, found[0]), lse[0]

    monkeypatch.setattr(attention, "_launch", {"gluon": kernel}.get)
    cases = list(attention._gate_in_blocks("rows", "gluon", TINY, torch.bfloat16, False, CPU, True))
    failed = [case["gate"] for case in cases if not case["ok"]]
    assert failed == ["rows: quick as careful where scores are steep"] * lost and len(cases) == 5


def test_torch_baseline_is_the_definition():
    from parkattn.ops.importance.definition import centroid_log_mass
    from parkattn.segments import segment_mean

    q, ends, centroids, sizes = plans.pama_case(Shape(2, 60, 5, 7, 16), CPU, torch.float64)
    labels = torch.stack([torch.arange(5).repeat_interleave(row.diff()) for row in ends])
    weights = centroid_log_mass(q, centroids, sizes).softmax(-1)
    torch.testing.assert_close(plans.pama_torch(q, ends, centroids, sizes), segment_mean(weights, labels, 5)[0])


def test_flashinfer_is_left_out_of_the_whole_and_refused_alone_where_it_is_missing(monkeypatch, tmp_path):
    asked, done = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr(gpu, "bench_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(gpu, "gpu_environment", dict)
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **_: asked.append(command[6]) or done)
    for why in (None, "not installed"):
        monkeypatch.setattr(official.Package, "absence", lambda package, device, why=why: why)
        asked.clear()
        gpu.run_all(tmp_path)
        without = {"gate-flashinfer", "flashinfer"} if why else set()
        assert set(asked) == set(gpu.SECTIONS) - without > {"gate-large-pama", "scaling"}
        for name in BENCHES.keys() & set(asked):
            gates = [asked.index(gate) for gate in BENCHES[name].gates]
            assert max(gates) < asked.index(name), "a wrong answer is not timed"
        assert asked.index("attend") < asked.index("gate-dense"), "what runs out of time is the last bench"
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'parkattn\[flashinfer\]'"):
        next(official.gate_flashinfer(CPU))


RAN = '{"gate": "a", "ok": true}\nall checks ran\n'
MEMCHECK = f"{RAN}========= ERROR SUMMARY: 0 errors\n"
REPORTS = """
========= Error: Race reported between Read access at full_key_hopper+0x42b0 in hopper.py:111
=========     and Write access at full_key_hopper+0xb100 in hopper.py:106 [288 hazards]
========= RACECHECK SUMMARY: 20 hazards displayed (95 errors, 0 warnings)
"""
CONSAN = (
    "x.py:1: f: block: [0,0,0], thread: [1,0,0] Assertion `Buffer being accessed has outstanding writes` failed.\n" * 3
)
APART, CONTROL = "racecheck, warp-specialised kernels", "racecheck, PAMA without a meeting"


@pytest.mark.parametrize(
    ("tool", "printed", "ok", "errors"),
    [
        ("memcheck", MEMCHECK, True, 0),
        ("memcheck", MEMCHECK.replace("0 errors", "2 errors"), False, 2),
        ("memcheck", MEMCHECK.replace("true", "false"), False, 0),
        ("memcheck", "Segmentation fault", False, None),
        ("memcheck", MEMCHECK.replace("all checks ran", ""), False, 0),
        ("memcheck", MEMCHECK + "out of time", False, 0),
        ("racecheck", RAN + REPORTS, False, 95),
        ("racecheck", RAN + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True, 0),
        (APART, RAN + REPORTS, False, 95),
        (CONTROL, REPORTS, True, 95),
        (CONTROL, RAN + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", False, 0),
        (CONTROL, "Segmentation fault", False, None),
        (CONTROL, "CUDA_ERROR_LAUNCH_FAILED\n========= ERROR SUMMARY: 1 error", False, 1),
        (CONTROL, REPORTS.replace("hopper.py", "other.py"), False, 95),
        ("memcheck", "all checks ran\n========= ERROR SUMMARY: 0 errors", False, 0),
        ("ConSan, PAMA", "all checks ran\n", False, 0),
        ("ConSan, PAMA without a wait", "compiler: Assertion `isa<To>(Val)` failed.\nAborted", False, 1),
        ("ConSan, PAMA without a wait", "thread: [1,0,0] Assertion `index out of bounds` failed.", False, 1),
        ("ConSan, PAMA", RAN, True, 0),
        ("ConSan, PAMA", CONSAN, False, 1),
        ("ConSan, PAMA", "RuntimeError: no allocator", False, 0),
        ("ConSan, PAMA without a wait", CONSAN, True, 1),
        ("ConSan, PAMA without a wait", RAN, False, 0),
        ("ConSan, PAMA without a wait", "RuntimeError: no allocator", False, 0),
    ],
)
def test_what_a_sanitizer_printed_is_judged(tool, printed, ok, errors):
    found = sanitize.judge(tool, printed)
    assert (found["ok"], found["errors"]) == (ok, errors)
    ended = ok if "without" in tool else "all checks ran" in printed and "out of time" not in printed
    assert ("stopped" in found) != ended
    if REPORTS in printed:
        assert found["found"] == ["full_key_hopper hopper.py:106", "full_key_hopper hopper.py:111"]


def test_a_watched_process_says_when_all_checks_ran(monkeypatch, capsys):
    """Under the interpreter no kernel runs here: the gates are exchanged."""
    for name in sanitize.WATCHED:
        gate = {f"gate-{name}": (lambda device, *, rehearse, name=name: iter([{"gate": name}]), 0)}
        monkeypatch.setitem(BENCHES, name, BENCHES[name]._replace(gates=gate))
    checks = sanitize.checks("sanitize", CPU)
    assert [next(checks)["gate"] for _ in sanitize.WATCHED] == ["pama", "kmeans", "qrkc", "attend"]
    assert capsys.readouterr().out == ""
    assert next(checks, None) is None
    assert capsys.readouterr().out == f"{sanitize.ALL_RAN}\n"


@pytest.fixture
def on_path(monkeypatch, tmp_path):
    """Writes a compute-sanitizer, the only one on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: None)

    def put(script: str, folder: pathlib.Path = tmp_path) -> pathlib.Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compute-sanitizer").write_text(script)
        (folder / "compute-sanitizer").chmod(0o755)
        return folder / "compute-sanitizer"

    return put


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (None, r"expected compute-sanitizer, got none on the PATH; pip install 'parklab\[sanitize\]'"),
        (
            "#!/bin/sh\necho 'Version 2025.3.1.0 (build 36400806)'",
            r"expected compute-sanitizer 2026.3 or newer.*, got Version 2025.3.1.0 from compute-sanitizer; pip",
        ),
        ("#!/bin/sh\necho 'what?'", "or newer.*, got no version"),
        ("no program", r"expected compute-sanitizer to run, got .*; pip install"),
    ],
)
def test_a_sanitizer_that_is_missing_old_or_broken_is_refused(on_path, script, complaint):
    if script:
        on_path(script)
    with pytest.raises(ValueError, match=complaint):
        next(sanitize.run_rounds())


@pytest.mark.parametrize("version", ["2026.3.0.0", "2027.1.0.0"])
def test_the_sanitizer_is_found_where_it_is_new_enough(on_path, version):
    program = on_path(f"#!/bin/sh\necho 'Version {version} (build 1)'")
    assert sanitize.compute_sanitizer() == (str(program), version)


def test_no_watched_program_outlives_its_time(on_path, monkeypatch, tmp_path):
    """A sanitizer is the parent of what it watches: both end."""
    started = f"sleep 300 & echo $! > {tmp_path}/new.$$; mv {tmp_path}/new.$$ {tmp_path}/child.$$; wait"
    on_path(f'#!/bin/sh\n[ "$1" = --version ] && echo Version 2026.3.0.0 && exit\n{started}\n')

    def children() -> list[int]:
        return [int(path.read_text()) for path in tmp_path.glob("child.*")]

    def environment_once_both_run() -> dict:
        wait_until(lambda: len(children()) == 2)
        return {}

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sanitize, "gpu_environment", environment_once_both_run)
    (first, _) = rounds = list(sanitize.run_rounds(["memcheck", "synccheck"], limit_s=0))
    assert not any(r["ok"] for r in rounds) and first["stopped"].endswith("out of time")
    wait_until(lambda: not any(alive(pid) for pid in children()))  # what was killed is gone a moment later


def wait_until(done, patience_s: float = 60) -> None:
    ends = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A process that ended and that nobody has asked after yet is not."""
    state = pathlib.Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_installed_sanitizer_goes_before_the_toolkits(on_path, monkeypatch, tmp_path):
    on_path("#!/bin/sh\necho Version 2026.3.0.0")
    ours = on_path("#!/bin/sh\necho Version 2026.4.0.0", tmp_path / "nvidia" / "cu13" / "bin")
    place = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    place.submodule_search_locations = [str(tmp_path / "elsewhere"), str(tmp_path / "nvidia")]
    monkeypatch.setattr(sanitize.importlib.util, "find_spec", lambda name: place)
    assert sanitize.compute_sanitizer()[1] == "2026.4.0.0"
    ours.chmod(0o644)  # unpacked by something else than pip
    assert sanitize.compute_sanitizer()[1] == "2026.3.0.0"


@pytest.fixture
def shipped(monkeypatch):
    """The PAMA kernel, in whose place a changed copy may stand for the length of a test."""
    module = importlib.import_module(sanitize.PAMA)
    monkeypatch.setitem(sys.modules, sanitize.PAMA, module)
    return inspect.getsource(module)


@pytest.mark.parametrize(
    ("changes", "word"), [(sanitize.FORGET_A_WAIT, "mbarrier.wait("), (sanitize.FORGET_THE_BARRIER, "barrier_sync(")]
)
def test_a_broken_kernel_is_the_kernel_without_one_line(shipped, changes, word):
    sanitize.exchange(sanitize.PAMA, changes)
    broken = inspect.getsource(sys.modules[sanitize.PAMA])
    assert broken.count(word) == shipped.count(word) - 1
    assert len(broken.splitlines()) == len(shipped.splitlines()) - 1


def test_a_change_that_no_longer_fits_its_kernel_is_refused(shipped):
    with pytest.raises(RuntimeError, match="expected 'no such line' once, got it 0 times; bring"):
        sanitize.exchange(sanitize.PAMA, {"no such line": ""})
    assert inspect.getsource(sys.modules[sanitize.PAMA]) == shipped


def test_what_consan_is_given_compiles_and_has_no_hardware_barriers():
    """In a process of its own: modules are exchanged there."""
    code = (
        "from parklab.bench import sanitize; sanitize._prepare_for_consan(forget_a_wait=False);"
        "from parkattn.ops.importance import hopper as pama; from parkattn.ops.attend import hopper as attention;"
        "import machine_code, test_kernels_attend_builds, test_kernels_retrieval; from triton.backends.compiler import GPUTarget;"
        "print(attention.gluon_tile(64).constants(64)['CONSUMER_REGISTERS'], *('parkattn' in m.__file__ for m in (pama, attention)));"
        "builds = list(test_kernels_retrieval.gluon_builds(GPUTarget('cuda', 90, 32)));"
        "assert not any(machine_code.barriers(built.asm['ptx'])[0] for _, built in builds);"
        "test_kernels_attend_builds.build_gluon(64, 'fp16', True, False, numbers=set()); print('compiled')"
    )
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join(map(str, [here, here.parent / "src", here.parent / "lab/src"]))
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["168", "False", "False", "compiled"]
