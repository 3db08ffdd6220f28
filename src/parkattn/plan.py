"""The nouns of the method: blocks of tokens, and the plan that says which block attends to which.

Letters used everywhere: b batch, h heads, n query tokens, m key tokens, d head dimension, c clusters, qb query blocks,
kb key blocks. A plan is a value: it can be saved, moved to another device and reused on later steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parkattn.checks import expect_choice
from parkattn.files import write_atomically


@dataclass(frozen=True)
class Blocks:
    """A partition of one side's tokens into contiguous blocks of a permuted order."""

    labels: Tensor  # [b h n] int32: the block of each token
    order: Tensor  # [b h n] int32: the token at each position of the permuted order
    offsets: Tensor  # [b h blocks+1] int32: where each block begins in the permuted order

    @property
    def count(self) -> int:
        return self.offsets.shape[-1] - 1

    @property
    def tokens(self) -> int:
        return self.labels.shape[-1]

    @property
    def sizes(self) -> Tensor:
        """[b h blocks] int32"""
        return self.offsets.diff(dim=-1)

    def to(self, device: torch.device | str) -> Blocks:
        return Blocks(self.labels.to(device), self.order.to(device), self.offsets.to(device))


@dataclass(frozen=True)
class Plan:
    """Which block pairs are computed.

    Query blocks: the clusters, then one block that sees every attendable key if there are text (or padding) queries.
    Key blocks: the clusters, then one block that every query sees if there is text, then one that no query sees if there
    is padding (`padding` is True then).
    """

    queries: Blocks
    keys: Blocks
    mask: Tensor  # [b h qb kb] bool
    query_clusters: int
    key_clusters: int
    padding: bool
    estimated_mass: Tensor  # [b h] fp32: share of the estimated importance that the selection keeps, mean over queries

    def density(self) -> Tensor:
        """[b h]: token pairs computed / token pairs dense attention computes (padding keys count in neither)."""
        rows, columns = self.queries.sizes.double(), self.keys.sizes.double()
        computed = (rows.unsqueeze(-2) @ self.mask.double() @ columns.unsqueeze(-1)).flatten(-2).squeeze(-1)
        attendable = columns[..., :-1] if self.padding else columns
        return (computed / (rows.sum(-1) * attendable.sum(-1))).float()

    def compensable(self) -> Tensor:
        """[b h kb] bool: key blocks that may contribute through their centroid where they are skipped."""
        clusters = torch.arange(self.keys.count, device=self.mask.device) < self.key_clusters
        return clusters & (self.keys.sizes > 0)

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether the plan was built for tensors of these shapes on this device."""
        return self.queries.labels.shape == q.shape[:3] and self.keys.labels.shape == k.shape[:3] and self.mask.device == q.device

    def to(self, device: torch.device | str) -> Plan:
        return Plan(
            self.queries.to(device),
            self.keys.to(device),
            self.mask.to(device),
            self.query_clusters,
            self.key_clusters,
            self.padding,
            self.estimated_mass.to(device),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, complete or absent."""
        from safetensors.torch import save

        tensors = {
            f"{side}.{part}": getattr(getattr(self, side), part) for side in ("queries", "keys") for part in ("labels", "order", "offsets")
        }
        tensors |= {"mask": self.mask, "estimated_mass": self.estimated_mass}
        counts = {"query_clusters": str(self.query_clusters), "key_clusters": str(self.key_clusters), "padding": str(int(self.padding))}
        data = save({name: t.contiguous() for name, t in tensors.items()}, metadata={"format": "parkattn.plan.1", **counts})
        write_atomically(Path(path), data)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Plan:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(
                f"{path}: expected a plan written by Plan.save, got a file that does not parse ({error}); save it again."
            ) from None
        expect_choice(f"format of {path}", facts.get("format"), ["parkattn.plan.1"])
        sides = [Blocks(*(tensors[f"{side}.{part}"] for part in ("labels", "order", "offsets"))) for side in ("queries", "keys")]
        counts = int(facts["query_clusters"]), int(facts["key_clusters"]), facts["padding"] == "1"
        return cls(sides[0], sides[1], tensors["mask"], *counts, tensors["estimated_mass"])
