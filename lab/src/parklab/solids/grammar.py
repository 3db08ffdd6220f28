"""The sentences the model understands: "a red metal sphere rolls left past a blue matte cube, the camera orbits".

    sentence   := object MOTION ["past" | "beside" | "around" | "with" object] ", the camera" CAMERA
    object     := ("a" | "an") COLOUR MATERIAL SHAPE
    COLOUR     := red | orange | yellow | green | cyan | blue | purple | pink
    MATERIAL   := matte | metal | checkered | wooden
    SHAPE      := sphere | cube | cone | torus | capsule
    MOTION     := rolls left | rolls right | slides left | slides right | bounces | orbits | collides
    CAMERA     := stays | pans | orbits

The motion decides the word before the second object: rolls and slides "past", bounces "beside", orbits "around",
collides "with". Only collides needs a second object. The motion is the first object's; the second stands, until it is
hit. Three kinds of sentences are held out of training, by rules anyone can recompute (the first that fits counts):

    "pair"         an object's colour and shape were never seen together: colour index = shape index + 1 (5 of 40 pairs)
    "combination"  CRC-32 of the first object with its motion ("red metal sphere rolls left") is divisible by 10
    "sentence"     the rest was seen, but never in this sentence: CRC-32 of the sentence is divisible by 10
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from parkattn.checks import shown
from parklab.sprites.grammar import expect_known

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink")
MATERIALS = ("matte", "metal", "checkered", "wooden")
SHAPES = ("sphere", "cube", "cone", "torus", "capsule")
MOTIONS = ("rolls left", "rolls right", "slides left", "slides right", "bounces", "orbits", "collides")
CAMERAS = ("stays", "pans", "orbits")
LINKS = ("past", "past", "past", "past", "beside", "around", "with")  # before the second object, by motion
KINDS = ("pair", "combination", "sentence")
EXAMPLE = "a red metal sphere rolls left past a blue matte cube, the camera orbits"
_SLOTS = (("a", "an", ",", "the", "camera"), COLOURS, MATERIALS, SHAPES, MOTIONS, LINKS, CAMERAS)
WORDS = tuple(dict.fromkeys(word for slot in _SLOTS for entry in slot for word in entry.split()))
LONGEST = 16  # tokens of the longest sentence, its end included


@dataclass(frozen=True)
class Thing:
    """One object of a sentence."""

    colour: str
    material: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.material} {self.shape}"

    @property
    def phrase(self) -> str:
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self}"

    @property
    def never_together(self) -> bool:
        return COLOURS.index(self.colour) == SHAPES.index(self.shape) + 1


@dataclass(frozen=True)
class Scene:
    """One sentence, taken apart; second: None where one object is alone."""

    first: Thing
    motion: str
    second: Thing | None
    camera: str

    @property
    def sentence(self) -> str:
        other = f" {LINKS[MOTIONS.index(self.motion)]} {self.second.phrase}" if self.second else ""
        return f"{self.first.phrase} {self.motion}{other}, the camera {self.camera}"

    @property
    def things(self) -> tuple[Thing, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def held_out(self) -> str | None:
        """ "pair", "combination", "sentence", or None for a sentence that training may use."""
        if any(thing.never_together for thing in self.things):
            return "pair"
        if zlib.crc32(f"{self.first} {self.motion}".encode()) % 10 == 0:
            return "combination"
        return "sentence" if zlib.crc32(self.sentence.encode()) % 10 == 0 else None


def draw_scene(drawn: random.Random) -> Scene:
    """Any sentence; half of them with two objects, and never two objects of the same colour."""
    colours = drawn.sample(COLOURS, 2)
    first, second = (Thing(colour, drawn.choice(MATERIALS), drawn.choice(SHAPES)) for colour in colours)
    motion = drawn.choice(MOTIONS)
    alone = drawn.random() < 0.5 and motion != "collides"
    return Scene(first, motion, None if alone else second, drawn.choice(CAMERAS))


def draw_training_scene(drawn: random.Random) -> Scene:
    while (scene := draw_scene(drawn)).held_out is not None:
        pass
    return scene


def held_out_scenes(count: int, seed: int = 0) -> list[Scene]:
    """`count` different held-out sentences, the three kinds by turns."""
    drawn, found = random.Random(f"held out {seed}"), dict[Scene, None]()
    while len(found) < count:
        scene = draw_scene(drawn)
        if scene.held_out == KINDS[len(found) % len(KINDS)]:
            found[scene] = None
    return list(found)


def parse(prompt: str) -> Scene:
    """The scene a prompt asks for. Case, extra spaces and a final full stop do not matter."""
    words = prompt.lower().strip().rstrip(".").replace(",", " , ").split()
    expect_known(words, WORDS, EXAMPLE)
    scene = _read(words)
    if scene is None or scene.sentence.replace(",", " ,").split() != words:
        raise ValueError(
            'prompt: expected "a COLOUR MATERIAL SHAPE MOTION [past a COLOUR MATERIAL SHAPE], the camera MOVES", '
            f"got {shown(prompt)}; write for example: {EXAMPLE}."
        )
    return scene


def _read(words: list[str]) -> Scene | None:
    """The scene whose sentence may be these words; None where they are too few or stand in the wrong slots."""
    for_motion = 2 if words[4:5] in (["rolls"], ["slides"]) else 1
    after = 4 + for_motion
    if len(words) not in (after + 4, after + 9):
        return None
    second = Thing(*words[after + 2 : after + 5]) if len(words) == after + 9 else None
    scene = Scene(Thing(*words[1:4]), " ".join(words[4:after]), second, words[-1])
    right = scene.motion in MOTIONS and scene.camera in CAMERAS and (second is not None or scene.motion != "collides")
    right = right and all(t.colour in COLOURS and t.material in MATERIALS and t.shape in SHAPES for t in scene.things)
    return scene if right else None
