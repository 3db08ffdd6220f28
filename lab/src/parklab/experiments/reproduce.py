"""What `park reproduce` and `park capture` do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parklab.experiments.captures import MODEL, Selection, capture_calls, pack_captures, preset_in
from parklab.experiments.catalogue import choose_experiments
from parklab.experiments.evaluation import Evaluation, FilledCells
from parklab.experiments.methods_compared import times_cells
from parklab.experiments.report import Section, sections_of, write_report
from parklab.experiments.results import CellRecords, machines_in
from parklab.experiments.runner import Lab
from parklab.sprites.grammar import held_out_scenes
from parklab.store import Cell, Record, Say, Store
from parklab.studio import checkpoints
from parklab.studio.generate import pipeline_for
from parklab.studio.prompts import Shard, read_prompts, shard_from_environment, take_device
from parklab.studio.request import Request, fit_to_pipeline, prepare

TINY = "tiny"
# at 1,920 tokens; blocks of the paper's size would be 3 and 13
BLOCKS = {"query_clusters": 8, "key_clusters": 32}
# mc-sparse leaves calls of fewer than 4,096 tokens dense
SHORT = {"mc-sparse": {"least_tokens": 1}}
PROMPTS = 2
POOL = 8
# 1,920 tokens, so that every table is a matter of minutes on two cores
TINY_SIZE = {"steps": 12, "frames": 17, "height": 128, "width": 192}
QUICK_SIZE = {"steps": 4, "frames": 9, "height": 64, "width": 96}
QUICK_METHODS = ("park", "svg2")
CAPTURE = "parkattn.capture.record.1"


@dataclass(frozen=True)
class Outcome:
    sections: Sequence[Section]
    made: int
    kept: int
    failures: Mapping[str, str]  # by cell name
    left_out: int  # densities that a method cannot have at this size


def known_model(model: str) -> str | None:
    return None if model == TINY else model


def evaluation_for(
    *, model: str, prompts: int | None, prompt_file: Path | None, quick: bool, **given: Any
) -> Evaluation:
    """The prompts, sizes and blocks that were not said, for the shipped model and for others."""
    count = prompts or (1 if quick else PROMPTS)
    sizes: dict[str, Any] = QUICK_SIZE if quick else {}
    if prompt_file is not None:
        found = [item.prompt for item in read_prompts(prompt_file)]
        if len(found) <= count:
            raise ValueError(
                f"prompt_file: expected at least {count + 1} prompts, one of them to calibrate on, got {len(found)}; "
                "add some."
            )
        chosen, spare = found[:count], found[count]
    elif known_model(model) is not None and not checkpoints.is_shipped(checkpoints.find_model(model)):
        raise ValueError(
            "prompt_file: expected one for a model other than the shipped one, got none; pass --prompt-file FILE."
        )
    else:
        chosen, spare = held_out_prompts(count)
    given["said"] = given.get("changes", {})
    if known_model(model) is None:
        sizes = sizes or TINY_SIZE
        # a size that is asked for gets the blocks of every other video of that size
        if all(given.get(name) is None for name in ("frames", "height", "width")):
            given |= {"changes": BLOCKS | given.get("changes", {}), "method_changes": SHORT}
    given |= {name: value for name, value in sizes.items() if given.get(name) is None}
    if quick and not given.get("methods"):
        given["methods"] = QUICK_METHODS
    return Evaluation(model=known_model(model), prompts=tuple(chosen), spare_prompt=spare, quick=quick, **given)


def held_out_prompts(count: int) -> tuple[list[str], str]:
    """Sentences of both kinds by turns, and one to calibrate on. Fewer of up to POOL are the first of more: their cells
    are shared.
    """
    pool = held_out_scenes(max(POOL, count))
    by_kind = [
        [scene for scene in pool if scene.held_out == kind] for kind in dict.fromkeys(scene.held_out for scene in pool)
    ]
    turns = [scene for turn in itertools.zip_longest(*by_kind) for scene in turn if scene is not None]
    spare = next(scene for scene in held_out_scenes(2 * len(pool), seed=1) if scene not in pool)
    return [scene.sentence for scene in turns[:count]], spare.sentence


def parse_size(text: str) -> dict[str, int]:
    """FRAMESxHEIGHTxWIDTH."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"size: expected FRAMESxHEIGHTxWIDTH, got {text!r}; write 81x400x576.")
    return dict(zip(("frames", "height", "width"), map(int, parts), strict=True))


def parse_shard(text: str | None) -> Shard:
    """i/n, counted from 0; without one, what torchrun says."""
    if text is None:
        return shard_from_environment()
    rank, slash, ranks = text.partition("/")
    if not (slash and rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise ValueError(f"shard: expected I/N with I from 0 to N - 1, got {text!r}; write 0/4.")
    return Shard(int(rank), int(ranks), int(rank))


def share_out(cells: Sequence[Cell], part: Shard) -> list[Cell]:
    """A shard's cells: those of one group together, since they share what they need, and whole groups by turns."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.mark, []).append(cell)
    return [cell for place, group in enumerate(groups.values()) if part.takes(place) for cell in group]


def run_experiments(
    names: list[str],
    evaluation: Evaluation,
    out: Path,
    *,
    part: Shard | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    say: Say = lambda line: None,
) -> Outcome:
    """Every cell of the part that is not there yet, then the report from all that are."""
    chosen, part = choose_experiments(names), part or Shard()
    if not evaluation.draw:
        take_device(evaluation.device, shard_from_environment())  # a part that is named is no rank of this machine
    lab = Lab(evaluation, out, say)
    asked = {each.label: each.cells(lab) for each in chosen}
    cells = list({cell.name: cell for found in asked.values() for cell in found}.values())
    mine = share_out(cells, part)
    done = 0

    def moved() -> None:
        nonlocal done
        done += 1
        advance(done, len(mine))

    advance(0, len(mine))
    filled = FilledCells({}, {}, {}) if evaluation.draw else lab.fill(mine, moved)
    reasons = filled.failures | filled.left_out
    rest = [cell for cell in cells if cell.name not in filled.records and cell.name not in reasons]
    found = filled.records | lab.finished(rest)
    reasons = lab.unreachable([cell for cell in rest if cell.name not in found]) | reasons
    timed = list((found | lab.finished(times_cells(lab))).values())
    given = found, reasons, lab.load_frames, lab.lines, lab.cost, timed
    results = {each.label: each.result(CellRecords(asked[each.label], *given)) for each in chosen}
    sections = sections_of(results)
    write_report(Store(out, say), sections, _about(lab, list(found.values())), judged=not evaluation.quick)
    made = len(set(lab.made) & set(filled.records))
    kept = len(found if evaluation.draw else filled.records) - made
    return Outcome(sections, made, kept, filled.failures, len(reasons) - len(filled.failures))


def _about(lab: Lab, records: list[Record]) -> dict[str, Any]:
    e, base = lab.evaluation, lab.base
    size = "the model's own size" if base.frames is None else f"{base.frames} frames of {base.height} x {base.width}"
    untimed = any("row" in record and record["row"]["seconds"] is None for record in records)
    seconds = "text, denoising and decoding of one video; what measuring recall takes is left out"
    quick = "a test that everything works, of one short video: it says nothing about methods"
    told = {"quick": quick} if e.quick else {}
    changed = ", ".join(f"{name}={value}" for name, value in e.said.items())
    told |= {"settings": f"{changed} of every method that has them; otherwise each method's own"} if changed else {}
    return told | {
        "model": "the shipped model" if e.model is None else Path(e.model).name,
        "weights": base.weights[:16],
        "video": f"{size}, {base.steps or 'the model’s own number of'} steps",
        "runs": f"{len(e.prompts)} prompt{'s' * (len(e.prompts) != 1)}, seed{'s' * (len(e.seeds) != 1)} "
        f"{', '.join(map(str, e.seeds))}",
        "guidance": ", ".join("the model's own" if g is None else f"{g:g}" for g in e.guidances),
        "device": ", ".join([base.device, base.dtype, *machines_in(records)]),
        "quality": "of raw frames against dense attention; 'dense again' is dense attention once more, 'by our kernel' "
        "by PARK's backend",
        "error": "norm of a video's difference from the dense one over the norm of that, of raw frames",
        "density": "computed token pairs over all pairs, in the sparse steps and in all steps; "
        "it is matched in the sparse steps",
        "seconds": "some cells hold none (--untimed)" if untimed else seconds,
    }


def capture_file(
    request: Request, selection: Selection, out: Path, *, overwrite: bool = False, say: Say = lambda line: None
) -> tuple[int, int]:
    """How many calls were written, and their bytes."""
    if out.suffix != ".safetensors":
        raise ValueError(f"out: expected a file name ending in .safetensors, got {out}; rename it.")
    request, folder = prepare(request)
    cell = Cell(
        name=out.stem,
        format=CAPTURE,
        request=request.to_dict() | {"capture": dataclasses.asdict(selection)},
        files=(out.name,),
    )

    def make(making: Any) -> None:
        pipe = pipeline_for(request, folder)
        calls = capture_calls(pipe, fit_to_pipeline(request, pipe), selection)
        about = {name: value for name, value in request.to_dict().items() if name != "model"} | {
            MODEL: preset_in(folder)
        }
        making.write(out.name, pack_captures(calls, about))
        making.commit({"format": CAPTURE, "request": dict(making.cell.request), "calls": [call.name for call in calls]})

    record = Store(out.parent, say).fill([cell], make, overwrite=overwrite)[cell.name]
    return len(record["calls"]), out.stat().st_size
