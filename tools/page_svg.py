"""Small SVG pictures for the documentation: raster panels, dots, lines and bars on a white card."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parklab.files import write_atomically

# distinguishable without colour vision (Okabe and Ito)
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#9aa0a6"
INK, FAINT = "#202124", "#dadce0"


class Picture:
    """A drawing in pixels from the top left corner; title and description are read out by screen readers."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.size = (width, height)
        self.title, self.description = title, description
        self.parts = [f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>']

    def text(self, x: float, y: float, said: str, *, size: int = 12, anchor: str = "start", fill: str = INK) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self.parts.append(f"<text {place}>{escape(said)}</text>")

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def line(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 2, dash: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        style = f'fill="none" stroke="{stroke}" stroke-width="{width}"{dashed}'
        self.parts.append(f'<polyline points="{path}" {style}/>')

    def raster(self, x: float, y: float, width: float, height: float, pixels: NDArray[np.uint8]) -> None:
        """pixels [rows columns 3], drawn with sharp edges."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
        data = base64.b64encode(png(pixels)).decode()
        self.parts.append(f'<image {place} style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>')
        self.rect(x, y, width, height, "none", FAINT)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], gap: float = 20) -> None:
        for name, colour in entries:
            self.rect(x, y - 9, 10, 10, colour)
            self.text(x + 15, y, name)
            x += 15 + 6.3 * len(name) + gap

    def write(self, path: Path) -> None:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        )
        style = 'font-family="system-ui, sans-serif" role="img" aria-labelledby="title description"'
        said = f'<title id="title">{escape(self.title)}</title><desc id="description">{escape(self.description)}</desc>'
        body = "\n".join(self.parts)
        write_atomically(path, f"{head} {style}>\n{said}\n{body}\n</svg>\n".encode())


class Axes:
    """A plot area inside a picture, from data to pixels; y grows upwards."""

    def __init__(
        self,
        picture: Picture,
        box: tuple[float, float, float, float],
        x: tuple[float, float],
        y: tuple[float, float],
        labels: tuple[str, str],
    ) -> None:
        self.picture, self.box, self.x, self.y = picture, box, x, y
        left, top, width, height = box
        picture.line([(left, top), (left, top + height), (left + width, top + height)], GREY, width=1)
        picture.text(left + width / 2, top + height + 32, labels[0], anchor="middle")
        picture.text(left, top - 10, labels[1])

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, top, width, height = self.box
        across, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        return left + width * across, top + height * (1 - up)

    def ticks(self, xs: Sequence[float], ys: Sequence[float], shown: str = "g") -> None:
        for x in xs:
            px, py = self.at(x, self.y[0])
            self.picture.text(px, py + 15, f"{x:{shown}}", size=10, anchor="middle")
        for y in ys:
            px, py = self.at(self.x[0], y)
            self.picture.text(px - 5, py + 4, f"{y:{shown}}", size=10, anchor="end")
            self.picture.line([(px, py), self.at(self.x[1], y)], FAINT, width=0.5)

    def curve(self, points: Iterable[tuple[float, float]], colour: str, dash: str = "") -> None:
        self.picture.line([self.at(x, y) for x, y in points], colour, dash=dash)


def shades(share: NDArray[np.floating]) -> NDArray[np.uint8]:
    """[rows columns] in 0..1 -> from white to dark blue."""
    white, dark = np.array([255.0, 255.0, 255.0]), np.array([0.0, 62.0, 116.0])
    return (white + (dark - white) * share[..., None].clip(0, 1)).round().astype(np.uint8)


def hues(labels: NDArray[np.integer]) -> NDArray[np.uint8]:
    """A colour per label: hues by the golden ratio, so that neighbouring numbers differ."""
    turn = (labels * 0.61803398875) % 1.0
    channels = [np.abs((turn * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
    return (80 + 160 * np.stack(channels, -1).clip(0, 1)).round().astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """8-bit RGB [rows columns 3] as a PNG file."""
    rows, columns, _ = pixels.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)], 1).tobytes()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
