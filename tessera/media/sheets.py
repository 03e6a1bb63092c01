"""Contact sheets: rows of equal pictures in, one uint8 height x width x 3 picture out, with row names and captions drawn.

Text uses PIL's built-in bitmap font, so a sheet is the same on every machine; what that font cannot draw becomes `?`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tessera.media.images import Pixels

_PAPER = (255, 255, 255)
_INK = (32, 32, 32)
_CHECKER = (255, 204)  # the two greys behind transparent pixels
_CHECKER_PIXELS = 8
_NAME_PIXELS = 96  # row names are shortened to this width
_MOST_CHARACTERS = 1000
_CAPTION_LINES = 3
_MARGIN = 3


def sheet(
    rows: Sequence[Sequence[Pixels]],
    *,
    row_names: Sequence[str] = (),
    captions: Sequence[str] = (),
    gap: int = 2,
    scale: int = 1,
) -> Pixels:
    """Pictures of 1, 3 or 4 channels and one size; a row may be shorter than the others. `row_names` stand on the left, one
    a row; `captions` under the columns, one a column, wrapped and shortened to fit. `scale` repeats pixels."""
    height, width = _common_size(rows)
    num_columns = max(len(row) for row in rows)
    if len(row_names) not in (0, len(rows)) or len(captions) not in (0, num_columns):
        raise ValueError(
            f"got {len(row_names)} row names and {len(captions)} captions for {len(rows)} rows of {num_columns} pictures; "
            "expected none, or one a row and one a column"
        )
    height, width, font = height * scale, width * scale, ImageFont.load_default_imagefont()
    names = [_shortened(_latin(name), font, _NAME_PIXELS) for name in row_names]
    texts = [_wrapped(_latin(caption), font, width) for caption in captions]
    left = max((_width(name, font) + 2 * _MARGIN for name in names), default=0)
    foot = max((len(lines) for lines in texts), default=0) * _line_height(font) + (_MARGIN if texts else 0)

    num_rows = len(rows)
    size = (left + num_columns * (width + gap) + gap, num_rows * (height + gap) + gap + foot)
    canvas = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(canvas)
    for y, row in enumerate(rows):
        top = gap + y * (height + gap)
        if names:
            draw.text((_MARGIN, top + (height - _line_height(font)) // 2), names[y], fill=_INK, font=font)
        for x, picture in enumerate(row):
            canvas.paste(Image.fromarray(_opaque(picture, scale)), (left + gap + x * (width + gap), top))
    for x, lines in enumerate(texts):
        for index, line in enumerate(lines):
            place = (left + gap + x * (width + gap), gap + num_rows * (height + gap) + index * _line_height(font))
            draw.text(place, line, fill=_INK, font=font)
    return np.array(canvas)


def _common_size(rows: Sequence[Sequence[Pixels]]) -> tuple[int, int]:
    shapes = {picture.shape for row in rows for picture in row}
    sizes = {shape[:2] for shape in shapes}
    if len(sizes) != 1 or any(len(shape) != 3 or shape[2] not in (1, 3, 4) for shape in shapes):
        raise ValueError(
            f"got pictures shaped {sorted(shapes)}; expected at least one, all height x width x 1, 3 or 4 of one size"
        )
    ((height, width),) = sizes
    return height, width


def _opaque(picture: Pixels, scale: int) -> Pixels:
    """Three channels, pixels repeated; transparency shows a checkerboard whose squares do not grow with `scale`."""
    picture = picture.repeat(scale, axis=0).repeat(scale, axis=1)
    if picture.shape[2] == 4:
        height, width = picture.shape[:2]
        y, x = np.ogrid[:height, :width]
        board = np.where((y // _CHECKER_PIXELS + x // _CHECKER_PIXELS) % 2 == 0, *_CHECKER)[:, :, None]
        alpha = picture[:, :, 3:].astype(np.int64)
        return ((picture[:, :, :3] * alpha + board * (255 - alpha) + 127) // 255).astype(np.uint8)
    return picture.repeat(3, axis=2) if picture.shape[2] == 1 else picture


def _latin(text: str) -> str:
    """One line of the characters that the bitmap font has; no more of them than a sheet could show."""
    return " ".join(text[:_MOST_CHARACTERS].encode("latin-1", "replace").decode("latin-1").split())


def _width(text: str, font: ImageFont.ImageFont) -> int:
    return int(font.getlength(text))


def _line_height(font: ImageFont.ImageFont) -> int:
    return int(font.getbbox("Ag")[3]) + 1


def _shortened(text: str, font: ImageFont.ImageFont, width: int) -> str:
    if _width(text, font) <= width:
        return text
    for length in range(len(text) - 1, 0, -1):
        if _width(text[:length] + "...", font) <= width:
            return text[:length].rstrip() + "..."
    return ""


def _wrapped(text: str, font: ImageFont.ImageFont, width: int) -> list[str]:
    """Whole words on at most three lines; what is left over shortens the last one."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < _CAPTION_LINES - 1:
        count = 1
        while count < len(words) and _width(" ".join(words[: count + 1]), font) <= width:
            count += 1
        lines.append(_shortened(" ".join(words[:count]), font, width))
        words = words[count:]
    return [*lines, _shortened(" ".join(words), font, width)] if words else lines
