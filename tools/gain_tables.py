"""README's table of gains, and the measured forwards that it and `park doctor` compose runs of."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from records import RESULTS, Columns, Record, frontier_lines, lines, published, table_of

from parkattn.park import ParkConfig
from parklab.bench.e2e import phases_of_run
from parklab.bench.e2e_profile import BASELINES
from parklab.bench.frontier import Setting
from parklab.experiments.frontier import tabulate
from parklab.experiments.tables import page_table
from parklab.research import ResearchConfig
from parklab.studio.gain import composed_run, known_gpu, measured_forwards

FORWARDS = {"e2e": "e2e", "e2e_profile": "e2e profile"}  # benchmarks, by the name of their file
MODELS = {
    "wan2.1-1.3b": "Wan2.1-1.3B",
    "wan2.1-14b": "Wan2.1-14B",
    "wan2.1-14b-480p": "Wan2.1-14B",
    "hunyuanvideo": "HunyuanVideo",
}
SHORTER = {"wan2.1-14b-480p": "wan2.1-14b"}  # videos of a model beside the one of its preset
RUNS = (  # as people run them: guidance is two forwards per step, and distilled models do without
    ("wan2.1-1.3b", 50, 2), ("wan2.1-14b", 50, 2), ("wan2.1-14b-480p", 50, 2), ("hunyuanvideo", 50, 1),
    ("wan2.1-14b", 4, 1),
)  # fmt: skip


def recorded_runs() -> Iterator[tuple[str, str, int, Record]]:
    """Model, its video and steps, forwards per step, and the seconds of a run as `park doctor` composes them."""
    for model, steps, each in RUNS:
        own = measured_forwards()["models"][model]
        run = composed_run(own, SHORTER.get(model, model), steps=steps, forwards_per_step=each)
        frames, height, _ = own["video"]
        yield model, f"{MODELS[model]}, {frames} frames, {height}p | {steps} x {each}", each, run


@published
def gains() -> str:
    """Seconds of whole runs."""
    rows = [
        (*name.split(" | "), *(f"{s:,.0f} s" for s in run["dense_s"].values()),
         *(f"{park['seconds']:,.0f} s, {park['speedup']['compiled']:.2f}x "
           f"({park['speedup']['own kernel']:.2f}x){', estimated' * park['estimated']}"
           for park in (run["profiles"][profile] for profile in ("paper", "quality", "fast"))))
        for _, name, _, run in recorded_runs()
    ]  # fmt: skip
    return page_table(
        "model, video | steps x forwards | dense, stock | compiled | our kernel | `paper` | `quality` | `fast`", rows
    )


@published
def eight_bits_whole_models() -> str:
    """Attention in both precisions, and float8 linears, in one process: forwards and composed runs."""

    def seconds(name: str) -> Callable[[Record], str]:
        return lambda row: f"{row[name]:.2f}" if name in row else ""

    def gain(name: str) -> Callable[[Record], str]:
        def text(row: Record) -> str:
            found = row["runs"].get(name, {"speedup": {}})["speedup"].get("stock")
            return "" if found is None else f"{found:.2f}x"

        return text

    columns: Columns = {
        "model": lambda row: f"{MODELS[row['model']]}, {row['video'][1]}p", "linears": "{linears}",
        "Q K^T": lambda row: "INT8" if row["precision"] == "int8" else "bfloat16",
        "stock, s": lambda row: seconds("stock")(row["baselines"]), "our dense, s": seconds("own_dense_s"),
        "anchor, s": seconds("anchor_warm_s"), "second branch, s": seconds("anchor_second_s"),
        "reuse `fast`, s": seconds("reuse_s"), "reuse `quality`, s": seconds("quality_reuse_s"),
        "`quality`": gain("quality"), "`fast`": gain("fast"), "peak, GB": "{memory[park_peak_gb]:.1f}",
    }  # fmt: skip
    return table_of(columns, lines("e2e_bits.jsonl", "e2e bits"))


def forwards() -> Record:
    """The measured forwards that gains are composed of, for the package: forwards.json.

    Where e2e_bits.jsonl has a model, its forwards are those of that record. Elsewhere quality's reuse is paper's at
    density 0.25, near its own, and the cost of corrections. A refresh of quality or fast stands between anchors of
    short runs: at the density that the small model had there, on the line through paper's two.
    """
    (gpu,) = {
        known_gpu(row["environment"]["gpu"])
        for name in ("e2e", "e2e_profile")
        for row in lines(f"{name}.jsonl", FORWARDS[name])
    }
    plain = {row["model"]: row for row in whole_models_recorded() if not row["compiled"]}
    recorded = bits_recorded()
    bits = {row["model"]: row for row in recorded if row["precision"] == "bf16"}
    rounded = {row["model"]: row for row in recorded if row["precision"] == "int8" and row["linears"] == "bfloat16"}
    models = {}
    for row in last_profiles():
        paper, corrections = plain[row["model"]], row["reuse_s"] - row["plain_reuse_s"]
        steepness = (paper["refresh_warm_s"] - row["refresh_warm_s"]) / (paper["density"] - row["plain_density"])
        own = {"dense": row["own_dense_s"], "anchor_cold": row["anchor_cold_s"], "anchor": row["anchor_warm_s"]}
        profiles: Record = {"paper": {
            "density": {"refresh": paper["density"], "reuse": paper["density"]}, "estimated": [],
            "seconds": {"dense": paper["dense_s"], "refresh_cold": paper["refresh_cold_s"],
                        "refresh": paper["refresh_warm_s"], "reuse": paper["reuse_s"]},
        }}  # fmt: skip
        for name in ("quality", "fast"):
            expect_measured(row, ResearchConfig.profile(name, model=row["model"]))
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
            **float8_saving(row["model"]),
        }
        if row["model"] in bits:
            take_measured(models[row["model"]], bits[row["model"]])
    for name, model in SHORTER.items():
        models[name] = scaled_video(models[model], bits[name])
        take_measured(models[name], bits[name])
    for name, row in rounded.items():
        # refreshes, which only stand between anchors of short runs, stay those of bf16
        models[name]["int8"] = measured_profiles(models[name], row)
        if name not in bits:  # another run than that of bf16
            stock = {"stock": row["baselines"]["stock"]}
            models[name]["int8"] = {profile: own | {"dense": stock} for profile, own in models[name]["int8"].items()}
    return {"gpu": gpu, "models": {name: models[name] for name in MODELS}, "forecasts": forecasts()}


def bits_recorded() -> list[Record]:
    """Whole runs last, which count more than those of `fast` alone."""
    return sorted(lines("e2e_bits.jsonl", "e2e bits"), key=lambda row: not row.get("alone"))


def forecasts() -> dict[str, list[Record]]:
    """By profile: steps of each phase that the small model had at 75,600 tokens, the mean over videos."""
    found: dict[tuple[str, int, float, float], list[Record]] = {}
    for row in frontier_lines(RESULTS / "run_75600.jsonl") if (RESULTS / "run_75600.jsonl").exists() else ():
        asked = Setting.parse(row["setting"])
        if asked.method == "park" and asked.config and list(asked.changes) == ["tolerance"] and asked.steps is None:
            place = asked.config, row["steps"], row["guidance"], asked.changes["tolerance"]
            found.setdefault(place, []).append(row["steps_by_phase"])
    made: dict[str, list[Record]] = {}
    for (profile, steps, guidance, tolerance), runs in sorted(found.items()):
        names = dict.fromkeys(phase for run in runs for phase in run)
        counts = {phase: statistics.fmean(len(run.get(phase, ())) for run in runs) for phase in names}
        made.setdefault(profile, []).append({
            "steps": steps, "forwards_per_step": 2 if guidance > 1 else 1, "tolerance": tolerance,
            "phases": {phase: count for phase, count in counts.items() if count},
        })  # fmt: skip
    return made


def float8_saving(model: str) -> Record:
    """Of every forward of a model that was measured with float8 linears: these are the same in all of them."""
    found = [
        row for row in lines("e2e_float8.jsonl", "e2e float8") if row["model"] == model and row["linears"] == "float8"
    ]
    return {"float8_saves_s": found[-1]["reuse_s"] * (1 / found[-1]["of_bfloat16"]["reuse_s"] - 1)} if found else {}


def take_measured(model: Record, bits: Record) -> None:
    """Dense, anchors and both profiles' reuse forwards of one record, in place of those put together."""
    model["dense"] = {way: bits["baselines"][way] for way in BASELINES}
    model["profiles"] |= measured_profiles(model, bits)


def measured_profiles(model: Record, bits: Record) -> Record:
    """The profiles whose reuse forward is in a record, with its forwards."""
    parts = {"dense": "own_dense_s", "anchor_cold": "anchor_cold_s", "anchor": "anchor_warm_s"}
    parts |= {"anchor_second": "anchor_second_s"} if "anchor_second_s" in bits else {}
    found = {}
    for name, reuse, density in (("quality", "quality_reuse_s", "quality_density"), ("fast", "reuse_s", "density")):
        if reuse not in bits:
            continue
        expect_measured(bits, ResearchConfig.profile(name))
        own = model["profiles"][name]
        # of a second branch nothing is known but what was timed beside the first
        others = {phase: s for phase, s in own["seconds"].items() if phase != "anchor_second"}
        seconds = others | {phase: bits[part] for phase, part in parts.items()} | {"reuse": bits[reuse]}
        found[name] = {
            "density": own["density"] | {"reuse": bits[density]},
            "estimated": ["refresh"],
            "seconds": seconds,
        }
    return found


def scaled_video(model: Record, bits: Record) -> Record:
    """Another video of a model: sparse forwards that nobody measured there keep their ratio to quality's reuse."""
    factor = bits["quality_reuse_s"] / model["profiles"]["quality"]["seconds"]["reuse"]
    profiles = {}
    for name, own in model["profiles"].items():
        seconds = {phase: factor * s for phase, s in own["seconds"].items()} | {"dense": bits["baselines"]["stock"]}
        profiles[name] = {"density": dict(own["density"]), "estimated": ["refresh", "reuse"], "seconds": seconds}
    return {**model, "model": SHORTER[bits["model"]], "video": bits["video"], "profiles": profiles}


def density_of_refreshes(profile: str) -> float:
    """Of the small model's 4-step runs at 75,600 tokens without guidance: an anchor, then refreshes alone."""
    (found,) = (
        row["cost"] for row in tabulate(frontier_lines(RESULTS / "frontier.jsonl"))
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
