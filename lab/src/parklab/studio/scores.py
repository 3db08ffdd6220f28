"""The figures of a comparison: one row per method against the reference, its verdict, rows over several cases, and
whether the machine was quiet while a speed-up was measured.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from parklab.metrics import fidelity
from parklab.store import Record
from parklab.studio.video import Frames

LINES, COLUMNS = ("upper", "middle", "lower"), ("left", "centre", "right")
CONCENTRATED = 0.25  # share of a frame's squared error in one ninth of it, from which on the error has a place
# the recorded demo, on a quiet machine, is at 0.04; beside a second job it was at 0.11, and 1.27x became 1.14x
UNSTEADY = 0.1
QUALITIES = ("psnr", "ssim", "lpips")


def variant_name(method: str, profile: str | None) -> str:
    """What files and rows of a method are called, with the profile or preset that was asked for."""
    return method if profile is None else f"{method}-{profile}"


def variant_label(method: str, profile: str | None) -> str:
    """The same for people. PARK without a profile has the paper's settings."""
    if method == "park":
        return f"PARK, {profile or 'paper'}"
    return method if profile is None else f"{method}, {profile}"


def method_row(record: Record, reference: Record, frames: Frames, wanted: Frames) -> dict[str, Any]:
    """One method against the reference. frames, wanted: raw frames of both."""
    found, base = record["measured"], reference["measured"]
    method, profile = record["resolved"]["method"], record["resolved"]["preset"]
    row: dict[str, Any] = {
        "name": variant_name(method, profile),
        "label": variant_label(method, profile),
        "changes": dict(record["resolved"]["changes"]),
        "method": method,
        "profile": profile,
        "config": record["resolved"]["config"],
        "command": record["command"],
    }
    for name, measure in (("psnr", fidelity.psnr_per_frame), ("ssim", fidelity.ssim_per_frame)):
        values = measure(frames, wanted)
        row[name] = {"mean": float(np.mean(values)), "worst": min(values), "per_frame": values}
    lpips = fidelity.lpips_per_frame(frames, wanted)
    row["lpips"] = None if lpips is None else {"mean": float(np.mean(lpips)), "worst": max(lpips), "per_frame": lpips}
    row["equal_frames"] = sum(np.array_equal(*pair) for pair in zip(frames, wanted, strict=True))
    row["worst_frame"] = worst_frame(row["psnr"]["per_frame"], frames, wanted)
    row["not_comparable"] = why_not_comparable(record["environment"], reference["environment"])
    alike = row["not_comparable"] is None
    row["speedup"] = base["seconds"]["denoise"] / found["seconds"]["denoise"] if alike else None
    row["steadiness"] = steadiness(found["steps"], base["steps"] if alike else None)
    return row | {name: value for name, value in found.items() if name != "summary"}


def why_not_comparable(here: dict[str, Any], there: dict[str, Any]) -> str | None:
    """A method that was kept from an earlier run may have been timed elsewhere, or on the same machine with other
    threads.
    """
    if any(here.get(name) != there.get(name) for name in ("cpu", "gpu")):
        return "made on another machine"
    threads = [each.get("threads") for each in (here, there)]
    return None if threads[0] == threads[1] else f"made with {threads[0]} threads, dense with {threads[1]}"


def worst_frame(psnr: list[float], frames: Frames, wanted: Frames) -> dict[str, Any]:
    """Which frame is furthest from the reference, and the ninth of the picture that holds most of its squared error."""
    frame = int(np.argmin(psnr))
    error = (frames[frame].astype(np.float64) - wanted[frame].astype(np.float64)) ** 2
    bands = np.array_split(error, 3, axis=0)
    cells = np.array([[part.sum() for part in np.array_split(band, 3, axis=1)] for band in bands])
    line, column = (int(i) for i in np.unravel_index(int(cells.argmax()), cells.shape))
    share = float(cells.max() / cells.sum()) if cells.sum() else 0.0
    place = "centre" if (line, column) == (1, 1) else f"{LINES[line]} {COLUMNS[column]}"
    return {"frame": frame, "psnr": psnr[frame], "place": place if share > CONCENTRATED else None, "share": share}


def verdict(row: dict[str, Any], fps: int, rough: bool) -> str:
    """Speed and the worst frame in one line. rough: the times cannot be trusted."""
    name, count = row["label"], len(row["psnr"]["per_frame"])
    if row["speedup"] is None:
        speed = f"speed not comparable ({row['not_comparable']})"
    else:
        speed = f"{'about ' if rough else ''}{row['speedup']:.2f}× the speed of dense"
        speed += " (slower)" if row["speedup"] < 1 else ""
    equal = row["equal_frames"]
    if equal == count:
        return f"{name}: {speed}; all {count} frames equal (no 8-bit value differs)."
    worst = row["worst_frame"]
    place = "all over the picture" if worst["place"] is None else f"strongest in the {worst['place']}"
    where = f"worst frame {worst['frame'] + 1} of {count} ({worst['frame'] / fps:.1f} s) {worst['psnr']:.1f} dB"
    mean = f"mean {row['psnr']['mean']:.1f} dB"
    if equal:
        mean += f", with {equal} equal frames (no 8-bit value differs) at {fidelity.CAP:.0f} dB"
    return f"{name}: {speed}; {where}, {place}; {mean}."


def over_cases(cases: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per method for several prompts and seeds: means, the worst, sums of seconds. One case: its own rows."""
    if len(cases) == 1:
        return cases[0]
    return [_over([rows[place] for rows in cases], [rows[0] for rows in cases]) for place in range(len(cases[0]))]


def _over(rows: list[dict[str, Any]], references: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def denoise(of: list[dict[str, Any]]) -> float:
        return sum(row["seconds"]["denoise"] for row in of)

    whole: dict[str, Any] = {name: rows[0][name] for name in ("name", "label", "method", "profile", "config")} | {
        "cases": len(rows)
    }
    for name in QUALITIES:
        known = [row[name] for row in rows if row[name] is not None]
        furthest = max if name == "lpips" else min
        worst = furthest((each["worst"] for each in known), default=None)
        whole[name] = {"mean": mean([each["mean"] for each in known]), "worst": worst} if known else None
    whole |= {name: mean([row[name] for row in rows]) for name in ("density", "density_sparse_steps")}
    recalls = [row["recall"] for row in rows if row["recall"]]
    whole["recall"] = None
    if recalls:
        whole["recall"] = {"mean": mean([r["mean"] for r in recalls]), "worst": min(r["worst"] for r in recalls)}
    whole["seconds"] = {name: sum(row["seconds"][name] for row in rows) for name in rows[0]["seconds"]}
    comparable = all(row["speedup"] is not None for row in rows)
    whole["speedup"] = denoise(references) / denoise(rows) if comparable else None
    return whole


def flat_line(row: dict[str, Any]) -> dict[str, Any]:
    """A row as one line of metrics.csv."""
    recall = row["recall"] or {}
    line = {
        "method": row["method"], "profile": row["profile"] or "", "psnr_db": row["psnr"]["mean"],
        "psnr_worst_frame_db": row["psnr"]["worst"], "ssim": row["ssim"]["mean"],
    }  # fmt: skip
    line |= {"lpips": row["lpips"]["mean"] if row["lpips"] else "", "density": row["density"]}
    line |= {"density_sparse_steps": row["density_sparse_steps"]}
    line |= {f"recall_{name}": recall.get(name, "") for name in ("mean", "p05", "worst")}
    line |= {"speedup_denoise": row["speedup"]}
    line |= {f"timing_{name}": row["steadiness"][name] for name in ("step_spread", "dense_apart")}
    line |= {f"seconds_{name}": value for name, value in row["seconds"].items()}
    line |= {f"seconds_{phase}_steps": value for phase, value in row["phase_seconds"].items()}
    return line | {"worst_frame": row["worst_frame"]["frame"], "equal_frames": row["equal_frames"]}


def head_lines(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of heads.csv: one per layer and head."""
    density, recall = row["heat"]["density"] or [], row["heat"]["recall"]
    return [
        {"method": row["method"], "profile": row["profile"] or "", "layer": layer, "head": head, "density": value,
         "recall": recall[layer][head] if recall else ""}
        for layer, heads in enumerate(density) for head, value in enumerate(heads)
    ]  # fmt: skip


def plain_cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def to_csv(lines: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]))
    writer.writeheader()
    writer.writerows({name: plain_cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue().encode()


def steadiness(steps: list[dict[str, Any]], reference: list[dict[str, Any]] | None) -> dict[str, float | None]:
    """Two shares, 0 on an ideal machine. steps: of one run; reference: of the dense run beside it, None if it was made
    elsewhere.

    step_spread: mean distance of steps of equal work from their median. A few slow steps do not move the median, and
    the mean distance sees one very slow step as well as a run that was slow for half its time. Dense steps are equal as
    a whole, sparse ones outside of attention only: their densities differ by right. dense_apart: by how much the dense
    steps of this run and of the reference differ, in the median. They are the same work, so a load that stayed for all
    of one run shows here, and only here.
    """
    timed = [row for row in steps if "seconds" in row]
    dense = [row["seconds"] for row in timed if row["phase"] == "dense"]
    around = [row["seconds"] - row["attention_seconds"] for row in timed if row["phase"] != "dense"]
    away = sum(abs(value - statistics.median(group)) for group in (dense, around) for value in group)
    theirs = [row["seconds"] for row in reference or () if row["phase"] == "dense" and "seconds" in row]
    return {
        "step_spread": away / sum(dense + around) if timed else None,
        "dense_apart": abs(statistics.median(dense) / statistics.median(theirs) - 1) if dense and theirs else None,
    }


def timing_warning(rows: list[dict[str, Any]]) -> str | None:
    """One sentence to stand beside the speed-ups, or None. rows: of a comparison, the reference first."""
    if not any(row["speedup"] is not None for row in rows[1:]):
        return None
    spread, whose = max((row["steadiness"]["step_spread"] or 0.0, _title(row)) for row in rows)
    apart, other = max((row["steadiness"]["dense_apart"] or 0.0, _title(row)) for row in rows)
    if max(spread, apart) <= UNSTEADY:
        return None
    if spread >= apart:
        found = f"in the run of {whose}, steps of equal work differed by {spread:.0%} on average"
    else:
        found = f"dense steps in the run of {other} and in that of {_title(rows[0])} differed by {apart:.0%}"
    return (
        f"The speed-up is rough, because timing was unsteady ({found}): "
        "to measure it well, run again on a quiet machine with --overwrite."
    )


def _title(row: dict[str, Any]) -> str:
    """Rows that were recorded before there were labels have none."""
    return row.get("label", row["method"])
