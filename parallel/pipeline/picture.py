"""A picture of rectangles and short texts, written as SVG or PNG from one list: both look the same.

SVG is text, and needs nothing. PNG is Pillow's, which TensorBoard brings, with the font that it carries.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

Colour = tuple[int, int, int]
"""Red, green, blue from 0 to 255."""

_LARGEST_PNG = 11_200
"""Pixels a side, up to which a PNG is drawn at twice the size for sharp screens."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle, in pixels from the top left; ``hint`` is shown where a viewer can."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text around the height ``y`` of its middle; ``anchor`` says what of it lies at ``x``."""

    x: float
    y: float
    text: str
    size: float
    fill: Colour
    anchor: str = "middle"
    bold: bool = False


@dataclass
class Picture:
    """Boxes, and labels on top of them, on white."""

    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Writes ``path``, whole or not at all.

        Raises:
            ValueError: an ending that is neither .svg nor .png.
            OSError: a place that cannot be written.
        """
        path = Path(path)
        ending = path.suffix.lower()
        if ending not in (".svg", ".png"):
            raise ValueError(f"{path}: a picture is written as .svg or .png; nearest: {path.with_suffix('.svg').name}")
        part = path.with_name(f"{path.name}.part")
        try:
            if ending == ".svg":
                part.write_text(self.to_svg(), encoding="utf-8")
            else:
                self._write_png(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def to_svg(self) -> str:
        """The picture as a document that scales."""
        width, height = _number(self.width), _number(self.height)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]
        for box in self.boxes:
            place = " ".join(f'{name}="{_number(getattr(box, name))}"' for name in ("x", "y", "width", "height"))
            hint = f"><title>{html.escape(box.hint)}</title></rect>" if box.hint else "/>"
            lines.append(f'<rect {place} fill="{_hexadecimal(box.fill)}"{hint}')
        for label in self.labels:
            weight = ' font-weight="bold"' if label.bold else ""
            lines.append(
                f'<text x="{_number(label.x)}" y="{_number(label.y)}" font-size="{_number(label.size)}"{weight} '
                f'fill="{_hexadecimal(label.fill)}" text-anchor="{label.anchor}" dominant-baseline="central" '
                f'pointer-events="none">{html.escape(label.text)}</text>'
            )
        return "\n".join([*lines, "</svg>\n"])

    def _write_png(self, path: Path) -> None:
        from PIL import Image, ImageDraw, ImageFont

        scale = 2 if 2 * max(self.width, self.height) <= _LARGEST_PNG else 1
        image = Image.new("RGB", (round(self.width * scale), round(self.height * scale)), "white")
        draw = ImageDraw.Draw(image)
        for box in self.boxes:
            left, top = round(box.x * scale), round(box.y * scale)
            right, bottom = round((box.x + box.width) * scale), round((box.y + box.height) * scale)
            if right > left and bottom > top:
                draw.rectangle((left, top, right - 1, bottom - 1), fill=box.fill)
        fonts = {size: ImageFont.load_default(size * scale) for size in {label.size for label in self.labels}}
        anchors = {"start": "lm", "middle": "mm", "end": "rm"}
        for label in self.labels:
            place = (label.x * scale, label.y * scale)
            # The font comes in one weight: a bold line is one with an edge.
            edge = 0.35 * scale if label.bold else 0
            draw.text(
                place, label.text, label.fill, fonts[label.size], anchors[label.anchor], stroke_width=edge,
                stroke_fill=label.fill,
            )  # fmt: skip
        image.save(path, "PNG", optimize=True)


def mix(colour: Colour, other: Colour, part: float) -> Colour:
    """``colour`` with ``part`` (0 to 1) of ``other`` in it."""
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def is_dark(colour: Colour) -> bool:
    """Whether white is read better on it than black (relative luminance of ITU-R BT.709)."""
    red, green, blue = colour
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 140


def text_width(text: str, size: float) -> float:
    """About how wide a text is, in pixels: digits of the usual fonts are 0.56 of their size."""
    return 0.56 * size * len(text)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _hexadecimal(colour: Sequence[int]) -> str:
    return "#" + "".join(f"{value:02x}" for value in colour)
