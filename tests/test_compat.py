"""Private names of torch and diffusers stand in one module, and where a version lacks one the plain path runs and says
why.
"""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import parkattn
from parkattn import compat

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
