"""python -m parklab.sprites.card FOLDER

Writes FOLDER/MODEL_CARD.md from the records beside it; also the plots of a run.
"""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

from torch import Tensor

from parklab.files import write_atomically

BAR = 0.8  # of held-out prompts, colour and shape both right


def loss_plot(path: Path, histories: dict[str, list[list[float]]]) -> None:
    """An SVG with one panel per stage: loss (log scale) against step; histories hold [step, loss, seconds] rows."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {240 * len(histories)}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, (name, history) in enumerate(histories.items()):
        parts += _panel(name, history, 240 * row)
    write_atomically(path, "\n".join([*parts, "</svg>"]).encode())


def _panel(
    name: str, history: list[list[float]], base: int, width: int = 720, height: int = 240, left: int = 64, top: int = 34
) -> list[str]:
    parts = [
        f'<text x="{left}" y="{base + 20}" font-weight="bold">{name}: mean loss of each report against step</text>'
    ]
    if len(history) < 2:
        return parts
    steps, logs = [h[0] for h in history], [math.log10(max(h[1], 1e-12)) for h in history]
    low, high = min(logs), max(max(logs), min(logs) + 1e-9)

    def x(step: float) -> float:
        return left + (width - left - 16) * (step - steps[0]) / (steps[-1] - steps[0])

    def y(log: float) -> float:
        return base + top + (height - top - 34) * (high - log) / (high - low)

    for share in (0, 0.25, 0.5, 0.75, 1):
        log, step = low + share * (high - low), steps[0] + share * (steps[-1] - steps[0])
        parts.append(f'<line x1="{left}" x2="{width - 16}" y1="{y(log):.1f}" y2="{y(log):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(log) + 4:.1f}" text-anchor="end">{10**log:.3g}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{base + height - 14}" text-anchor="middle">{step:.0f}</text>')
    points = " ".join(f"{x(step):.1f},{y(log):.1f}" for step, log in zip(steps, logs, strict=True))
    return [*parts, f'<polyline points="{points}" fill="none" stroke="#1f5fbf" stroke-width="1.4"/>']


def sample_sheet(
    path: Path, clips: list[Tensor], labels: list[str], frames: int = 5, width: int = 240, across: int = 1
) -> None:
    """A PNG, some clips ([3, frames, h, w] in [0, 1]) a row: evenly spread frames and below them the sentence."""
    from PIL import Image, ImageDraw

    height, label = round(width * clips[0].shape[2] / clips[0].shape[3]), 17
    each = frames * (width + 2) + 8
    sheet = Image.new("RGB", (across * each - 8, -(-len(clips) // across) * (height + label)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (clip, sentence) in enumerate(zip(clips, labels, strict=True)):
        left, top = index % across * each, index // across * (height + label)
        for column in range(frames):
            frame = clip[:, round(column * (clip.shape[1] - 1) / max(frames - 1, 1))]
            image = Image.fromarray((frame.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())
            sheet.paste(image.resize((width, height), Image.Resampling.LANCZOS), (left + column * (width + 2), top))
        pen.text((left + 2, top + height + 2), sentence, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_atomically(path, buffer.getvalue())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def card_text(training: dict, following: dict, size_bytes: int) -> str:
    """The model card; every figure comes from the two records."""
    model, config, stages = training["model"], training["training"], training["stages"]
    count, final = (
        training["parameters"],
        {name: stage["history"][-1][1] for name, stage in stages.items() if stage["history"]},
    )
    rows, kinds, verdict, guided, checked, limit = _followed(following)
    notes = "".join(f"\n\n{note}" for note in training.get("notes", []))
    sizes = ", ".join(f"{f} x {h} x {w}" for f, h, w, *_ in training["sizes"])
    return f"""# Sprites: the small video model in the box

<!-- written by `python -m parklab.sprites.card`; do not edit -->

A text-to-video diffusion transformer of the stock diffusers Wan classes, trained by this project on procedural clips only
(moving sprites over panning textures), so that sparse attention can be tried, tested and judged on real trained attention
without a download. It is a test article: it knows the sentences of `parklab.sprites.grammar` and nothing else.

    from diffusers import WanPipeline
    from parklab.sprites import CHECKPOINT
    pipe = WanPipeline.from_pretrained(CHECKPOINT)
    frames = pipe("a red circle moves right over blue waves", height=160, width=256, num_frames=33,
                  num_inference_steps=16, guidance_scale=1.0, max_sequence_length=32).frames[0]

## What it is

| part | figure |
| --- | --- |
| transformer | {count["transformer"] / 1e6:.1f} M parameters, {model["layers"]} layers, {model["heads"]} heads x {model["head_dim"]}, FFN {model["ffn_dim"]}, 3-D RoPE, QK-norm |
| autoencoder | AutoencoderKLWan, {count["vae"] / 1e6:.1f} M parameters, 8 x 8 pixels x 4 frames per latent, {model["latent_channels"]} channels |
| text encoder | UMT5, {count["text_encoder"] / 1e6:.2f} M parameters, one token per word |
| size on disk | {size_bytes / 2**20:.1f} MiB, half precision (text encoder: float32) |
| sampling | UniPC, flow shift {model["flow_shift"]:g}, about 16 steps |

## How it was trained

| stage | steps | seconds | final loss |
| --- | --- | --- | --- |
| autoencoder (L1) | {stages["autoencoder"]["step"]:,} | {stages["autoencoder"]["elapsed"]:.0f} | {final.get("autoencoder", float("nan")):.4f} |
| decoder alone, slightly noisy latents (L1) | {stages["decoder"]["step"]:,} | {stages["decoder"]["elapsed"]:.0f} | {final.get("decoder", float("nan")):.4f} |
| text encoder and transformer (flow matching) | {stages["transformer"]["step"]:,} | {stages["transformer"]["elapsed"]:.0f} | {final.get("transformer", float("nan")):.4f} |

On one {training["device"]} (torch {training["torch"]}), seed {config["seed"]}, at least {config["tokens_per_batch"]:,} tokens a step, sizes (frames x height x width)
{sizes}. Autoencoder reconstruction: {training["vae_psnr_db"]:.1f} dB PSNR on fresh renders. The weights are a moving average
over about {_percent(config["average"])} of the steps. {_percent(config["prompt_dropout"])} of the prompts were dropped, so guidance works too.{notes}

## Does it follow the prompt?

Held-out prompts only, judged automatically by the rule in `parklab.sprites.following`:

| frames x height x width | tokens | steps | guidance | prompts | colour | shape | both | motion |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

{verdict}

{kinds}
{guided}{checked}{limit}"""


def _followed(following: dict) -> tuple[str, ...]:
    """How well prompts are followed: rows, by kind, against the bar, with guidance, and the limits of the rule
    itself.
    """
    rows = "\n".join(
        f"| {r['size'][0]} x {r['size'][1]} x {r['size'][2]} | {r['tokens']:,} | {r['steps']} | {r['guidance']:g} | "
        f"{r['prompts']} | {_percent(r['colour'])} | {_percent(r['shape'])} | **{_percent(r['colour_and_shape'])}** | "
        f"{_percent(r['motion'])} |"
        for r in following["results"]
    )
    kinds = "\n".join(
        f"- {r['tokens']:,} tokens: " + ", ".join(
            f"{_percent(r[key])} where the {kind} was never seen" for kind, key in
            (("colour-shape pair", "colour_and_shape_held_out_pair"),
             ("sentence", "colour_and_shape_held_out_sentence")) if key in r)
        for r in following["results"]
    )  # fmt: skip
    met = all(r["colour_and_shape"] >= BAR for r in following["results"])
    verdict = (
        f"The project's bar is {_percent(BAR)} for colour and shape together: "
        f"{'met' if met else '**not met by this checkpoint**'}."
    )
    rule = following.get("rule")
    checked = "" if not rule else (
        f"\nThe rule itself, on {rule['prompts']} true renders: "
        f"{_percent(rule['true_renders']['colour_and_shape'])} right on their own sentences, "
        f"{_percent(rule['shuffled_prompts']['colour_and_shape'])} on shuffled sentences (motion: "
        f"{_percent(rule['true_renders']['motion'])} and {_percent(rule['shuffled_prompts']['motion'])}).\n"
    )  # fmt: skip
    limit = "" if "reconstructions" not in following else (
        f"\nThe rule on true renders after the autoencoder ({following['reconstructions']['psnr_db']:.1f} dB), which "
        f"limits every figure above: {_percent(following['reconstructions']['colour_and_shape'])}.\n"
    )  # fmt: skip
    guided = "".join(
        f"- {r['tokens']:,} tokens with guidance {r['guidance']:g}: "
        f"{_percent(r['colour_and_shape'])} (motion {_percent(r['motion'])})\n"
        for r in following.get("with_guidance", [])
    )
    return rows, kinds, verdict, guided, checked, limit


def write_card(folder: Path) -> Path:
    """FOLDER/MODEL_CARD.md from FOLDER/training.json and FOLDER/following.json."""
    for name in ("training.json", "following.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"folder: {folder / name} is missing; run python -m parklab.sprites.train or .following first"
            )
    training, following = (json.loads((folder / name).read_text()) for name in ("training.json", "following.json"))
    weights = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != "MODEL_CARD.md")
    write_atomically(folder / "MODEL_CARD.md", card_text(training, following, weights).encode())
    return folder / "MODEL_CARD.md"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"expected one argument, the checkpoint folder; got {sys.argv[1:]}. Usage:\n{__doc__}")
    sys.stdout.write(f"{write_card(Path(sys.argv[1]))}\n")
