"""Image files in, uint8 arrays of height x width x channels out, and back as PNG. One picture at a time, no batches.

Whatever a file's mode, what leaves has 1, 3 or 4 channels of 8 bits: transparency is composited on a stated background, the EXIF
orientation is applied, and an animation gives its first frame. Colour profiles are not applied. A file that cannot be decoded in
full raises `UnreadableImage` with a reason of one line.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

Channels: TypeAlias = Literal[1, 3, 4]
Pixels: TypeAlias = npt.NDArray[np.uint8]  # h w c
Colour: TypeAlias = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # the names of files that are taken for images

# What a file may be, whatever its name says. A list, because PIL would otherwise hand an .eps called .png to Ghostscript.
# The common ones stand first: PIL tries them in this order.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF")

# PIL warns about damaged metadata while it reads. A file is either read or refused by name, so its warnings say nothing more.
# Set once: `catch_warnings` around each call would race between threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableImage(Exception):
    """An image file that cannot be decoded in full."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)  # both, so that a loader's worker can pickle it
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Blob:
    """An image file that lies inside another one: its name, for messages, and its bytes."""

    name: str
    content: bytes


ImageFile: TypeAlias = Path | str | Blob


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a file holds, before any conversion; width and height are those of the upright picture."""

    width: int
    height: int
    mode: str
    format: str
    animated: bool


def read_image(file: ImageFile, *, channels: Channels = 3, background: Colour = WHITE, min_side: int | None = None) -> Pixels:
    """Decode one file. With `min_side` a JPEG may come out at a half, a quarter or an eighth of its size, several times
    faster, as long as its shorter side keeps at least that many pixels."""
    with opened(file) as image:
        if min_side is not None:
            image.draft(None, (min_side, min_side))  # does nothing for the other formats
        image.load()
        return to_array(image, channels=channels, background=background)


def inspect_image(file: ImageFile) -> tuple[ImageFacts, Pixels]:
    """Decode one file in full, exactly as `read_image` does, and say what it was; with the picture, as RGB."""
    with opened(file) as image:
        mode, kind = image.mode, image.format or "unknown"
        image.load()
        picture = to_array(image)
        height, width = picture.shape[:2]
        return ImageFacts(width, height, mode, "JPEG" if kind == "MPO" else kind, _animated(image)), picture


def to_array(image: Image.Image, *, channels: Channels = 3, background: Colour = WHITE) -> Pixels:
    """A PIL image of any mode as an upright uint8 array with the asked number of channels."""
    orientation = orientation_of(image.info.get("exif", b""))
    image = _eight_bit(image)
    if channels == 4:
        image = _with_alpha(image)
    elif _transparent(image):
        image = _flattened(image, background)
    if channels == 3 and image.mode != "RGB":
        image = image.convert("RGB")
    elif channels == 1 and image.mode != "L":
        image = image.convert("RGB").convert("L")  # Rec. 601 luma; a grey pixel keeps its value
    array = np.array(image)  # a copy, so that torch may share its memory
    return _upright(array if array.ndim == 3 else array[:, :, None], orientation)


def with_channels(array: Pixels, *, channels: Channels, background: Colour = WHITE) -> Pixels:
    """An array of 1, 3 or 4 channels as one of the asked number, as if it had been read from a file."""
    return array if array.shape[2] == channels else to_array(_to_pil(array), channels=channels, background=background)


def encode_png(array: Pixels) -> bytes:
    """PNG bytes: equal pixels give equal bytes (no time, no metadata, one fixed compression level)."""
    stream = io.BytesIO()
    _to_pil(array).save(stream, format="PNG", compress_level=6)
    return stream.getvalue()


def write_png(path: Path | str, array: Pixels) -> None:
    Path(path).write_bytes(encode_png(array))


def resize(array: Pixels, height: int, width: int) -> Pixels:
    """Bicubic, its support widened when shrinking (antialiased). Colours are weighed by alpha where there is one."""
    if array.shape[:2] == (height, width):
        return array
    return _resample(array, height, width, (0.0, 0.0, float(array.shape[1]), float(array.shape[0])))


def fit(array: Pixels, size: int | tuple[int, int], *, crop_x: float = 0.5, crop_y: float = 0.5, zoom: float = 1.0) -> Pixels:
    """A square of `size` pixels, or of height x width: the largest window of these proportions, divided by `zoom`, at the
    relative place (crop_x, crop_y), 0 being left or top and 1 right or bottom. Crop and scale are one resampling. A window that
    already has the size is cut out at whole pixels, unchanged, and may share the array's memory."""
    if not (zoom >= 1 and 0 <= crop_x <= 1 and 0 <= crop_y <= 1):
        raise ValueError(f"got zoom={zoom}, crop_x={crop_x}, crop_y={crop_y}; expected zoom of 1 or more and crops from 0 to 1")
    height, width = array.shape[:2]
    rows, columns = (size, size) if isinstance(size, int) else size
    wide = width * rows > height * columns  # of the picture the sides are cut off, not top and bottom
    tall, broad = (height, height * columns / rows) if wide else (width * rows / columns, width)
    tall, broad = tall / zoom, broad / zoom
    left, top = crop_x * (width - broad), crop_y * (height - tall)
    if (tall, broad) == (rows, columns):
        x, y = round(left), round(top)
        return np.ascontiguousarray(array[y : y + rows, x : x + columns])
    return _resample(array, rows, columns, (left, top, min(left + broad, width), min(top + tall, height)))


def _resample(array: Pixels, height: int, width: int, box: tuple[float, float, float, float]) -> Pixels:
    resized = np.array(_to_pil(array).resize((width, height), Image.Resampling.BICUBIC, box=box))
    return resized if resized.ndim == 3 else resized[:, :, None]


def _to_pil(array: Pixels) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise ValueError(f"got an array of {array.dtype} shaped {array.shape}; expected uint8, height x width x 1, 3 or 4")
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))  # not every format of PIL's has it
    except Exception:  # PIL looks for a second frame, and this one is damaged; only the first is ever read
        return True


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits or of floats, as 8 bits; other modes as they are. PNG and PPM give integers up to 65535."""
    if not (image.mode.startswith("I") or image.mode == "F"):
        return image
    values = np.asarray(image).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    limit = 65535.0 if image.mode != "F" else 1.0 if high <= 1 else 255.0
    if not (low >= 0 and high <= limit):  # also true of NaN
        expected = "0 to 1, or 0 to 255" if image.mode == "F" else "0 to 65535"
        raise ValueError(f"grey values from {low:g} to {high:g}; expected {expected}")
    grey = Image.fromarray(np.floor(values * (255 / limit) + 0.5).astype(np.uint8))
    if isinstance(image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)))
    return grey


def _transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _with_alpha(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    return image if image.mode == "RGBA" else image.convert("RGBA")


def _flattened(image: Image.Image, background: Colour) -> Image.Image:
    """round((alpha * colour + (255 - alpha) * background) / 255) in each channel: what PIL's paste computes, exactly."""
    image = _with_alpha(image)
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image)
    return canvas


def orientation_of(exif: bytes) -> int:
    """Tag 0x0112 of the first directory of an EXIF block; 1 (upright) when it is absent or the block is damaged."""
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", block, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", block, start)
        for index in range(num_entries):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", block, start + 2 + 12 * index)
            if (tag, kind) == (0x0112, 3):
                return int(value)
    except struct.error:
        pass  # cut short: a picture is worth more than its damaged metadata
    return 1


def _upright(array: Pixels, orientation: int) -> Pixels:
    """EXIF 2.3, table 6: which corner of the stored picture is the top left one of the scene."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    return np.ascontiguousarray(array)


@contextmanager
def opened(file: ImageFile) -> Iterator[Image.Image]:
    """A file as a PIL image. Whatever goes wrong in the body is raised as `UnreadableImage`."""
    name = file.name if isinstance(file, Blob) else file
    try:
        with stream_of(file) as stream, Image.open(stream, formats=_FORMATS) as image:
            yield image
    except Exception as error:  # PIL's decoders leak a dozen kinds from damaged files
        raise UnreadableImage(name, _reason(file, error)) from error


def stream_of(file: ImageFile) -> IO[bytes]:
    """Never by name: PIL maps a raw TIFF that it opens by name into memory, and scrambles it when it is rotated (13.0)."""
    return io.BytesIO(file.content) if isinstance(file, Blob) else open(file, "rb")


def _reason(file: ImageFile, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return (error.strerror or str(error)).lower()  # no such file, permission denied, is a directory
    if isinstance(error, Image.DecompressionBombError):
        return "more pixels than PIL decodes safely (a decompression bomb?)"
    if isinstance(error, UnidentifiedImageError):
        with stream_of(file) as stream:
            return _not_an_image(stream.read(256))
    message = " ".join(str(error).split())[:200]
    return f"damaged: {message or type(error).__name__}"


_OTHER_KINDS = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the picture with `git lfs pull`"),
    (b"\x89PNG", "a PNG whose header is damaged"),
    (b"\xff\xd8", "a JPEG whose header is damaged"),
    (b"GIF8", "a GIF whose header is damaged"),
    (b"RIFF", "a WebP whose header is damaged, or another RIFF file"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML, perhaps SVG"),
    (b"<html", "a web page"),
    (b"<!doctype html", "a web page"),
    (b"PK\x03\x04", "a zip archive"),
    (b"%PDF", "PDF"),
)


def _not_an_image(head: bytes) -> str:
    if not head:
        return "the file is empty"
    if head[4:8] == b"ftyp":
        brand = head[8:12].decode("latin-1").strip()
        return f"not an image that is read here: {brand.upper()}; convert it to png or jpg"
    start = head.lstrip().lower()
    found = next((what for magic, what in _OTHER_KINDS if start.startswith(magic.lower())), "unknown content")
    return f"not an image that is read here: {found}"


def to_picture(array: Pixels) -> Image.Image:
    """uint8 height x width (x 1, 3 or 4) as grey, RGB or RGBA."""
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
