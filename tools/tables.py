"""Writes the tables of README.md, DESIGN.md and docs from records in benchmarks/results; no figure in them is
typed in.

    python tools/tables.py            writes between <!-- table: NAME --> and <!-- /table -->, and forwards.json
    python tools/tables.py --check    writes nothing; exit code 1 where a page differs from its records

Goals ("bar") are the only numbers of this file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from parkattn.models import MODELS as TRANSFORMERS
from parkattn.models import SIZES, STAY_DENSE
from parklab.bench.e2e import phases_of_run
from parklab.bench.e2e_profile import anchored_run
from parklab.experiments.frontier import tabulate
from parklab.experiments.tables import grouped, page_table
from parklab.files import write_atomically
from parklab.research import ResearchConfig
from parklab.studio.gain import measured_forwards

sys.path.insert(0, str(Path(__file__).parent))
import diary_tables  # noqa: F401 (its tables, as those of the next five, are published when it is read)
import forecast_lines  # noqa: F401
import likeness_tables  # noqa: F401
import page_tables  # noqa: F401
import quality_tables  # noqa: F401
import run_tables
from gain_tables import MODELS, expect_measured, forwards, last_profiles, whole_models_recorded
from of_models import of_models
from records import TABLES, Columns, Record, argument_reader, lines, published, table_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ROOT / "lab/src/parklab/studio/forwards.json"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)

CASES = {"hunyuan": "HunyuanVideo"} | MODELS  # as `park bench attend` names them
REUSE_BARS = {"wan2.1-1.3b": "1.2", "wan2.1-14b": "5.7", "hunyuanvideo": "11.5"}
ATTENTION_BARS = {
    "wan2.1-14b, density 0.25": "0.27",
    "wan2.1-14b, density 0.10": "0.119",
    "wan2.1-14b, density 0.40": "0.475",
    "hunyuan, density 0.25": "0.297",
    "wan2.1-1.3b, density 0.25": "0.297",
}


def only(rows: Iterable[Record], **wanted: Any) -> Record:
    (found,) = (row for row in rows if all(row.get(name) == value for name, value in wanted.items()))
    return found


# README.md; its gains are in gain_tables.py


@published
def profiles_of_whole_models() -> str:
    """Runs of today's profiles out of the forwards of a record."""
    rows = []
    for row in last_profiles():
        for name in ("fast", "quality", "paper"):
            run, state = row["runs"]["paper"], row["memory"]["plans_with_guidance_gb"]
            seconds = row["baselines"]["stock"], row["refresh_warm_s"], row["plain_reuse_s"]
            if name != "paper":
                asked = ResearchConfig.profile(name, model=row["model"])
                expect_measured(row, asked)
                run, state = (
                    anchored_run(row, phases_of_run(asked), row["baselines"]),
                    row["memory"]["state_with_guidance_gb"],
                )
                seconds = row["own_dense_s"], row["anchor_warm_s"], row["reuse_s"]
            steps = ", ".join(f"{count} {phase}" for phase, count in run["steps"].items() if count)
            gains = (f"{run['speedup'][way]:.2f}x" for way in ("stock", "compiled", "own kernel"))
            shown = (f"{s:.2f}" for s in seconds)
            rows.append((MODELS[row["model"]], name, *shown, steps, *gains, f"{state:.2f} GB"))
    return page_table(
        "model | profile | dense s | anchor or refresh s | reuse s | steps | against stock | blocks compiled | our "
        "dense kernel | state, both branches",
        rows,
    )


@published
@of_models(heads=2, name=0, ranked=("PSNR against dense",))
def profiles() -> str:
    order = ("paper", "quality", "fast")
    rows = tabulate(run_tables.newest_lines("75,600"))
    rows = [row for row in rows if row["steps"] == 50 and row["setting"] in order]
    columns: Columns = {
        "profile": "{setting}", "guidance": "{guidance:g}", "videos": "{runs}", "attention computed": "{cost:.1%}",
        "PSNR against dense": "{psnr:.1f} dB", "worst video": "{worst_psnr:.1f} dB",
    }  # fmt: skip
    return table_of(columns, sorted(rows, key=lambda row: (row["guidance"], order.index(row["setting"]))))


@published
def cpu() -> str:
    columns: Columns = {
        "density": "{density}", "dense ms": "{dense_ms}", "sparse ms": "{sparse_ms}", "speed-up": "{speedup}",
        "plan ms": "{plan_ms}", "calls until the plan has paid": "{calls_to_break_even}",
    }  # fmt: skip
    return table_of(columns, lines("cpu.jsonl", "cpu"))


@published
def attention_calls() -> str:
    found = lines("gpu_attend.jsonl", "attend")
    rows = [
        only(found, case=case, kernel="gluon", borders="rounded") | {"dense": only(found, case=case, kernel="cudnn")}
        for case in ATTENTION_BARS if not case.endswith("0.40")
    ]  # fmt: skip
    columns: Columns = {
        "shape": "{case}",
        "dense ms": "{dense[ms]:.1f}",
        "sparse ms": "{ms:.1f}",
        "share": "{ratio:.3f}",
    }
    return table_of(columns, rows)


@published
def dense_calls() -> str:
    names = {
        "cudnn": "dense, cuDNN", "ours": "dense, our kernel", "anchor, compensated": "anchor",
        "factor": "factors of the residual", "reuse, compensated": "reuse, density 0.10",
        "add residual": "adding the residual", "without a mask": "dense without padding, cuDNN",
        "stock, with a mask": "dense with a mask, PyTorch", "ours, padded": "dense with padding, our kernel",
    }  # fmt: skip
    shapes = {"wan2.1-14b": "Wan2.1-14B", "hunyuan, padded": "HunyuanVideo"}
    columns: Columns = {
        "shape": lambda row: shapes[row["case"]], "call": lambda row: names[row["kernel"]], "ms": "{ms:.3g}",
        "share": "{ratio:.3f}", "of": lambda row: names[row["baseline"]],
    }  # fmt: skip
    return table_of(columns, (row for row in lines("gpu_dense.jsonl", "dense") if row["kernel"] in names))


def _unfused(row: Record) -> str:
    return "" if row["compiled"] else f"{row['reuse_unfused_s']:.2f}"


@published
def whole_models() -> str:
    columns: Columns = {
        "model": lambda row: row["model"] + ", both compiled" * row["compiled"], "dense s": "{dense_s:.2f}",
        "refresh s": "{refresh_warm_s:.2f}", "reuse s": "{reuse_s:.2f}", "reuse s, fuse=False": _unfused,
        "50 steps": "{run[speedup]:.2f}x",
    }  # fmt: skip
    return table_of(columns, whole_models_recorded())


# docs/integrate.md


@published
def whole_models_and_memory() -> str:
    columns: Columns = {
        "model": lambda row: "the same, both compiled" if row["compiled"] else MODELS[row["model"]],
        "dense": "{dense_s:.2f}", "refresh, cold": "{refresh_cold_s:.2f}", "refresh, warm": "{refresh_warm_s:.2f}",
        "reuse": "{reuse_s:.2f}", "target of reuse": lambda row: REUSE_BARS[row["model"]],
        "reuse, fuse=False": _unfused, "50 steps": "{run[speedup]:.2f}x", "peak dense": "{memory[dense_peak_gb]:.1f}",
        "peak PARK": "{memory[park_peak_gb]:.1f}", "plans, both branches": "{memory[state_with_guidance_gb]:.2f}",
    }  # fmt: skip
    return table_of(columns, whole_models_recorded())


# docs/kernels.md


@published
def pama() -> str:
    by_shape = grouped(
        lines("gpu_plans.jsonl", "pama"), lambda row: "({heads}, {tokens:,}, {key_blocks:,})".format(**row["shape"])
    )
    kernels = ("Triton (Full-K)", "Triton (two-pass)", "TileLang (Full-K)", "TileLang (two-pass)")
    rows = []
    for shape, found in by_shape.items():
        by = {row["kernel"]: "{ms:.2f} ms, {speedup:.1f}x, {extra_mb:.0f} MB".format(**row) for row in found}
        rows.append((shape, f"{only(found, kernel='PyTorch')['ms']:.1f} ms", *(by.get(name, "") for name in kernels)))
    return page_table("(h, L, N_K) | PyTorch | Full-K | two-pass | TileLang Full-K | TileLang two-pass", rows)


@published
def clustering() -> str:
    names = ("iteration_ms", "flash_kmeans_ms")  # the package is not everywhere
    rows = [
        (f"k-means iteration, {clusters:,} clusters",
         *("" if row[name] is None else f"{row[name]:.2f} ms" for name in names),
         "flash-kmeans" if clusters < 1024 else "")
        for row in lines("gpu_plans.jsonl", "kmeans") for clusters in [row["shape"]["clusters"]]
    ]  # fmt: skip
    (qrkc,) = lines("gpu_plans.jsonl", "qrkc")
    parts = ", ".join(f"{qrkc[f'{name}_ms']:.2f}" for name in ("metric", "cholesky", "transform", "means"))
    rows.append(("QRKC without k-means, its parts one after the other", f"{qrkc['ms']:.2f} ms", "", "2 ms"))
    rows.append(("its parts alone: metric, Cholesky, transform, means", f"{parts} ms", "", ""))
    return page_table("what | ours | flash-kmeans 0.3.1 | bar", rows)


@published
def one_layer() -> str:
    found, rows = lines("gpu_attend.jsonl", "layer"), []
    for borders, name in (("rounded", "rounded (64, 32)"), ("as clustered", "as clustered")):
        parts = "plan, cold", "plan, warm", "refresh step", "reuse step from the store"
        timed = [only(found, borders=borders, part=part) for part in parts]
        *told, last = (f"{row['ms']:.1f} ms" for row in timed)
        rows.append((name, f"{timed[0]['density']:.3f}", *told, f"{last}, {timed[3]['ratio']:.3f} of cuDNN"))
    return page_table("borders | density | plan, cold | plan, warm | refresh step (warm) | reuse step", rows)


@published
def attention() -> str:
    found = lines("gpu_attend.jsonl", "attend")
    rows = []
    for case, bar in ATTENTION_BARS.items():
        model, _, rest = case.partition(", ")
        row = [f"{CASES[model]}, {rest}", f"{only(found, case=case, kernel='cudnn')['ms']:.1f} ms"]
        for borders in ("rounded", "as clustered"):
            plain = only(found, case=case, kernel="gluon", borders=borders)
            compensated = only(found, case=case, kernel="gluon compensated", borders=borders)
            row += [f"{plain['ms']:.1f} ms", f"{plain['ratio']:.3f}"]
            row += [bar, f"{plain['useful_tflops']:.0f}"] if borders == "rounded" else []
            row.append(f"+{100 * (compensated['ms'] / plain['ms'] - 1):.1f} %")
        rows.append(row)
    columns = "case | cuDNN | rounded | ratio | bar | useful TFLOP/s | compensated | as clustered | ratio | compensated"
    return page_table(columns, rows)


@published
def flashinfer() -> str:
    found = lines("gpu_official.jsonl", "flashinfer")
    rows = []
    for kernel in ("fa3", "fa2"):
        parts = ("its plan", "attention alone", "all of a reuse step")
        timed = [only(found, part=f"flashinfer {kernel}: {part}") for part in parts]
        rows.append((kernel, *(f"{part['ms']:.1f} ms" for part in timed), f"{timed[-1]['ratio']:.3f}"))
    return page_table("kernel | its plan, every call | attention alone | all of a reuse step | of cuDNN", rows)


@published
def sanitizers() -> str:
    found = {row["tool"]: row for row in lines("gpu_sanitize.jsonl", "sanitize")}

    def told(*tools: str) -> str:
        assert all(found[tool]["ok"] for tool in tools), tools
        reports = sum(found[tool]["errors"] for tool in tools)
        if found[tools[0]]["must_find"] == "nothing":
            return "nothing" if reports == 0 else f"{reports} reports"
        return f"{reports} report{'s' * (reports != 1)}: it sees what it should"

    def every(*tools: str) -> str:
        (checks,) = {found[tool]["checks_passed"] for tool in tools}
        return f"all kernels, {checks} checks"

    both = ("racecheck", "racecheck, warp-specialised kernels")
    whole = ("ConSan, PAMA", "ConSan, attention", "ConSan, compensated attention")
    compensated = "PAMA; attention, quick and careful; careful attention with compensation"
    rows = [
        ("memcheck", every("memcheck"), told("memcheck")),
        ("synccheck", every("synccheck"), told("synccheck")),
        ("racecheck", f"{every(*both)}, the two warp-specialised ones in a run of their own", told(*both)),
        ("racecheck", "PAMA without the barrier between its warpgroups", told("racecheck, PAMA without a meeting")),
        ("ConSan", compensated, told(*whole)),
        ("ConSan", "PAMA with one wait taken out", told("ConSan, PAMA without a wait")),
    ]
    return page_table("tool | watched | found", rows)


# docs/real-models.md


@published
def one_video_on_h200() -> str:
    """50 steps out of measured forwards, both forwards of guidance where the model has them; plans of both branches."""
    rows = []
    for row in (row for row in whole_models_recorded() if not row["compiled"]):
        passes, memory = SIZES[row["model"]].passes, row["memory"]
        dense, sparse = (passes * row["run"][name] / 60 for name in ("dense_s", "park_s"))
        times = (f"{dense:.1f} min", f"{sparse:.1f} min", f"{8 * (2 * dense + sparse) / 60:.1f} h")
        park = memory["park_peak_gb"] + (memory["state_with_guidance_gb"] - memory["state_gb"]) * (passes - 1)
        peaks = [f"{value:.1f} GB" for value in (memory["weights_gb"], memory["dense_peak_gb"], park)]
        rows.append((MODELS[row["model"]], str(passes), *times, *peaks))
    return page_table(
        "model | forwards a step | dense | PARK | 8 prompts | transformer's weights | peak, dense | peak, PARK", rows
    )


# docs/integrate.md, out of parkattn.models

_EXACT = {
    "none": "", "first": "text, first", "last": "text, last", "packed": "all that is before the video",
    "keys": "keys of text, and what follows the video",
}  # fmt: skip


@published
def transformer_classes() -> str:
    rows = [
        (f"`{name}`", row.released, ", then ".join(f"`{blocks}`" for blocks, _ in row.blocks), _EXACT[row.text],
         f"borrowed from {row.preset}" if row.borrows else f"{row.preset}")
        for name, row in TRANSFORMERS.items()
    ]  # fmt: skip
    return page_table("transformer class | models | layers counted from 0 | exact beside the video | settings", rows)


@published
def classes_that_stay_dense() -> str:
    return page_table("class | why", ((f"`{name}`", why) for name, why in STAY_DENSE.items()))


def pages() -> list[Path]:
    return [*ROOT.glob("README.md"), *ROOT.glob("DESIGN.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page with every marked table anew."""

    def table(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {name!r}; correct the marker.")
        return begin + TABLES[name]() + end

    return MARKED.sub(table, text)


def main() -> None:
    reader = argument_reader(__doc__)
    reader.add_argument("--check", action="store_true", help="Write nothing; exit code 1 where a page differs.")
    check = reader.parse_args().check
    packaged = json.dumps(forwards(), indent=1) + "\n"
    if not PACKAGED.exists() or packaged != PACKAGED.read_text():
        if check:
            sys.exit(f"{PACKAGED.name}: its forwards are not those of the records")
        write_atomically(PACKAGED, packaged.encode())
        measured_forwards.cache_clear()
    other = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in other:
        if not check:
            write_atomically(page, filled(page.read_text()).encode())
        print(f"{page.relative_to(ROOT)}: {'its tables are not those of the records' if check else 'written'}")
    sys.exit(1 if check and other else 0)


if __name__ == "__main__":
    main()
