"""Many prompts, one process or many: `park generate --prompts FILE`, alone or under torchrun or accelerate.

Rank r of n takes the items r, r + n, r + 2 n, ... of the file. An item's name comes from its prompt and its seed is
--seed, neither from its place: the files are the same for any number of ranks, and a line added later leaves finished
videos as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parklab.files import read_file
from parklab.store import FINISHED, Cell, CellWriter, Record, Say, Store
from parklab.studio import checkpoints
from parklab.studio.generate import LOADING, READING, Progress, Stage, first_stage, make_video, pipeline_for, video_cell
from parklab.studio.request import Request, fit_to_pipeline, prepare, understood
from parklab.studio.video import video_library

FORMAT = "parkattn.prompts.1"
INDEX = "index.json"
NAME_LETTERS = 48
LARGEST_FILE = 2**24  # bytes of prompts


@dataclass(frozen=True)
class Item:
    line: int  # in the file, counted from 1
    prompt: str
    video: str  # file name


@dataclass(frozen=True)
class Shard:
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0

    def takes(self, place: int) -> bool:
        return place % self.ranks == self.rank


@dataclass(frozen=True)
class Outcome:
    made: int
    kept: int
    index: Path | None  # None while other ranks are still at work


def read_prompts(path: Path) -> list[Item]:
    """One prompt per line, in UTF-8; empty lines and lines that begin with # are skipped."""
    wanted = "a text file with one prompt per line"
    data = read_file("prompts", path, wanted, most=LARGEST_FILE)
    try:
        # a mark of the encoding is no part of a prompt; only ends of lines end one, not what Unicode calls a separator
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts: expected {wanted}, got {path} ({error}); check the path.") from None
    items: dict[str, Item] = {}
    for number, line in enumerate(lines, 1):
        prompt = line.strip()
        if not prompt or prompt.startswith("#"):
            continue
        item = Item(number, prompt, video_name(prompt))
        if item.video in items:
            raise ValueError(
                f"prompts: expected every prompt once, got lines {items[item.video].line} and {number} of {path} with "
                f"the same ({prompt!r}); remove one, or make other seeds in another folder with --seed and --out."
            )
        items[item.video] = item
    if not items:
        raise ValueError(f"prompts: expected one prompt per line, got {path} without any; write some.")
    return list(items.values())


def video_name(prompt: str) -> str:
    """Readable, and different for prompts that differ anywhere."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:NAME_LETTERS].strip("-")
    return f"{words}-{hashlib.sha256(prompt.encode()).hexdigest()[:8]}.mp4".lstrip("-")


def shard_from_environment() -> Shard:
    """What torchrun and accelerate tell their processes; one process where nobody says anything."""
    told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if told["RANK"] is None and told["WORLD_SIZE"] is None:
        return Shard()
    try:
        rank, ranks = int(told["RANK"] or ""), int(told["WORLD_SIZE"] or "")
        local = int(told["LOCAL_RANK"] if told["LOCAL_RANK"] is not None else rank)
    except ValueError:
        raise ValueError(
            f"RANK, WORLD_SIZE, LOCAL_RANK: expected whole numbers, got {told}; start with torchrun or accelerate."
        ) from None
    if not 0 <= rank < ranks or local < 0:
        raise ValueError(f"RANK: expected 0 to WORLD_SIZE - 1, got {told}; start with torchrun or accelerate.")
    return Shard(rank, ranks, local)


def _requests_of(items: list[Item], request: Request, folder: Path, prompts: Path) -> dict[Item, Request]:
    asked: dict[Item, Request] = {}
    lines: dict[str, int] = {}
    for item in items:
        try:
            prompt = understood(item.prompt, folder)
        except ValueError as error:
            raise ValueError(f"{prompts} line {item.line}: {error}") from None
        if lines.setdefault(prompt, item.line) != item.line:
            raise ValueError(
                f"prompts: expected every prompt once, got lines {lines[prompt]} and {item.line} of {prompts} with the "
                "same; remove one."
            )
        asked[item] = replace(request, prompt=prompt)
    return asked


def generate_videos(
    request: Request,
    prompts: Path,
    out: Path,
    *,
    shard: Shard | None = None,
    overwrite: bool = False,
    progress: Callable[[Item, int, int], Progress | None] | None = None,
    finished: Callable[[Item, int, int, dict[str, Any]], None] | None = None,
    stage: Stage = lambda what: None,
    say: Say = lambda line: None,
) -> Outcome:
    """This rank's videos and records in `out`, and the index once every rank's are there. request.prompt is not used.

    Every item of the file is checked before the first video is made. progress(item, place, of) gives what follows its
    steps. Processes that are no ranks of each other may share a folder too: what one of them is making, the others
    leave to it.
    """
    shard = shard_from_environment() if shard is None else shard
    video_library()
    items = read_prompts(prompts)
    take_device(request.device, shard)
    stage(READING)
    request, folder = prepare(replace(request, prompt=items[0].prompt))
    asked = _requests_of(items, request, folder, prompts)
    store = Store(out, say)
    cells = {item: video_cell(asked[item], item.video) for item in items}
    store.tidy()
    done = {item for item in items if not overwrite and store.find(cells[item]) is not None}
    store.expect_place([cells[item] for item in items if item not in done])
    mine = [item for place, item in enumerate(items) if shard.takes(place)]
    todo = {cells[item].name: item for item in mine if item not in done}
    made: list[Item] = []
    if todo:
        stage(LOADING)
        pipe = pipeline_for(request, folder)
        expect_whole_prompts(
            request, {item.line: asked[item].prompt for item in items if item not in done}, pipe, prompts
        )

    def make(making: CellWriter) -> None:
        item = todo[making.cell.name]
        made.append(item)
        follow = progress(item, len(made), len(todo)) if progress is not None else None
        if len(made) == 1:
            stage(first_stage(request))
        record = make_video(pipe, asked[item], making, progress=follow)
        if finished is not None:
            finished(item, len(made), len(todo), record)

    store.fill([cells[item] for item in todo.values()], make, overwrite=overwrite)
    # whoever ends last finds everything there; ranks that end together write the same bytes
    records = [store.look(cells[item]) for item in items]
    index = None
    if all(found.state == FINISHED for found in records):
        index = write_index(store, items, request.seed, [found.record or {} for found in records])
    return Outcome(len(made), len(mine) - len(made), index)


def expect_whole_prompts(request: Request, lines: dict[int, str], pipe: Any, prompts: Path) -> None:
    """Only the loaded pipeline knows a prompt's length; one that is too long must be found before the first video, not
    after a night.
    """
    room = fit_to_pipeline(replace(request, prompt=""), pipe).text_tokens
    for line, prompt in lines.items():
        try:
            if room is not None:
                checkpoints.expect_whole_text(pipe, "prompt", prompt, room)
        except ValueError as error:
            raise ValueError(f"{prompts} line {line}: {error}") from None


def take_device(device: str, shard: Shard) -> None:
    """Each rank its own GPU. It is made the current one and stays "cuda" in records, which must not depend on the
    number of ranks.
    """
    if shard.ranks == 1 or not torch.cuda.is_available() or device == "cpu":
        return
    if device not in ("auto", "cuda"):
        raise ValueError(
            f"device: expected auto, cuda or cpu with {shard.ranks} ranks, which take a GPU each, got {device!r}; "
            "leave it out."
        )
    if shard.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK: expected one of the {torch.cuda.device_count()} GPUs of this machine, got "
            f"{shard.local_rank}; start as many processes as it has GPUs."
        )
    torch.cuda.set_device(shard.local_rank)


def write_index(store: Store, items: list[Item], seed: int, records: list[Record]) -> Path:
    """The whole folder in one file, the same bytes whoever writes it."""
    rows = [
        {"prompt": item.prompt, "seed": seed, "video": item.video, "sha256": record["files"][item.video]}
        for item, record in zip(items, records, strict=True)
    ]
    store.put(Cell(name=INDEX.removesuffix(".json"), format=FORMAT), {"format": FORMAT, "videos": rows}, {})
    return store.folder / INDEX
