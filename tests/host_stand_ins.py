"""What tests of hosts share: a method that notes its calls; attention that stands in for a server's own, its modules and
wheel on a CPU, requests in turn, and one graph for all layers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention

from parkattn.site import AttentionOutput, AttentionStats, CallSite

GRID, STEPS, LAYERS, HEADS = (5, 8, 8), 4, 2, 2
VIDEO = 5 * 8 * 8
SMALL = {"profile": "paper", "query_clusters": 4, "key_clusters": 8, "dense_steps": 0, "min_tokens": 0}
KEEP_ALL, SPARSE = {**SMALL, "top_p": 1.0}, {**SMALL, "top_p": 0.5}


class Recording:
    """A dense method that notes the sites of its calls; later: the phase that it reports after the first step."""

    name = "recording"

    def __init__(self, later: str = "dense", state_bytes: int = 0) -> None:
        self.later, self.state_bytes, self.resets = later, state_bytes, 0
        self.sites: list[CallSite] = []

    def __call__(self, q, k, v, site):
        self.sites.append(site)
        phase = self.later if site.step else "dense"
        return AttentionOutput(site.dense(), AttentionStats(phase, "noted", q.new_ones(q.shape[:2])))

    def reset(self) -> None:
        self.resets += 1


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# Servers -------------------------------------------------------------------------------------------------


class DenseImpl:
    def __init__(self, softmax_scale: float, **others: Any) -> None:
        self.softmax_scale = softmax_scale

    def forward(self, q, k, v, attn_metadata=None):
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*by_head, scale=self.softmax_scale).transpose(1, 2)

    def forward_varlen(self, q, k, v, **told):
        return self.forward(q[None], k[None], v[None])[0]


def tokens(dim: int, count: int = VIDEO, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 1, count, HEADS, dim, generator=torch.Generator().manual_seed(seed))


def put_modules(monkeypatch: Any, root: str, host: str, parts: dict[str, dict[str, Any]]) -> Any:
    """The host's backend, imported among modules of these names and contents instead of the server's."""
    package, _, _ = root.partition(".")
    for name in list(sys.modules):
        if name == package or name.startswith((f"{package}.", f"parkattn.hosts.{host}.")):
            monkeypatch.delitem(sys.modules, name)
    for name, held in parts.items():
        module = types.ModuleType(f"{root}.{name}")
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return importlib.import_module(f"parkattn.hosts.{host}.backend")


def calls_by_layer(report: Any) -> dict[int, int]:
    return {row["layer"]: row["refresh"] + row["reuse"] for row in report.layers}


def expect_apart(make: Callable[[int], Any], step: Callable[[Any, int], Any], steps: int = STEPS) -> tuple[Any, Any]:
    """Two requests in turn are as each of them alone -> those that ran in turn."""
    alone = {seed: [step(request, n) for n in range(steps)] for seed, request in ((1, make(1)), (2, make(2)))}
    pair = make(1), make(2)
    for n in range(steps):
        for request in pair:
            torch.testing.assert_close(step(request, n), alone[request.seed][n], rtol=0, atol=0)
    return pair


class Around(torch.nn.Module):
    """A layer around its attention."""

    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.impl = impl

    def forward(self, q, k, v, metadata):
        return self.impl.forward(2 * q, k, v, metadata) + 1


def in_one_graph(stack: list[Any], *given: Any) -> list[torch.Tensor]:
    """What compiled layers give; one graph must serve them all."""
    graphs = CompileCounter()
    found = [torch.compile(Around(impl), backend=graphs, fullgraph=True)(*given) for impl in stack]
    assert graphs.frame_count == 1
    return found


# With a server's wheel -----------------------------------------------------------------------------------


def be_alone(patch: Any, port: int) -> None:
    """The only process; packages that look for torchvision themselves are imported before one that stands in for it."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in (told | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        patch.setenv(name, value)
    for name in ("transformers.processing_utils", "diffusers"):
        importlib.import_module(name)


def without_torchvision(patch: Any, **attributes: Any) -> None:
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional", ".io"):
            stand_in = mock.MagicMock(__spec__=None, __version__="0", **attributes)
            patch.setitem(sys.modules, f"torchvision{name}", stand_in)


def randomised(model: Any, spread: float) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * spread).to(parameter.dtype)
    return model
