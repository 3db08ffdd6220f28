"""Plans as token masks, and small problems with odd grids, text and padding to check planners on."""

from dataclasses import dataclass, replace
from importlib import import_module
from random import Random

import torch

from parkattn.ops.cluster.definition import initial_tokens
from parkattn.reuse import History
from parkattn.site import CallSite
from restated.cases import cases

# in this order: the first three use the package's function `restated`; the others import a module of that name, which
# takes its place
NAMES = ("sparge", "xattention", "svg", "sol", "sta", "radial")
RESTATED = {name: import_module(f"restated.{name}").restate for name in NAMES}
KINDS = ("gaussian", "drifting", "frames", "runs")
TEXTS = ("none", "front", "inside", "end")
PADDINGS = ("none", "tail", "scattered")


def token_mask(plan):
    """[b h n m] bool: which query sees which key of its own."""
    b, h, n = plan.queries.labels.shape
    rows = plan.queries.labels.long().unsqueeze(-1).expand(b, h, n, plan.keys.count)
    columns = plan.keys.labels.long().unsqueeze(-2).expand(b, h, n, -1)
    return plan.mask.gather(2, rows).gather(3, columns)


@dataclass(frozen=True)
class Problem:
    """q, k, v [b h n d] in float64 of a video with text and padding."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grid: tuple[int, int, int]
    text: slice | None
    key_valid: torch.Tensor | None
    scale: float | None
    seed: int

    @property
    def tensors(self):
        return self.q, self.k, self.v

    @property
    def inputs(self):
        return {"grid": self.grid, "text": self.text, "key_valid": self.key_valid, "scale": self.scale}

    def site(self, **where):
        return CallSite(**self.inputs, **where)


def problem(seed, *, largest=(4, 3, 4), dim=5):
    """The same one for a seed. Every combination of text and padding comes once in twelve seeds."""
    draw = Random(seed)
    grid = tuple(draw.randint(1, most) for most in largest)
    cells = grid[0] * grid[1] * grid[2]
    text, words = _text(TEXTS[seed % 4], cells, draw)
    batch, heads = draw.choice(((1, 1), (1, 2), (2, 1)))
    n, tensors = cells + words, _tensors(KINDS[seed // 12 % 4], seed, (batch, heads, cells + words, dim), grid)
    valid = _valid(PADDINGS[seed // 4 % 3], batch, n, text, draw)
    return Problem(*tensors, grid, text, valid, draw.choice((None, 0.3, 1.0)), seed)


def flow_levels(total, shift=1.0):
    """Noise levels of a flow scheduler: shift s / (1 + (shift - 1) s) of levels s that fall linearly."""
    return tuple(shift * s / (1 + (shift - 1) * s) for s in (1 - step / total for step in range(total)))


def phases(schedule, total, *, ran=None, layer=0, levels=None):
    """Phase names of the steps that really run, with the layer's own memory of its last plan."""
    last, names = None, []
    for step in ran or range(total):
        site = CallSite(step=step, layer=layer, total_steps=total, noise_levels=levels)
        names.append(schedule.phase(site, History(last)).name)
        last = step if names[-1] in ("anchor", "refresh") else last
    return names


def attend(module, given, *, step=0, **settings):
    """One call of the module's first method with the PyTorch definitions, at a step that is not dense."""
    entry = module.ENTRIES[0]
    method = entry.make(entry.config(backend="reference", dense_steps=0, dense_layers=(), **settings))
    return method(*given.tensors, given.site(step=step, total_steps=10))


def _text(place, cells, draw):
    if place == "none":
        return None, 0
    words = draw.randint(1, 4)
    start = {"front": 0, "inside": draw.randint(0, cells), "end": cells}[place]
    return slice(start, start + words), words


def _tensors(kind, seed, shape, grid):
    """q and k that share directions along the sequence, so that blocks differ; v without any."""
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(3))
    if kind == "gaussian":
        return 2 * q, k, v
    length = {"drifting": 1, "frames": grid[1] * grid[2], "runs": 4}[kind]
    steps = torch.arange(shape[2]) // length
    centres = torch.randn(*shape[:2], int(steps[-1]) + 1, shape[3], generator=source, dtype=torch.float64)
    centre = (centres.cumsum(2) if kind == "drifting" else centres)[:, :, steps]
    return 2 * centre + 0.3 * q, centre + 0.3 * k, v


def _valid(kind, batch, n, text, draw):
    """Every batch element keeps a video token."""
    if kind == "none":
        return None
    video = [i for i in range(n) if text is None or not text.start <= i < text.stop]
    valid = torch.ones(batch, n, dtype=torch.bool)
    for row in valid:
        if kind == "tail":
            row[n - draw.randint(0, n // 2) :] = False
        else:
            row &= torch.tensor([draw.random() < 0.7 for _ in range(n)])
        row[draw.choice(video)] = True
    return valid


# Generated problems for methods that cluster tokens, and how their restatements are asked about one batch element -----

COUNT = 200


def problems(count, seed):
    """The restatements' generated cases (text, padding, odd grids); their loops are slow, so most keep one head of
    theirs.
    """
    for i, case in enumerate(cases(count, seed)):
        yield case if i % 8 == 0 else replace(case, q=case.q[:, :1], k=case.k[:, :1], v=case.v[:, :1])


def site_of(case, **more):
    return CallSite(grid=case.grid, text=case.text, key_valid=case.key_valid, scale=case.scale, values=case.v, **more)


def first_tokens(case, b, clusters, seed=0):
    """Sequence positions of our first centroids of batch element b, as the restatements take them: [1, h, C]."""
    video = torch.tensor(video_tokens_of(case, b))
    chosen = video[initial_tokens(len(video), min(clusters, len(video)), seed)]
    return chosen.expand(1, case.q.shape[1], -1)


def video_tokens_of(case, b):
    text = range(*case.text.indices(case.q.shape[2])) if case.text is not None else ()
    return [
        i for i in range(case.q.shape[2]) if i not in text and (case.key_valid is None or bool(case.key_valid[b, i]))
    ]


def alone(case, b):
    """What a restatement takes of one batch element: it is treated as if it were alone, with as many clusters as it has
    tokens for.
    """
    valid = None if case.key_valid is None else case.key_valid[b : b + 1]
    tensors = (x[b : b + 1] for x in (case.q, case.k, case.v))
    return tuple(tensors), {"grid": case.grid, "text": case.text, "key_valid": valid, "scale": case.scale}


def chosen(case, *spread):
    """Clusters and settings that follow from the case's seed."""
    draw = Random(case.seed)
    n = case.q.shape[2]
    return (
        draw.choice([1, 2, 3, 5, 9, 2, 3, n]),
        draw.choice([1, 3, 5, 8, 14, 3, 5, n]),
        *(draw.choice(values) for values in spread),
    )


def matches(plan, b, result):
    return torch.equal(token_mask(plan)[b], result.allowed[0])
