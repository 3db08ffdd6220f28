"""The sentences the model understands: "a red circle moves right over blue waves".

    sentence   := ("a" | "an") COLOUR SHAPE MOTION "over" GROUND TEXTURE
    COLOUR     := red | orange | yellow | green | cyan | blue | purple | white      colour of the sprite
    SHAPE      := circle | square | triangle | star | cross | ring
    MOTION     := moves right | moves left | moves up | moves down | bounces | orbits
    GROUND     := blue | green | red | purple | brown | grey                        colour of the background
    TEXTURE    := waves | stripes | checks | dots | clouds | bricks

That is 8 x 6 x 6 x 6 x 6 = 10,368 sentences. Two kinds are held out of training, by rules anyone can recompute:

    "pair"      the sprite's colour and shape were never seen together: colour index = shape index + 1 (6 of 48 pairs)
    "sentence"  the pair was seen but never in this sentence: CRC-32 of the sentence is divisible by 10
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

from parkattn.checks import did_you_mean, shown

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
MOTIONS = ("moves right", "moves left", "moves up", "moves down", "bounces", "orbits")
GROUNDS = ("blue", "green", "red", "purple", "brown", "grey")
TEXTURES = ("waves", "stripes", "checks", "dots", "clouds", "bricks")
SLOTS = (COLOURS, SHAPES, MOTIONS, GROUNDS, TEXTURES)
SENTENCES = len(COLOURS) * len(SHAPES) * len(MOTIONS) * len(GROUNDS) * len(TEXTURES)
EXAMPLE = "a red circle moves right over blue waves"
WORDS = tuple(dict.fromkeys(word for slot in (("a", "an", "over"), *SLOTS) for entry in slot for word in entry.split()))


@dataclass(frozen=True)
class Scene:
    """One sentence, taken apart."""

    colour: str
    shape: str
    motion: str
    ground: str
    texture: str

    @property
    def sentence(self) -> str:
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} {self.motion} over {self.ground} {self.texture}"

    @property
    def indices(self) -> tuple[int, ...]:
        """Position of each word in its slot, in the order of SLOTS."""
        return tuple(slot.index(getattr(self, field.name)) for slot, field in zip(SLOTS, fields(self), strict=True))

    @property
    def held_out(self) -> str | None:
        """ "pair", "sentence", or None for a sentence that training may use."""
        colour, shape, *_ = self.indices
        if colour == shape + 1:
            return "pair"
        return "sentence" if zlib.crc32(self.sentence.encode()) % 10 == 0 else None


def every_scene() -> Iterator[Scene]:
    """All sentences, in a fixed order (the last slot varies fastest)."""
    return (Scene(*words) for words in product(*SLOTS))


def held_out_scenes(count: int, seed: int = 0) -> list[Scene]:
    """`count` held-out sentences, half of each kind ("pair" first where the count is odd), drawn without repetition."""
    drawn = random.Random(seed)
    by_kind = {kind: [s for s in every_scene() if s.held_out == kind] for kind in ("pair", "sentence")}
    wanted = {"pair": count - count // 2, "sentence": count // 2}
    for kind, scenes in by_kind.items():
        if wanted[kind] > len(scenes):
            raise ValueError(f"count: expected at most {2 * len(scenes)} held-out prompts, got {count}; ask for fewer.")
    return [scene for kind in by_kind for scene in drawn.sample(by_kind[kind], wanted[kind])]


def expect_known(words: Sequence[str], known: tuple[str, ...], example: str) -> None:
    """Of any grammar: a word that no training has seen is refused with its nearest neighbour."""
    for word in words:
        if word not in known:
            advice = did_you_mean(word, known, f"write for example: {example}.")
            raise ValueError(
                f"prompt: expected words this model was trained on, got unknown word {shown(word)}; "
                f"allowed words: {', '.join(name for name in known if name != ',')}; {advice}"
            )


def parse(prompt: str) -> Scene:
    """The scene a prompt asks for. Case, extra spaces and a final full stop do not matter."""
    words = prompt.lower().strip().rstrip(".").split()
    expect_known(words, WORDS, EXAMPLE)
    for_motion = 2 if "moves" in words else 1
    if len(words) != 6 + for_motion or words[0] not in ("a", "an") or words[3 + for_motion] != "over":
        raise ValueError(
            f'prompt: expected "a COLOUR SHAPE MOTION over COLOUR TEXTURE", got {shown(prompt)}; write for example: '
            f"{EXAMPLE}."
        )
    found = (words[1], words[2], " ".join(words[3 : 3 + for_motion]), words[4 + for_motion], words[5 + for_motion])
    for field, slot, entry in zip(fields(Scene), SLOTS, found, strict=True):
        if entry not in slot:
            raise ValueError(
                f"prompt: expected as {field.name} one of {', '.join(slot)}, got {entry!r}; write for example: "
                f"{EXAMPLE}."
            )
    return Scene(*found)
