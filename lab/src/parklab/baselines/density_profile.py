"""How many keys each head needs, measured once per model on dense attention: what SVOO's floors are made of.

The required density of a head at one step and layer is the mean over video queries of

    (the number of largest softmax probabilities over video keys that sum to `mass` of their total) / (video keys).

Several inputs (prompts, guidance branches) are joined by their maximum. The authors' table of it calls the column
"Sparsity".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parkattn.checks import expect_attention_inputs, expect_choice, expect_count, expect_fraction
from parkattn.ops import outside_autocast
from parkattn.ops.attend.definition import dense_attention
from parkattn.plan import assign_roles
from parkattn.segments import aligned, compute_dtype
from parkattn.site import AttentionOutput, AttentionStats, CallSite
from parklab.files import expect_file, write_atomically

MASS = 0.95
LARGEST_FILE = 2**28  # bytes; 50 steps of 60 layers and 40 heads take a megabyte
QUERIES_AT_ONCE = 512  # bounds the sorted [queries, keys] probabilities
_FORMAT = "parkattn.density-profile.1"
# park profile --samples 256 --height 128 --width 192 --frames 17, with four training prompts of the grammar
IN_THE_BOX = {"sprites": Path(__file__).with_name("sprites_density.safetensors")}


def required_density(
    q: Tensor,
    k: Tensor,
    *,
    text: slice | None = None,
    key_valid: Tensor | None = None,
    scale: float | None = None,
    mass: float = MASS,
    samples: int | None = None,
) -> Tensor:
    """[b h] float64. samples: this many evenly spaced video queries instead of all. Waits for the GPU."""
    expect_attention_inputs(q, k)
    expect_fraction("mass", mass, zero=False)
    with outside_autocast(q):
        roles, factor = assign_roles(q, k, text, key_valid), q.shape[-1] ** -0.5 if scale is None else scale
        b, h = q.shape[:2]
        found = torch.empty(b, h, dtype=torch.float64, device=q.device)
        for i in range(b):
            rows = (
                torch.arange(q.shape[2], device=q.device)
                if roles.clustered_queries is None
                else roles.clustered_queries[i].nonzero()[:, 0]
            )
            seen = (
                torch.arange(k.shape[2], device=q.device)
                if roles.clustered_keys is None
                else roles.clustered_keys[i].nonzero()[:, 0]
            )
            if samples is not None and samples < len(rows):
                rows = rows[torch.linspace(0, len(rows) - 1, samples, device=q.device).round().long()]
            for j in range(h):
                queries, keys = (aligned(x[i, j, at]).to(compute_dtype(q.dtype)) for x, at in ((q, rows), (k, seen)))
                needed = [_keys_needed(part @ keys.T * factor, mass).sum() for part in queries.split(QUERIES_AT_ONCE)]
                found[i, j] = torch.stack(needed).sum().double() / (len(rows) * len(seen))
        return found


def _keys_needed(scores: Tensor, mass: float) -> Tensor:
    """How many of the largest probabilities reach the mass, the one that crosses it included: [n m] -> [n]"""
    reached = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return (reached < mass * reached[:, -1:]).sum(-1) + 1


@dataclass(frozen=True)
class DensityProfile:
    densities: Tensor  # [steps layers heads] float64 in (0, 1], NaN where nothing was measured
    mass: float = MASS

    def at(self, site: CallSite) -> Tensor | None:
        """Of this call [heads]; a run of another number of steps takes the same share of the way. None: not in the
        profile.
        """
        steps, layers, _ = self.densities.shape
        step = site.step if site.total_steps is None else site.step * steps // site.total_steps
        return self.densities[step, site.layer] if 0 <= step < steps and 0 <= site.layer < layers else None

    def to(self, device: torch.device) -> DensityProfile:
        return DensityProfile(self.densities.to(device), self.mass)

    def packed(self) -> bytes:
        """The bytes of its file. The usual mass is left out: safetensors writes several facts in no fixed order."""
        from safetensors.torch import save

        facts = {"format": _FORMAT} | ({} if self.mass == MASS else {"mass": repr(self.mass)})
        return save({"densities": self.densities.cpu().contiguous()}, metadata=facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, complete or absent."""
        write_atomically(Path(path), self.packed())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DensityProfile:
        """A profile that was saved, or by name the one of the model in the box; a file that holds anything else is
        refused.
        """
        from safetensors import SafetensorError, safe_open

        advice = "make one with park profile."
        path = IN_THE_BOX.get(str(path), path)
        if os.path.exists(path):  # noqa: PTH110 (a name that no file system takes is False)
            expect_file("profile", path, "a file written by DensityProfile.save", most=LARGEST_FILE)
        try:
            with safe_open(str(path), framework="pt") as file:
                facts, names = file.metadata() or {}, list(file.keys())
                densities = file.get_tensor("densities") if "densities" in names else torch.empty(0)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"profile: expected a file written by DensityProfile.save, got no file at {path}; {advice}"
            ) from None
        except SafetensorError as error:
            raise ValueError(
                f"{path}: expected a density profile, got a file that does not parse ({error}); {advice}"
            ) from None
        expect_choice(f"format of {path}", facts.get("format"), [_FORMAT])
        known = densities[~densities.isnan()]
        if densities.ndim != 3 or densities.dtype != torch.float64 or not bool(((known > 0) & (known <= 1)).all()):
            raise ValueError(
                f"{path}: expected float64 densities [steps, layers, heads] in (0, 1], got others of shape "
                f"{list(densities.shape)}; {advice}"
            )
        try:
            mass = float(facts.get("mass", MASS))
        except ValueError:
            mass = float("nan")
        expect_fraction(f"mass of {path}", mass, zero=False)
        return cls(densities, mass)


class DensityProfiler:
    """Dense attention that notes what every head would have needed: run a model with it once per prompt, then save
    `profile()`.
    """

    name = "density-profiler"

    def __init__(self, mass: float = MASS, samples: int | None = None) -> None:
        expect_fraction("mass", mass, zero=False)
        if samples is not None:
            expect_count("samples", samples)
        self.mass, self.samples = mass, samples
        self._needed: dict[tuple[int, int], Tensor] = {}
        self._steps = 0

    @property
    def state_bytes(self) -> int:
        return sum(needed.nbytes for needed in self._needed.values())

    def reset(self) -> None:
        """What was measured joins what the next run measures; only a new profiler begins anew."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        self.note(q, k, site)
        out = (
            site.dense()
            if site.dense is not None
            else dense_attention(q, k, v, scale=site.scale, key_valid=site.key_valid)
        )
        return AttentionOutput(
            out, AttentionStats("dense", "the method measures dense attention", q.new_ones(q.shape[:2]))
        )

    @torch.no_grad()
    def note(self, q: Tensor, k: Tensor, site: CallSite) -> None:
        density = required_density(
            q, k, text=site.text, key_valid=site.key_valid, scale=site.scale, mass=self.mass, samples=self.samples
        ).amax(0)
        at = site.step, site.layer
        known = self._needed.get(at)
        self._needed[at] = density.cpu() if known is None else known.maximum(density.cpu())
        self._steps = max(self._steps, site.step + 1, site.total_steps or 0)

    def profile(self) -> DensityProfile:
        if not self._needed:
            raise ValueError(
                "profile: expected at least one call to have been measured, got none; "
                "run the model with this method first."
            )
        layers, heads = (
            1 + max(layer for _, layer in self._needed),
            max(len(needed) for needed in self._needed.values()),
        )
        densities = torch.full((self._steps, layers, heads), torch.nan, dtype=torch.float64)
        for (step, layer), needed in self._needed.items():
            densities[step, layer, : len(needed)] = needed
        return DensityProfile(densities, self.mass)
