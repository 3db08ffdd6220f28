"""The small trained video model in the box: prompt grammar, procedural data, model, training, prompt-following check.

`CHECKPOINT` is an ordinary diffusers folder: `WanPipeline.from_pretrained(CHECKPOINT)`. `FEW_STEPS` is a LoRA of it for
runs of 4 to 8 steps.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
FEW_STEPS = Path(__file__).parent / "few_steps" / "pytorch_lora_weights.safetensors"
LORAS = {"few-steps": FEW_STEPS}  # by the names that commands take
