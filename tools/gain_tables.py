"""README's table of gains, and the measured forwards that it and `park doctor` compose runs of."""

from __future__ import annotations

from records import RESULTS, Record, lines, published

from parkattn.park import ParkConfig
from parklab.bench.e2e import phases_of_run
from parklab.bench.e2e_profile import BASELINES
from parklab.bench.frontier import read_records
from parklab.experiments.frontier import tabulate
from parklab.experiments.tables import page_table
from parklab.studio.gain import composed_run, known_gpu, measured_forwards

FORWARDS = {"e2e": "e2e", "e2e_profile": "e2e profile"}  # benchmarks, by the name of their file
MODELS = {"wan2.1-1.3b": "Wan2.1-1.3B", "wan2.1-14b": "Wan2.1-14B", "hunyuanvideo": "HunyuanVideo"}
RUNS = (  # as people run them: guidance is two forwards per step, and distilled models do without
    ("wan2.1-1.3b", 50, 2), ("wan2.1-14b", 50, 2), ("hunyuanvideo", 50, 1), ("wan2.1-14b", 4, 1),
)  # fmt: skip


@published
def gains() -> str:
    """Seconds of whole runs as `park doctor` composes them."""
    rows = []
    for model, steps, each in RUNS:
        own = measured_forwards()["models"][model]
        run = composed_run(own, model, steps=steps, forwards_per_step=each)
        frames, height, _ = own["video"]
        rows.append((
            f"{MODELS[model]}, {frames} frames, {height}p", f"{steps} x {each}", *(f"{s:,.0f} s" for s in run["dense_s"].values()),
            *(f"{park['seconds']:,.0f} s, {park['speedup']['compiled']:.2f}x ({park['speedup']['stock']:.2f}x){', estimated' * park['estimated']}"
              for park in run["profiles"].values()),
        ))  # fmt: skip
    return page_table(
        "model, video | steps x forwards | dense, stock | compiled | our kernel | `paper` | `quality` | `fast`", rows
    )


def forwards() -> Record:
    """The measured forwards that gains are composed of, for the package: forwards.json.

    quality's reuse is paper's at density 0.25, near its own, and the cost of corrections. A refresh of quality or fast
    stands between anchors of short runs: at the density that the small model had there, on the line through paper's two.
    """
    (gpu,) = {
        known_gpu(row["environment"]["gpu"])
        for name in ("e2e", "e2e_profile")
        for row in lines(f"{name}.jsonl", FORWARDS[name])
    }
    plain = {row["model"]: row for row in whole_models_recorded() if not row["compiled"]}
    models = {}
    for row in last_profiles():
        paper, corrections = plain[row["model"]], row["reuse_s"] - row["plain_reuse_s"]
        steepness = (paper["refresh_warm_s"] - row["refresh_warm_s"]) / (paper["density"] - row["plain_density"])
        own = {"dense": row["own_dense_s"], "anchor_cold": row["anchor_cold_s"], "anchor": row["anchor_warm_s"]}
        profiles: Record = {"paper": {
            "density": {"refresh": paper["density"], "reuse": paper["density"]}, "estimated": [],
            "seconds": {"dense": paper["dense_s"], "refresh_cold": paper["refresh_cold_s"], "refresh": paper["refresh_warm_s"], "reuse": paper["reuse_s"]},
        }}  # fmt: skip
        for name in ("quality", "fast"):
            expect_measured(row, ParkConfig.profile(name, model=row["model"]))
            refresh = density_of_refreshes(name)
            seconds = {
                **own,
                "refresh": paper["refresh_warm_s"] + (refresh - paper["density"]) * steepness + corrections,
            }
            if name == "quality":
                seconds["reuse"], reuse = paper["reuse_s"] + corrections, paper["density"]
            else:
                seconds["reuse"], reuse = row["reuse_s"], row["density"]
            density, estimated = {"refresh": refresh, "reuse": reuse}, ["refresh", *["reuse"] * (name == "quality")]
            profiles[name] = {"density": density, "estimated": estimated, "seconds": seconds}
        baselines = {way: row["baselines"][way] for way in BASELINES}
        compiling = max(row["fusing_s"], paper["fusing_s"])
        models[row["model"]] = {
            "video": row["video"],
            "compiling_s": compiling,
            "dense": baselines,
            "profiles": profiles,
        }
    return {"gpu": gpu, "models": {name: models[name] for name in MODELS}}


def density_of_refreshes(profile: str) -> float:
    """Of the small model's 4-step runs at 75,600 tokens without guidance: an anchor, then refreshes alone."""
    (found,) = (
        row["cost"] for row in tabulate(read_records(RESULTS / "frontier.jsonl"))
        if (row["size"], row["steps"], row["guidance"], row["setting"]) == ("81x400x576", 4, 1, profile)
    )  # fmt: skip
    phases = phases_of_run(ParkConfig.profile(profile, model="wan2.1-14b"), 4)
    return float((4 * found - phases["anchor"]) / phases["refresh"])


def expect_measured(row: Record, config: ParkConfig) -> None:
    kept = ("compensate", "residual_rank", "query_tile")
    assert [row["config"][field] for field in kept] == [getattr(config, field) for field in kept], "measure again"


def last_profiles() -> list[Record]:
    """The last of each model."""
    return list({row["model"]: row for row in lines("e2e_profile.jsonl", FORWARDS["e2e_profile"])}.values())


def whole_models_recorded() -> list[Record]:
    return sorted(lines("e2e.jsonl", "e2e"), key=lambda row: (list(MODELS).index(row["model"]), row["compiled"]))
