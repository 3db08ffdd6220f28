"""Which backend is chosen and why, what is refused, what kernels need of a version of Triton, and private names of torch
and diffusers: they stand in one module, and where a version lacks one the plain path runs and says why.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parkattn
from parkattn import CallSite, Park, ParkConfig, compat, ops, park_attention
from parkattn.backend import resolve
from parkattn.ops.attend.definition import DefinedAttention
from parkattn.ops.cluster.definition import initial_tokens
from parkattn.ops.importance.definition import ESTIMATORS

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """Answers about a GPU that is not here."""
    pytest.importorskip("triton")
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_auto_takes_the_definitions_off_cuda_and_says_so():
    for device in ("cpu", "meta"):
        chosen = resolve("auto", torch.device(device), torch.float32, 48)
        assert chosen.name == "reference" and "auto" in chosen.reason and device in chosen.reason


@pytest.mark.parametrize(
    ("capability", "head_dim", "kernel"),
    [
        ((9, 0), 128, "Gluon"),
        ((9, 0), 64, "Gluon"),
        ((9, 0), 256, "Triton"),
        ((8, 0), 128, "Triton"),
        ((12, 0), 128, "Triton"),
    ],
)
def test_auto_takes_triton_on_cuda_with_the_reason_for_its_attention_kernel(gpu, capability, head_dim, kernel):
    gpu(*capability)
    chosen = resolve("auto", CUDA, torch.bfloat16, head_dim)
    assert chosen.name == "triton"
    assert f"attention in {kernel} because" in chosen.reason
    assert chosen.hopper == (kernel == "Gluon")


@pytest.mark.parametrize(
    ("capability", "device", "dtype", "head_dim", "got"),
    [
        ((9, 0), CPU, torch.bfloat16, 128, "cpu"),
        ((9, 0), CUDA, torch.float32, 128, "float32"),
        ((9, 0), CUDA, torch.float64, 128, "float64"),
        ((9, 0), CUDA, torch.bfloat16, 96, "96"),
        ((7, 5), CUDA, torch.float16, 128, "sm_75"),
    ],
)
@pytest.mark.parametrize("name", ["triton", "auto"])
def test_what_the_kernels_cannot_run_is_refused_in_one_line_with_the_alternative(
    gpu, name, capability, device, dtype, head_dim, got
):
    if name == "auto" and device == CPU:
        return
    gpu(*capability)
    with pytest.raises((ValueError, TypeError)) as refused:
        resolve(name, device, dtype, head_dim)
    message = str(refused.value)
    assert got in message and "use backend='reference'" in message and "\n" not in message


def test_a_call_on_the_cpu_is_refused_not_redirected():
    pytest.importorskip("triton")
    q = torch.randn(1, 1, 20, 64).bfloat16()
    with pytest.raises(ValueError, match="use backend='reference'"):
        park_attention(q, q, q, ParkConfig(backend="triton"))


def test_missing_packages_name_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'parkattn\[flashinfer\]'"):
        resolve("flashinfer", CUDA, torch.bfloat16, 128)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'parkattn\[triton\]'"):
        resolve("triton", CUDA, torch.bfloat16, 128)


def test_the_definitions_load_no_triton():
    use = "import parkattn; x = torch.randn(1, 1, 30, 8); parkattn.park_attention(x, x, x)"
    code = f"import sys, torch; before = 'triton' in sys.modules; {use}; print('triton' in sys.modules and not before)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_statistics_say_what_computed_a_sparse_step_and_why():
    q = torch.randn(1, 2, 60, 16, generator=torch.Generator().manual_seed(0))
    park = Park(ParkConfig(query_clusters=4, key_clusters=6, dense_steps=1))
    said = [park(q, q, q, CallSite(step=step, total_steps=50)).stats.backend for step in (0, 1, 2)]
    assert said == ["", *2 * [resolve("auto", CPU, torch.float32, 16).reason]]


@pytest.mark.parametrize("where", ["importance", "attention"])
def test_out_of_memory_says_how_much_was_asked_for_and_what_to_do(monkeypatch, where):
    def full(*_args, **_named):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 3.25 GiB. GPU 0 has a total capacity of 139 GiB of which 1 GiB is free."
        )

    if where == "importance":
        monkeypatch.setitem(ESTIMATORS, "pama", full)
    else:
        monkeypatch.setattr(DefinedAttention, "over_kept", full)
    q = torch.randn(1, 2, 60, 16)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        park_attention(q, q, q, ParkConfig(query_clusters=4, key_clusters=6))
    message = str(refused.value)
    assert (
        message.count("memory:") == 1
        and "3.25 GiB" in message
        and "[1, 2, 60, 16]" in message
        and "fewer heads" in message
    )
    assert "\n" not in message and "3.25 GiB" in str(refused.value.__cause__)


def test_an_unknown_backend_is_refused_when_the_config_is_made():
    with pytest.raises(ValueError, match="backend: expected one of auto, flashinfer, reference, triton"):
        ParkConfig(backend="cuda")
    assert ParkConfig.from_dict(ParkConfig(backend="reference").to_dict()).backend == "reference"


@given(st.integers(0, 99), st.integers(1, 60), st.integers(1, 40), st.floats(0.05, 1))
@settings(deadline=None)
def test_first_tokens_among_valid_ones_are_those_of_the_definition(seed, n, count, share):
    from parkattn.ops.cluster.kernels import first_tokens

    valid = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < share
    valid[:, seed % n] = True
    count = min(count, n)
    for row, found in zip(valid, first_tokens(torch.empty(2, 1, n, 1), count, seed, valid), strict=True):
        members = row.nonzero().squeeze(1)
        expected = members[initial_tokens(len(members), min(count, len(members)), seed)]
        assert torch.equal(found, torch.cat([expected, expected[:1].expand(count - len(expected))]))


# Versions of Triton -------------------------------------------------------------------------------------


@pytest.fixture
def versions():
    pytest.importorskip("triton")
    from parkattn.ops import triton_versions

    return triton_versions


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.0+git1234"])
def test_versions_with_the_hopper_kernel(versions, version):
    assert versions.why_no_gluon(version) is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_step_aside_with_a_reason(versions, version):
    assert versions.why_no_gluon(version) == f"the Hopper kernel builds with Triton 3.6 to 3.9, not with {version}"


def test_an_unknown_version_takes_the_plain_kernels_on_hopper(versions, monkeypatch):
    from parkattn.ops import tiles

    why_no_gluon = versions.why_no_gluon
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    taken = resolve("triton", torch.device("cuda"), torch.bfloat16, 128)
    assert taken.hopper and tiles.full_key_tile(128, torch.bfloat16, 90, 512)["GLUON"]
    for place in (versions, tiles):
        monkeypatch.setattr(place, "why_no_gluon", lambda: why_no_gluon("3.10.0"))
    taken = resolve("triton", torch.device("cuda"), torch.bfloat16, 128)
    assert not taken.hopper and taken.reason.endswith("not with 3.10.0")
    assert "GLUON" not in tiles.full_key_tile(128, torch.bfloat16, 90, 512)


def launches(tree: ast.AST) -> list[ast.Call]:
    """Calls of the form kernel[grid](...)."""
    return [x for x in ast.walk(tree) if isinstance(x, ast.Call) and isinstance(x.func, ast.Subscript)]


def test_every_launch_says_whether_operations_are_fused():
    found = 0
    for file in Path(ops.__file__).parent.rglob("*.py"):
        for call in launches(ast.parse(file.read_text())):
            found += 1
            options = {x.value.id for x in call.keywords if x.arg is None and isinstance(x.value, ast.Name)}
            assert options & {"FP_FUSION", "OPTIONS"}, f"{file.name}:{call.lineno} leaves FP fusion to Triton's default"
    assert found > 20


# Private names of torch and diffusers -----------------------------------------------------------------


SOURCE = Path(parkattn.__file__).parent
RECORD = SOURCE.parents[1] / "benchmarks/results/matrix.json"
OF_PYTHON = {"_replace", "_asdict", "_fields", "_make"}  # of a NamedTuple
OF_SERVERS = {"_cached_get_backend_cls", "_attention_backend"}  # names of the program that a host is for
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def private_names(tree: ast.AST) -> set[str]:
    """Attributes, imported names and modules, and strings asked for by getattr, that begin with one underscore."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} | set((node.module or "").split("."))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            found |= {part.value for part in node.args[1:2] if isinstance(part, ast.Constant)}
    return {name for name in found if PRIVATE.fullmatch(str(name))}


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines or sets on its own objects."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            found.add(node.attr)
    return found


def test_private_names_of_others_are_in_compat_alone():
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if "ops" not in path.parts}
    own = set().union(*(own_names(tree) for tree in trees.values())) | OF_PYTHON | OF_SERVERS
    found = {path.name: private_names(tree) - own for path, tree in trees.items() if path.name != "compat.py"}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_bounds_are_those_that_the_matrix_ran():
    made = json.loads(RECORD.read_text())["environments"].values()
    for package, bounds in compat.SEEN.items():
        ran = {tuple(map(int, found.split(".")[:2])) for run in made if (found := run["versions"].get(package))}
        assert tuple(".".join(map(str, each)) for each in (min(ran), max(ran))) == bounds


@pytest.fixture
def block():
    return torch.nn.Linear(2, 2)


def test_calls_are_intercepted_and_given_back(block):
    undo = compat.intercept_calls(block, lambda x: 2 * compat.stock_call(block)(x))
    plain = torch.nn.Linear.forward(block, torch.ones(2))
    assert torch.equal(block(torch.ones(2)), 2 * plain)
    undo()
    assert torch.equal(block(torch.ones(2)), plain)


def test_a_torch_without_the_seam_of_calls_runs_the_module_as_it_is(block, monkeypatch):
    monkeypatch.delattr(torch.nn.Module, "_compiled_call_impl")
    assert "has no Module._compiled_call_impl, which 2.8 to" in compat.why_not_intercepted()
    compat.intercept_calls(block, None)()
    with pytest.raises(AttributeError):
        _ = block._compiled_call_impl


@pytest.mark.parametrize(
    "where, name, ask",
    [
        (torch._C, "_len_torch_dispatch_stack", compat.why_compiler_is_off),
        (torch.nn.modules.module, "_has_any_global_hook", compat.why_hooks_are_not_known),
    ],
)
def test_a_torch_that_cannot_be_asked_leaves_blocks_uncompiled_and_says_why(where, name, ask, monkeypatch):
    monkeypatch.delattr(where, name)
    assert re.search(rf"^torch \S+ has no .*{name}", ask())


def test_without_diffusers_own_parallel_attention_calls_are_dense_with_that_reason(monkeypatch):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    from types import SimpleNamespace

    from parkattn.hosts.diffusers.sequence_parallel import why_not_ulysses

    parallel = SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=1, ulysses_degree=2))
    assert why_not_ulysses(parallel, 0) is None
    monkeypatch.delattr(dispatch, "_templated_context_parallel_attention")
    assert "has no _templated_context_parallel_attention" in why_not_ulysses(parallel, 0)


def test_without_diffusers_mesh_of_ranks_heads_stay_with_that_reason():
    pytest.importorskip("diffusers")
    from types import SimpleNamespace

    from parkattn.hosts.diffusers.sequence_parallel import why_not_balanced

    degrees = SimpleNamespace(ulysses_degree=2, _ulysses_mesh=object())
    parallel = SimpleNamespace(context_parallel_config=degrees)
    assert why_not_balanced(parallel, 4, 4) is None
    del degrees._ulysses_mesh
    assert "has no _ulysses_mesh" in why_not_balanced(parallel, 4, 4)
