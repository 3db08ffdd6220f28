"""Tables of `park bench models`: newer models at real size, by the block and whole."""

from __future__ import annotations

from records import Record, lines, published

from parklab.experiments.tables import page_table

NAMES = {
    "minimax-h3": "MiniMax-H3", "ltx-2.5": "LTX-2.5", "kandinsky-5-pro": "Kandinsky 5 Pro",
    "cosmos-2.5-14b": "Cosmos 2.5 14B",
}  # fmt: skip


def gated() -> dict[str, Record]:
    """The figures of each model, whose gate must have passed."""
    cases = lines("gpu_models.jsonl", "models gate")
    assert all(case["ok"] for case in cases)
    return {found["model"]: found for found in lines("gpu_models.jsonl", "models")}


@published
def blocks_of_newer_models() -> str:
    def row(found: Record) -> tuple[str, ...]:
        paper, quality = found["paper"], found["quality"]
        return (
            NAMES[found["model"]], found["video"], f"{found['tokens']:,}", f"{found['block_dense_s']:.2f} s",
            f"{found['block_own_dense_s']:.2f} s",
            f"{paper['block_s']['reuse']:.2f} s, {paper['reuse_speedup']:.2f}x",
            f"{quality['block_s']['reuse']:.2f} s, {quality['reuse_speedup']:.2f}x",
            f"{paper['density']:.3f}, {quality['density']:.3f}",
        )  # fmt: skip

    return page_table(
        "model | video | tokens | dense, stock | dense, our kernel | reuse, `paper` | reuse, `quality` | density",
        [row(gated()[name]) for name in NAMES],
    )


@published
def whole_minimax_h3() -> str:
    (found,) = lines("gpu_models.jsonl", "models whole")
    assert found["ok"]
    kinds = {"dense": "dense, stock", "refresh": "first plan", "reuse": "reuse"}
    return page_table(
        "one forward of MiniMax-H3 | seconds | of dense | peak memory",
        [
            (
                f"{told}, {found['blocks']} of {found['released_blocks']} blocks", f"{found['seconds'][kind]:.1f} s",
                f"{found['seconds'][kind] / found['seconds']['dense']:.2f}", f"{found['peak_gb'][kind]:.1f} GB",
            )
            for kind, told in kinds.items()
        ],
    )  # fmt: skip
