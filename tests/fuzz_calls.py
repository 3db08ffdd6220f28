"""python tests/fuzz_calls.py [--calls N] [--seed N]

Wrong values for every public function and config field. A call may succeed or be refused in the one-line form
`name: expected X, got Y; do Z.`; anything else is a raw error. fuzz_commands.py does the same to command lines.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fractions
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch

import parkattn
import tiny_pipelines as tiny
from hangs import HangError, no_hang
from parkattn.methods import METHODS, configured_method
from parkattn.settings import MethodConfig

ONE_LINE = re.compile(r"[^\n]*\S: expected [^\n]+, got[^\n]*; [^\n]+[.?]")
REFUSALS = (TypeError, ValueError, OSError, ModuleNotFoundError)
SMALL = {"query_clusters": 2, "key_clusters": 3}
Call = Callable[[], Any]


@dataclass
class Tally:
    runs: int = 0
    refused: int = 0
    raw: list[str] = field(default_factory=list)

    def add(self, name: str, call: Call) -> None:
        self.runs += 1
        try:
            with no_hang():
                call()
        except REFUSALS as error:
            if ONE_LINE.fullmatch(str(error)):
                self.refused += 1
            else:
                self._note(name, error)
        except (Exception, SystemExit, HangError) as error:
            self._note(name, error)

    def _note(self, name: str, error: BaseException) -> None:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = "" if frame is None else f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        self.raw.append(f"{name}: {type(error).__name__}{where}: {str(error).strip()[:160]!r}")


# Values ---------------------------------------------------------------------------------------------------

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 10**9, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 10**5000, True, False, 0.0, -0.0, 0.5, 1.0, 2.5, -1.0, 1e-300,
    1e308, 1e39, float("nan"), float("inf"), -float("inf"), 1j, np.float32(0.5), np.float64(0.5), np.int64(3), np.bool_(True),
    fractions.Fraction(1, 2),
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", "x", "park", "prak", "dense", "wan2.1-14b", "wan2.1", "0.9", "None", "a\nb", "\udcff", "é" * 300, b"x", "auto", "cpu", "top_p",
)  # fmt: skip
THINGS: tuple[Any, ...] = (
    None, (), [], {}, [1], (0, 1), (1, 2, 3), ("a",), {1: 2}, {"top_p": 0.5}, {"topp": 0.5}, {"top_p": "x"}, set(), range(3), object(), int,
    len, slice(0, 2), slice(None), Ellipsis, NotImplemented, Path("x"), iter(()), np.zeros((2, 3)), np.array("x"),
)  # fmt: skip


def tensors() -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    base = [torch.randn(2, 2, 7, 16, generator=made) for _ in range(3)]
    bad = base[0].clone()
    bad[0, 0, 1] = torch.nan
    large = base[0] * 1e30
    return (
        *base, bad, large, base[0] * torch.inf, torch.zeros(2, 2, 7, 16), base[0][:, :, :5], base[0][:, :1], base[0][:1], base[0][..., :8],
        base[0][0], base[0][None], base[0][:, :, :0], base[0][:0], base[0][..., :0], base[0][:, :, :1], base[0].half(), base[0].bfloat16(),
        base[0].double(), base[0].int(), base[0].bool(), base[0].to(torch.complex64), base[0].to("meta"), base[0].to(torch.float8_e4m3fn),
        base[0].to_sparse(), base[0].mT, base[0][..., ::2], base[0][:1].expand(2, -1, -1, -1), base[0].clone().requires_grad_(),
        torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(3), torch.tensor([]), torch.tensor([0.5, 0.5]),
        torch.ones(2, 7, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool), torch.arange(14).view(2, 7) % 3 > 0, torch.ones(2, 7),
        torch.ones(2, 7, dtype=torch.bool, device="meta"), torch.nn.Parameter(base[0]),
        torch.quantize_per_tensor(base[0], 0.1, 0, torch.qint8),
    )  # fmt: skip


class Pool:
    """Everything that may be passed where something else is meant."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised and sparse tensors are announced as beta
            self.tensors = tensors()
        q, k, _ = self.qkv = self.tensors[:3]
        self.config = parkattn.ParkConfig(**SMALL)
        self.plans = (
            parkattn.build_plan(q, k, self.config), parkattn.build_plan(q[:1], k[:1], self.config),
            parkattn.build_plan(q[:, :, :5], k, self.config), parkattn.build_plan(q, k, self.config, text=slice(5, 7)),
            parkattn.build_plan(q, k, self.config, key_valid=torch.arange(7).expand(2, 7) < 5),
        )  # fmt: skip
        self.configs = (
            self.config, parkattn.ParkConfig(), MethodConfig(), *(entry.config() for entry in METHODS.values()),
        )  # fmt: skip
        self.masks = tuple(x for x in self.tensors if x.shape == (2, 7))
        self.slices = tuple(slice(a, b, c) for a in (None, 0, 5, -1, 1.5, "a", 2**64, True) for b in (None, 7, 6, 9, "b", 2**64) for c in (None, 1, 2))  # fmt: skip
        self.transformers = {name: model for name, (model, _, _) in tiny.transformers().items()}
        self.targets = (
            *self.transformers.values(), tiny.wan(), tiny.wan(experts=2), torch.nn.Linear(2, 2), torch.nn.ModuleList(),
        )  # fmt: skip
        self.methods = (parkattn.make_method("park"), parkattn.make_method("dense"), parkattn.Park, *METHODS)

    def pick(self, values: Any) -> Any:
        return values[self.random.randrange(len(values))]

    def junk(self) -> Any:
        kinds = (
            NUMBERS, NUMBERS, TEXTS, THINGS, THINGS, self.tensors, self.plans, self.configs, self.slices, self.methods,
        )  # fmt: skip
        return self.pick(self.pick(kinds))

    def spoil(self, good: dict[str, Any], likely: dict[str, Any] | None = None) -> dict[str, Any]:
        """Some of the arguments replaced: by junk, or by values of about the right kind."""
        changed = dict(good)
        names = sorted({*good, *(likely or {})})
        for name in self.random.sample(names, min(len(names), self.pick((0, 1, 1, 1, 2, 2, 3)))):
            near = name in (likely or {}) and self.random.random() < 0.6
            changed[name] = self.pick((likely or {})[name]) if near else self.junk()
        return changed

    def fields(self, config: type[MethodConfig]) -> dict[str, Any]:
        names = [f.name for f in dataclasses.fields(config)]
        some = self.random.sample(names, min(len(names), self.pick((0, 1, 1, 2, 3))))
        given = {name: self.junk() if self.random.random() < 0.5 else self.pick(NUMBERS + TEXTS[:9]) for name in some}
        if self.random.random() < 0.1:
            given[self.pick(("topp", "query_cluster", "Seed", "", "x", "é"))] = self.junk()
        return given


# API ------------------------------------------------------------------------------------------------------


def api_calls(pool: Pool, folder: Path) -> Iterator[tuple[str, Call]]:
    """Without end."""
    kinds = (
        attention, attention, plans, plans, configs, configs, methods, methods, calls_of_methods, files, hosts, entries,
    )  # fmt: skip
    while True:
        yield pool.pick(kinds)(pool, folder)


def said(name: str, arguments: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        try:
            is_tensor = isinstance(value, torch.Tensor)
            return f"{tuple(value.shape)} {value.dtype} {value.device}" if is_tensor else repr(value)[:60]
        except ValueError:  # a whole number of more digits than Python prints
            return "a huge number"

    return f"{name}({', '.join(f'{key}={short(value)}' for key, value in arguments.items())})"


def _tensor_arguments(pool: Pool, names: str) -> dict[str, Any]:
    """Mostly three that belong together, of any kind."""
    good = dict(zip(names, pool.qkv, strict=False))
    draw = pool.random.random()
    if draw < 0.3:
        return good
    if draw < 0.5:
        return dict.fromkeys(good, pool.pick(pool.tensors))
    return pool.spoil(good, dict.fromkeys(good, pool.tensors))


def _plan_arguments(pool: Pool, plan: str) -> dict[str, Any]:
    likely = {"config": pool.configs, plan: pool.plans, "text": pool.slices, "key_valid": pool.masks, "scale": NUMBERS}
    return pool.spoil({"config": pool.config}, likely)


def attention(pool: Pool, folder: Path) -> tuple[str, Call]:
    given = _tensor_arguments(pool, "qkv") | _plan_arguments(pool, "plan")

    def call() -> None:
        out = parkattn.park_attention(**given)
        assert out.shape == (*given["q"].shape[:3], given["v"].shape[3]), "another shape"

    return said("park_attention", given), call


def plans(pool: Pool, folder: Path) -> tuple[str, Call]:
    given = _tensor_arguments(pool, "qk") | _plan_arguments(pool, "start")
    return said("build_plan", given), lambda: parkattn.build_plan(**given).density()


def configs(pool: Pool, folder: Path) -> tuple[str, Call]:
    config = pool.pick([entry.config for entry in METHODS.values()])
    given = pool.fields(config)
    name = pool.pick((*config.PRESETS, *TEXTS, pool.junk()))
    model = name if isinstance(name, str) or name is None else None
    ways: dict[str, Call] = {
        "make": lambda: config(**given), "from_dict": lambda: config.from_dict(given),
        "replace": lambda: config().replace(**given), "preset": lambda: config.preset(name, **given),
        "for_model": lambda: config.for_model(model, **given), "mapping": lambda: config.from_dict(name),
        "round trip": lambda: config.from_dict(config(**given).to_dict()),
    }  # fmt: skip
    way = pool.pick(list(ways))
    q, k, _ = pool.qkv

    def call() -> None:
        made = ways[way]()
        if way == "round trip":
            assert made == config(**given), "from_dict(to_dict) is another config"
        if isinstance(made, parkattn.ParkConfig):
            parkattn.build_plan(q, k, made.replace(backend="reference"))

    return said(f"{config.__name__} {way} {type(name).__name__}", given), call


def methods(pool: Pool, folder: Path) -> tuple[str, Call]:
    config = pool.pick([entry.config for entry in METHODS.values()])
    good = {"method": pool.pick(list(METHODS)), "config": None}
    given = pool.spoil(good, {"method": pool.methods + TEXTS, "config": (*pool.configs, pool.fields(config), *TEXTS)})
    if pool.random.random() < 0.4:
        return said("make_method", given), lambda: parkattn.make_method(given["method"], given["config"])
    if pool.random.random() < 0.3:
        return said("Park", given), lambda: parkattn.Park(given["config"])
    changes = {key: value for key, value in pool.fields(config).items() if key not in ("method", "config", "model")}
    model = pool.pick((None, "wan2.1-14b", "x", 5))
    return said("configured_method", {**given, **changes}), lambda: configured_method(
        given["method"], given["config"], model=model, **changes
    )


def calls_of_methods(pool: Pool, folder: Path) -> tuple[str, Call]:
    tensors = _tensor_arguments(pool, "qkv")
    good = {"layer": 0, "step": 10, "total_steps": 50}
    likely = {"text": pool.slices, "key_valid": pool.masks, "scale": NUMBERS, "grid": ((1, 1, 7), (7, 1, 1), (2, 2, 2)), "total_steps": NUMBERS,
              "step": NUMBERS, "layer": NUMBERS, "branch": TEXTS, "transformer": TEXTS, "noise_levels": ((1.0, 0.5), ()), "ranks": THINGS}  # fmt: skip
    given = pool.spoil(good, likely)
    name = pool.pick(list(METHODS))
    known = {f.name for f in dataclasses.fields(METHODS[name].config)}
    small = {key: value for key, value in SMALL.items() if key in known}

    def call() -> None:
        site = parkattn.CallSite(**given)
        parkattn.make_method(name, METHODS[name].config(**small))(*tensors.values(), site)

    return said(f"{name} at", {**tensors, **given}), call


def files(pool: Pool, folder: Path) -> tuple[str, Call]:
    path = folder / "plan.safetensors"
    plan = pool.pick(pool.plans)
    plan.save(path)
    data = bytearray(path.read_bytes())
    way = pool.pick(("flip", "cut", "tensor", "facts", "path", "save", "device", "junk"))
    if way == "flip":
        for _ in range(pool.pick((1, 1, 3))):
            data[pool.random.randrange(len(data))] ^= 1 << pool.random.randrange(8)
        path.write_bytes(data)
    elif way == "cut":
        path.write_bytes(data[: pool.random.randrange(len(data))])
    elif way == "junk":
        path.write_bytes(pool.pick((b"", b"{}", b"\0" * 9, b"\xff" * 64, b"[" * 10_000)))
    elif way in ("tensor", "facts"):
        tensors = safetensors.torch.load_file(path)
        counts = {name: str(int(getattr(plan, name))) for name in ("query_clusters", "key_clusters", "padding")}
        facts = {"format": "parkattn.plan.1", **counts}
        name = pool.pick(sorted(tensors))
        if way == "facts":
            facts[pool.pick(sorted(facts))] = pool.pick(("", "-1", "0", "99999999999999999999", "1.5", "x", "True"))
        elif pool.random.random() < 0.3:
            del tensors[name]
        else:
            other = tensors[name]
            changes: tuple[Call, ...] = (
                other.float, other.long, lambda: other + other, lambda: -other.int(), lambda: other[..., :-1], lambda: other[0], other.flatten,
                lambda: other.flip(-1), lambda: torch.zeros_like(other), lambda: other[:, :0], lambda: torch.full_like(other, 10**9).to(other.dtype)
                if other.dtype == torch.int32 else other, lambda: torch.full(other.shape, torch.nan),
            )  # fmt: skip
            tensors[name] = pool.pick(changes)().contiguous()
        path.write_bytes(safetensors.torch.save(tensors, metadata=facts))
    if way == "path":
        odd = ("", None, 5, b"x", pool.junk(), "é" * 300, "a\0b")
        where = pool.pick((folder, folder / "absent", folder / "absent" / "x", *odd, folder / "\udcff"))
        return said("Plan.load", {"path": where}), lambda: parkattn.Plan.load(where)
    if way == "save":
        where = pool.pick(
            (folder, folder / "absent" / "x", None, 5, 1.5, folder / ("é" * 300), folder / "a\0b", [], folder / "fine")
        )
        return said("Plan.save", {"path": where}), lambda: plan.save(where)
    device = "cpu"
    if way == "device":
        device = pool.pick(("cpu", "cuda", "cuda:99", "meta", "x", None, -1, 5, torch.device("cpu"), pool.junk()))
    q, k, v = pool.qkv

    def call() -> None:
        loaded = parkattn.Plan.load(path, device)
        parkattn.park_attention(q, k, v, pool.config, plan=loaded)

    return said(f"Plan.load ({way})", {"device": device}), call


def hosts(pool: Pool, folder: Path) -> tuple[str, Call]:
    target = pool.pick(pool.targets) if pool.random.random() < 0.8 else pool.junk()
    config = pool.pick([entry.config for entry in METHODS.values()])
    likely = {
        "config": (*pool.configs, *TEXTS, pool.fields(config)), "method": pool.methods, "total_steps": NUMBERS,
        "fuse": (None, True, False),
    }  # fmt: skip
    given = pool.spoil({"total_steps": 50}, likely)
    changes = {key: value for key, value in pool.fields(parkattn.ParkConfig).items() if key not in ("target", *given)}
    verb = pool.pick(("enable", "enable", "enable", "disable", "summary", "sequence_parallel_plan"))

    def call() -> None:
        if verb != "enable":
            getattr(parkattn, verb)(target)
            return
        parkattn.enable(target, **given, **changes)
        str(parkattn.summary(target))
        parkattn.disable(target)

    return said(f"{verb} {type(target).__name__}", {**given, **changes}), call


def entries(pool: Pool, folder: Path) -> tuple[str, Call]:
    good = {"name": "mine", "make": parkattn.Park, "line": "a line", "config": parkattn.ParkConfig}
    likely = {"name": TEXTS, "budgets": ((), ("top_p",), ("x",), "top_p"), "config": (MethodConfig, dict, None)}
    given = pool.spoil(good, likely)
    whole = pool.random.random() < 0.7

    def call() -> None:
        with mock.patch.dict(METHODS, clear=False):
            parkattn.register(parkattn.MethodEntry(**given) if whole else given["name"])

    return said("register", given), call


def fuzz_api(count: int, seed: int = 0) -> Tally:
    tally, pool = Tally(), Pool(seed)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        calls = api_calls(pool, Path(place))
        for _ in range(count):
            tally.add(*next(calls))
    return tally


def report(what: str, tally: Tally) -> int:
    """Prints the counts and every kind of raw error; the exit code."""
    sys.stdout.write(f"fuzz: {tally.runs} {what}, {tally.refused} refused in one line, {len(tally.raw)} raw errors\n")
    for line, times in collections.Counter(tally.raw).most_common(40):
        sys.stdout.write(f"  {times}x {line}\n")
    return int(bool(tally.raw))


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--calls", type=int, default=10_000)
    reader.add_argument("--seed", type=int, default=0)
    asked = reader.parse_args()
    sys.exit(report("API calls", fuzz_api(asked.calls, asked.seed)))


if __name__ == "__main__":
    main()
