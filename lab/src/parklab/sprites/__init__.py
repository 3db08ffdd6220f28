"""The small trained video model in the box: prompt grammar, procedural data, model, training, prompt-following check.

`CHECKPOINT` is an ordinary diffusers folder: `WanPipeline.from_pretrained(CHECKPOINT)`.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
