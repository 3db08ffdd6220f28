"""Videos on disk, in pairs: two files, or two folders whose videos have the same names.

raw frames    uint8 [frames, height, width, 3] before any codec: .npy, or .safetensors with a tensor `frames`
decoded mp4   the frames of an mp4, after its codec

In a folder of the result store the records say which videos there are, and which bytes belong to them. Raw frames are
taken where both folders have them; raw and decoded are never compared with each other: that would measure the codec.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parkattn.checks import first_line, shown
from parklab.files import read_file, sha256_of
from parklab.metrics.fidelity import Frames
from parklab.metrics.measures import MEASURES, SINGLE, Setting, measure_video

RAW, DECODED = "raw frames", "decoded mp4"
LARGEST_FILE = 2**31  # bytes: 776 frames of 720p
ENDINGS = {".npy": RAW, ".safetensors": RAW, ".mp4": DECODED}

ReadRecord = Callable[[Path], Mapping[str, Any] | None]  # a sealed record of the result store, or None
ReadMp4 = Callable[[Path], Frames]


@dataclass(frozen=True)
class Clip:
    path: Path
    sha256: str | None = None  # as a record of the store has it

    @property
    def kind(self) -> str:
        return ENDINGS[self.path.suffix]


@dataclass(frozen=True)
class Pair:
    name: str
    video: Clip
    reference: Clip | None


def find_pairs(
    video: Path, reference: Path | None, read_record: ReadRecord, *, only: str | None = None
) -> tuple[list[Pair], dict[str, str]]:
    """The pairs, and by name why others are none. only: RAW or DECODED, of what folders have both of."""
    places = [place for place in (video, reference) if place is not None]
    for place in places:
        if not _is_there(place):
            raise ValueError(
                f"video: expected a file or a folder, got {shown(str(place))}, which does not exist; check the path."
            )
    if len({place.is_dir() for place in places}) == 2:
        got = f"{shown(str(video))} and {shown(str(reference))}"
        raise ValueError(f"reference: expected two files or two folders, got {got}; pass two of a kind.")
    if not video.is_dir():
        clips = [_file_clip(place, read_record) for place in places]
        return [Pair(video.name, clips[0], clips[1] if reference is not None else None)], {}
    folders = [_clips(place, read_record) for place in places]
    names = sorted({name for folder in folders for name in folder})
    if not names:
        wanted = ", ".join(ENDINGS)
        raise ValueError(f"video: expected a folder with {wanted} files, got {video} without any; check the path.")
    pairs, alone = [], {}
    for name in names:
        kinds = [set(folder.get(name, ())) & ({only} if only else {RAW, DECODED}) for folder in folders]
        both = set.intersection(*kinds)
        if not both:
            lacking = [str(place) for place, kind in zip(places, kinds, strict=True) if not kind]
            where = f"none in {lacking[0]}" if lacking else f"{kinds[0].pop()} and {kinds[1].pop()}"
            wanted = only or "the same kind of frames"
            alone[name] = f"frames: expected {wanted} on both sides, got {where}; make it there too."
            continue
        kind = RAW if RAW in both else DECODED
        clips = [folder[name][kind] for folder in folders]
        pairs.append(Pair(name, clips[0], clips[1] if reference is not None else None))
    return pairs, alone


def measure_pair(pair: Pair, names: Sequence[str], setting: Setting, read_mp4: ReadMp4) -> dict[str, Any]:
    """The pair's entry of the record: its files and values; those of one video alone for the reference too."""
    if pair.reference is not None and pair.video.kind != pair.reference.kind:
        got = f"{pair.video.kind} and {pair.reference.kind}"
        raise ValueError(f"frames: expected raw frames or mp4 on both sides, got {got}; pass two of a kind.")
    video = read_clip(pair.video, read_mp4)
    entry: dict[str, Any] = {
        "name": pair.name,
        "frames": pair.video.kind,
        "shape": list(video.shape),
        "video": str(pair.video.path),
    }
    reference = None if pair.reference is None else read_clip(pair.reference, read_mp4)
    entry["values"] = measure_video(names, video, reference, setting)
    if pair.reference is not None and reference is not None:
        entry["reference"] = str(pair.reference.path)
        single = [name for name in names if MEASURES[name].kind == SINGLE]
        entry["values_of_reference"] = measure_video(single, reference, None, setting)
    return entry


def mean_values(entries: Sequence[Mapping[str, Any]], names: Sequence[str], of: str = "values") -> dict[str, float]:
    """The mean over pairs of each pair's value."""
    measured = [name for name in names if entries and name in entries[0][of]]
    return {name: statistics.fmean(entry[of][name]["mean"] for entry in entries) for name in measured}


def read_clip(clip: Clip, read_mp4: ReadMp4) -> Frames:
    """uint8 [frames, height, width, 3]; whatever else the file is, one line says so."""
    if clip.sha256 is not None and sha256_of(clip.path) != clip.sha256:
        raise ValueError(f"{clip.path}: expected the file that its record describes, got another; make it again.")
    if clip.kind == DECODED:
        return read_mp4(clip.path)
    try:
        found = _read_raw(clip.path)
    except Exception as error:  # a damaged file ends in any of a parser's errors
        raise ValueError(f"{clip.path}: expected raw frames, got {first_line(error)}; make it again.") from None
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or not math.prod(found.shape):
        got = f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{clip.path}: expected uint8 [frames, height, width, 3], got {got}; make it again.")
    return found


def _read_raw(path: Path) -> Frames:
    data = read_file("video", path, "raw frames", most=LARGEST_FILE)
    if path.suffix == ".npy":
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = reader(file)
        # before an array of the claimed size is made
        if dtype != np.uint8 or columns_first or math.prod(shape) != len(data) - file.tell():
            raise ValueError(f"{dtype} {shown(shape)} in {len(data)} bytes")
        frames: Frames = np.frombuffer(data, np.uint8, offset=file.tell()).reshape(shape).copy()
        return frames
    import safetensors.numpy

    found = safetensors.numpy.load(data)
    if "frames" not in found:
        raise ValueError("no tensor frames")
    return found["frames"]


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError):  # also a name that no file system takes
        return False
    return True


def _file_clip(path: Path, read_record: ReadRecord) -> Clip:
    """With the hash of a record of the store beside it, or beside its folder for raw frames."""
    if path.suffix not in ENDINGS:
        wanted = ", ".join(ENDINGS)
        raise ValueError(f"video: expected a file that ends with {wanted}, got {shown(path.name)}; convert it first.")
    for folder in path.absolute().parents[:2]:
        known = (read_record(folder / f"{path.stem}.json") or {}).get("files", {})
        if sha256 := known.get(path.absolute().relative_to(folder).as_posix()):
            return Clip(path, sha256)
    return Clip(path)


def _clips(folder: Path, read_record: ReadRecord) -> dict[str, dict[str, Clip]]:
    """Name -> kind -> clip."""
    found: dict[str, dict[str, Clip]] = {}
    records = {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}
    for name, record in records.items():
        for file, sha256 in (record or {}).get("files", {}).items():
            # a record also lists what is derived from its videos, under other names
            if Path(file).stem == name and Path(file).suffix in ENDINGS:
                clip = Clip(folder / file, sha256)
                found.setdefault(name, {})[clip.kind] = clip
    if any(records.values()):
        return found
    for path in sorted(folder.iterdir()):
        if path.suffix in ENDINGS and path.is_file():
            found.setdefault(path.stem, {})[ENDINGS[path.suffix]] = Clip(path)
    return found
