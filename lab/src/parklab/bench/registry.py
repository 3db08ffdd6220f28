"""The benches of kernels as values, which `park bench NAME`, `gpu`, `sanitize` and `park reproduce` read: what is
checked, what is measured then, and what the table shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from parklab.bench import attend, dense, layer, methods, official, plans
from parklab.bench.gates import Case
from parklab.bench.timing import Record

Gate = Callable[..., Iterator[Case]]
"""(device, *, rehearse, and what it can be told besides) -> verdicts."""


class Bench(NamedTuple):
    """gates: sections of `park bench gpu` with their seconds, which include compilation; the first one goes before
    every measurement. seconds: of the measurement there. 0: `park bench gpu` leaves it out.
    """

    gates: dict[str, tuple[Gate, int]]
    measure: Callable[..., Iterator[Record]]
    """(device, roofline, *, repeats, rehearse, and what it can be told besides) -> records."""
    seconds: int
    columns: tuple[str, ...]

    @property
    def gate(self) -> Gate:
        return next(iter(self.gates.values()))[0]


BENCHES = {
    "pama": Bench(
        {"gate-pama": (plans.gate_pama, 200), "gate-large-pama": (plans.gate_large_pama, 50)}, plans.measure_pama, 90,
        ("shape.name", "kernel", "ms", "speedup", "extra_mb", "memory_reduction", "share_of_roofline"),
    ),
    "kmeans": Bench(
        {"gate-kmeans": (plans.gate_kmeans, 50), "gate-large-retrieval": (plans.gate_large_kmeans, 50)},
        plans.measure_kmeans, 50,
        ("shape.clusters", "iteration_ms", "flash_kmeans_ms", "speedup", "gemm_ms_at_roofline"),
    ),
    "qrkc": Bench(
        {"gate-qrkc": (plans.gate_qrkc, 30)}, plans.measure_qrkc, 30,
        ("ms", "metric_ms", "cholesky_ms", "transform_ms", "means_ms"),
    ),
    "attend": Bench(
        {"gate-attend": (attend.gate, 80), "gate-large": (attend.gate_large, 60)}, attend.measure, 200,
        ("case", "kernel", "ms", "ratio", "useful_tflops", "share_of_roofline"),
    ),
    "layer": Bench(
        {"gate-layer": (layer.gate, 80)}, layer.measure, 90, ("part", "ms", "ratio", "density", "extra_mb")
    ),
    "scaling": Bench(
        {"gate-attend": (attend.gate, 80)}, layer.measure_scaling, 90,
        ("over", "part", "density", "length", "ms", "exponent"),
    ),
    "flashinfer": Bench(
        {"gate-flashinfer": (official.gate_flashinfer, 300)}, official.measure_flashinfer, 75,
        ("part", "ms", "ratio", "useful_tflops"),
    ),
    "dense": Bench({"gate-dense": (dense.gate, 80)}, dense.measure, 60, ("case", "kernel", "ms", "ratio")),
    "methods": Bench(
        {"gate-methods": (methods.gate, 90)}, methods.measure, 180,
        ("shape", "method", "density", "plan_ms", "later_plan_ms", "attend_ms", "repair_ms", "plan_mb", "attend_mb",
         "forward_s", "failure"),
    ),
    "official": Bench(
        {"gate-official": (official.gate, 0)}, official.measure, 0,
        ("kernel", "version", "compiled", "method", "tokens", "official_ms", "ours_ms", "ours_plan_ms", "absent"),
    ),
}  # fmt: skip
"""By name."""
