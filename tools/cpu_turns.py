"""This tree against another commit on the CPU, call by call in turns: python tools/cpu_turns.py COMMIT [--rounds 30]

Two processes hold the problem of `park bench cpu`; every round asks both for each call, in random order, so that
whatever slows the machine slows both. Printed is the median over rounds of now / before, with its 95 % interval.
"""

import argparse
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = """
import sys, time, torch
torch.set_num_threads(2)
from parkattn import ParkConfig, build_plan, park_attention
from parklab.scene import clustered_scene
scene = clustered_scene(heads=4, grid=(8, 32, 32), dim=64)
blocks = ParkConfig(query_clusters=16, key_clusters=64, top_p=None, top_k=0.5)
calls = {"plan": lambda: build_plan(scene.q, scene.k, blocks)}
for share in (0.5, 0.25, 0.1):
    config = blocks.replace(top_k=share)
    plan = build_plan(scene.q, scene.k, config)
    calls[f"attend {share}"] = lambda c=config, p=plan: park_attention(scene.q, scene.k, scene.v, c, plan=p)
for call in calls.values():
    call()
print(*calls, sep=",", flush=True)
for name in sys.stdin:
    begin = time.perf_counter()
    calls[name.strip()]()
    print(time.perf_counter() - begin, flush=True)
"""


def start(source: Path) -> subprocess.Popen[str]:
    where = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER], env=where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def seconds(worker: subprocess.Popen[str], name: str) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(name + "\n")
    return float(worker.stdout.readline())


def middle(ratios: list[float]) -> tuple[float, float, float]:
    """Median and the order statistics that bound it with 95 % confidence."""
    ordered, n = sorted(ratios), len(ratios)
    half = 0.98 * n**0.5
    return ordered[n // 2], ordered[max(0, round(n / 2 - half))], ordered[min(n - 1, round(n / 2 + half))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    packed = subprocess.run(["git", "archive", asked.commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        workers = {"before": start(Path(folder) / "src"), "now": start(ROOT / "src")}
        names = [worker.stdout.readline().strip().split(",") for worker in workers.values() if worker.stdout].pop()
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(asked.rounds):
            for name in names:
                for who in random.sample(sorted(workers), 2):
                    times.setdefault((name, who), []).append(seconds(workers[who], name))
        for worker in workers.values():
            worker.kill()
    for name in names:
        before, now = times[name, "before"], times[name, "now"]
        ratio, low, high = middle([b / a for a, b in zip(before, now, strict=True)])
        print(
            f"{name:12} before {sorted(before)[len(before) // 2] * 1e3:6.1f} ms   now / before {ratio:.3f} ({low:.3f} "
            f"to {high:.3f})"
        )


if __name__ == "__main__":
    main()
