"""Images at the doors. Expected pixels are computed here with NumPy, or by hand, never by the code under test."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from tessera.media.images import (
    ImageFacts,
    UnreadableImage,
    encode_png,
    inspect_image,
    read_image,
    to_array,
    write_png,
)

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
COLOURS = st.tuples(*[st.integers(0, 255)] * 3)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::RuntimeWarning:PIL")


def pictures(channels: int, longest: int = 12) -> Any:
    sides = st.integers(1, longest)
    return st.tuples(sides, sides).flatmap(lambda size: hnp.arrays(np.uint8, (*size, channels)))


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def composite(rgba: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """Alpha over an opaque colour in exact integers, rounded to nearest (a tie cannot occur: 255 is odd)."""
    alpha, colour = rgba[..., 3:].astype(np.int64), rgba[..., :3].astype(np.int64)
    return ((2 * (alpha * colour + (255 - alpha) * np.array(background)) + 255) // 510).astype(np.uint8)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, bits: int = 8, colour_type: int = 2) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))


# ---- transparency


def test_every_alpha_with_every_colour_is_composited_exactly(tmp_path: Path) -> None:
    rgba = np.zeros((256, 256, 4), np.uint8)
    rgba[..., 0], rgba[..., 1], rgba[..., 3] = np.arange(256), np.arange(256)[::-1], np.arange(256)[:, None]
    write_png(tmp_path / "all.png", rgba)
    for background in [(255, 255, 255), (0, 0, 0), (17, 128, 251)]:
        assert np.array_equal(read_image(tmp_path / "all.png", background=background), composite(rgba, background))


@SAME_FOLDER
@given(rgba=pictures(4), background=COLOURS)
def test_rgba_is_composited_for_three_channels_and_kept_for_four(tmp_path: Path, rgba: np.ndarray, background: Any) -> None:
    path = tmp_path / "a.png"
    write_png(path, rgba)
    assert np.array_equal(read_image(path, background=background), composite(rgba, background))
    assert np.array_equal(read_image(path, channels=4, background=background), rgba)  # hidden colours too


def test_one_channel_is_the_luma_of_the_composite(tmp_path: Path) -> None:
    rgba = noise(9, 7, 4)
    write_png(tmp_path / "a.png", rgba)
    grey = read_image(tmp_path / "a.png", channels=1, background=(10, 200, 30))
    luma = composite(rgba, (10, 200, 30)) @ np.array([0.299, 0.587, 0.114])
    assert grey.shape == (9, 7, 1)
    assert np.abs(grey[..., 0] - luma).max() <= 0.51


def test_grey_with_alpha_keeps_its_greys(tmp_path: Path) -> None:
    pairs = noise(8, 8, 2)
    Image.fromarray(pairs).save(tmp_path / "la.png")
    rgba = np.concatenate([pairs[..., :1].repeat(3, -1), pairs[..., 1:]], -1)
    assert np.array_equal(read_image(tmp_path / "la.png", channels=4), rgba)
    assert np.array_equal(read_image(tmp_path / "la.png", channels=1), composite(rgba, (255, 255, 255))[..., :1])


@pytest.mark.parametrize(("suffix", "transparency"), [("png", 1), ("png", bytes([255, 0, 77])), ("gif", 1)])
def test_palette_with_transparency(tmp_path: Path, suffix: str, transparency: int | bytes) -> None:
    palette = np.array([[200, 10, 10], [1, 2, 3], [0, 90, 255]], np.uint8)
    indices = np.array([[0, 1, 2], [2, 1, 0]], np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(palette.tobytes())
    image.save(tmp_path / f"p.{suffix}", transparency=transparency)
    alphas = np.array([255, 0, 255 if isinstance(transparency, int) else 77], np.uint8)
    rgba = np.concatenate([palette[indices], alphas[indices][..., None]], -1)
    got = read_image(tmp_path / f"p.{suffix}", background=(9, 99, 199))
    assert np.array_equal(got, composite(rgba, (9, 99, 199)))
    assert np.array_equal(read_image(tmp_path / f"p.{suffix}", channels=4)[..., 3], rgba[..., 3])


def test_colour_key_transparency(tmp_path: Path) -> None:
    rgb = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    Image.fromarray(rgb).save(tmp_path / "rgb.png", transparency=(1, 2, 3))
    assert read_image(tmp_path / "rgb.png").tolist() == [[[255, 255, 255], [4, 5, 6]]]
    Image.fromarray(rgb[..., 0]).save(tmp_path / "grey.png", transparency=4)
    assert read_image(tmp_path / "grey.png", channels=1).tolist() == [[[1], [255]]]
    Image.fromarray(np.array([[0, 40_000]], np.uint16)).save(tmp_path / "deep.png", transparency=40_000)
    assert read_image(tmp_path / "deep.png").tolist() == [[[0, 0, 0], [255, 255, 255]]]


# ---- modes, orientation, animation


def test_sixteen_bits_are_scaled_and_rounded(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 257, 32_768, 65_535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    expected = [round(int(value) * 255 / 65_535) for value in values[0]]
    assert read_image(tmp_path / "deep.png", channels=1)[0, :, 0].tolist() == expected == [0, 0, 1, 1, 128, 255]
    Image.fromarray(values.astype(np.int32)).save(tmp_path / "int.tiff")
    assert read_image(tmp_path / "int.tiff", channels=1)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_floats_from_zero_to_one_or_to_255(tmp_path: Path, top: float) -> None:
    Image.fromarray(np.array([[0, 0.25, 1]], np.float32) * np.float32(top)).save(tmp_path / "f.tiff")
    assert read_image(tmp_path / "f.tiff")[0, :, 0].tolist() == [0, 64, 255]


@pytest.mark.parametrize("value", [-1.0, 256.0, float("nan"), float("inf")])
def test_floats_of_an_unknown_range_are_refused(tmp_path: Path, value: float) -> None:
    Image.fromarray(np.array([[0.0, value]], np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(UnreadableImage, match="expected 0 to 1"):
        read_image(tmp_path / "f.tiff")


def test_cmyk_bits_and_plain_palettes(tmp_path: Path) -> None:
    Image.new("CMYK", (2, 2), (255, 0, 0, 0)).save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(read_image(tmp_path / "cmyk.jpg").astype(int) - [0, 255, 255]).max() <= 3
    Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1").save(tmp_path / "bits.png")
    assert read_image(tmp_path / "bits.png").tolist() == [[[0] * 3, [255] * 3]]
    Image.fromarray(noise(5, 5)).quantize(8).save(tmp_path / "p.bmp")
    assert read_image(tmp_path / "p.bmp", channels=4)[..., 3].min() == 255


STORED = [[1, 2, 3], [4, 5, 6]]
UPRIGHT = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[4, 1], [5, 2], [6, 3]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[3, 6], [2, 5], [1, 4]],
    9: [[1, 2, 3], [4, 5, 6]],
}


@pytest.mark.parametrize("orientation", list(UPRIGHT))
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_exif_orientation(tmp_path: Path, orientation: int, order: str, suffix: str) -> None:
    exif = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    path = tmp_path / f"a.{suffix}"
    grey = Image.fromarray(np.array(STORED, np.uint8) * 40)
    if suffix == "tiff":
        grey.save(path, tiffinfo={0x0112: orientation})
    else:
        grey.save(path, exif=exif, lossless=True)
    got = read_image(path)
    assert (got[..., 0] // 40).tolist() == UPRIGHT[orientation]
    assert got.flags.c_contiguous
    assert got.flags.writeable
    facts, _ = inspect_image(path)
    assert (facts.height, facts.width) == got.shape[:2]


@SAME_FOLDER
@given(exif=st.binary(max_size=64), order=st.sampled_from([b"", b"II*\0", b"MM\0*", b"II*\0\x08\0\0\0\xff\xff"]))
def test_damaged_exif_never_costs_the_picture(tmp_path: Path, exif: bytes, order: bytes) -> None:
    path = tmp_path / "a.jpg"
    Image.new("RGB", (4, 4), (90, 90, 90)).save(path, exif=b"Exif\0\0" + order + exif)
    assert read_image(path).shape == (4, 4, 3)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_an_animation_gives_its_first_frame(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (6, 5), colour) for colour in [(255, 0, 0), (0, 255, 0), (0, 0, 255)]]
    path = tmp_path / f"a.{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(read_image(path), np.full((5, 6, 3), (255, 0, 0), np.uint8))
    assert inspect_image(path)[0].animated


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_inspecting_accepts_exactly_what_reading_accepts(tmp_path: Path, suffix: str) -> None:
    path, frames = tmp_path / f"a.{suffix}", [Image.fromarray(noise(9, 9, seed=seed)) for seed in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    content = path.read_bytes()
    for length in range(0, len(content), 11):
        path.write_bytes(content[:length])
        assert readable(read_image, path) == readable(inspect_image, path)


def readable(read: Callable[[Path], object], path: Path) -> bool:
    try:
        read(path)
    except UnreadableImage:
        return False
    return True


def test_facts_are_of_the_file_not_of_its_name(tmp_path: Path) -> None:
    Image.new("RGB", (7, 5)).save(tmp_path / "a.png", format="JPEG")
    facts, picture = inspect_image(tmp_path / "a.png")
    assert picture.shape == (5, 7, 3)
    assert facts == ImageFacts(width=7, height=5, mode="RGB", format="JPEG", animated=False)


def test_pil_images_convert_like_files(tmp_path: Path) -> None:
    rgba = noise(6, 5, 4)
    assert np.array_equal(to_array(Image.fromarray(rgba)), composite(rgba, (255, 255, 255)))
    premultiplied = Image.fromarray(rgba).convert("RGBa")
    assert to_array(premultiplied, channels=4).shape == (6, 5, 4)
    assert to_array(Image.fromarray(noise(6, 5, 2)).convert("La"), channels=1).shape == (6, 5, 1)


# ---- files that cannot be read


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    options: dict[str, Any] = {"progressive": True} if kind == "progressive" else {}
    Image.fromarray(noise(24, 20)).save(stream, "JPEG" if kind == "progressive" else kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive", "GIF", "WEBP", "BMP"])
def test_a_cut_file_is_refused_or_complete(tmp_path: Path, kind: str) -> None:
    """Wherever the file ends, no half picture comes out."""
    data, path = encoded(kind), tmp_path / "a.img"
    path.write_bytes(data)
    whole, reasons = read_image(path), []
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        try:
            assert np.array_equal(read_image(path), whole), f"half a picture from {length} of {len(data)} bytes"
        except UnreadableImage as error:
            reasons.append(error.reason)
    assert len(reasons) >= 0.95 * len(data) / 7
    assert not any("\n" in reason for reason in reasons)


@SAME_FOLDER
@given(kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]), data=st.data())
def test_flipped_bytes_raise_nothing_else(tmp_path: Path, kind: str, data: Any) -> None:
    content, path = bytearray(encoded(kind)), tmp_path / "a.img"
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(UnreadableImage):
        assert read_image(path).dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"just text", "unknown content"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>404</html>", "a web page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC; convert it"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "unknown content"),
        (png_header(50_000, 50_000) + png_chunk(b"IDAT", b"\0"), "bomb"),
        (png_header(4, 4) + png_chunk(b"IDAT", zlib.compress(b"\0" * 9)), "damaged: "),
        (png_header(4, 4)[:20], "damaged"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "header is damaged"),
    ],
)
def test_what_is_not_an_image_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(UnreadableImage) as caught:
        read_image(path)
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason
    assert caught.value.path == path
    assert str(path) in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="no such file"):
        read_image(tmp_path / "none.png")
    with pytest.raises(UnreadableImage, match="directory"):
        read_image(tmp_path)


def test_the_error_survives_a_worker(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(UnreadableImage(tmp_path / "a.png", "cut short")))
    assert (error.path, error.reason, str(error)) == (tmp_path / "a.png", "cut short", f"{tmp_path / 'a.png'}: cut short")


def test_odd_files_print_nothing(tmp_path: Path) -> None:
    """In a process of its own, since pytest replaces the warning filters."""
    Image.new("P", (4, 4)).save(tmp_path / "p.png", transparency=b"\0\1")
    Image.new("RGB", (4, 4)).save(
        tmp_path / "exif.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x1a\x01\x05\0\x01\0\0\0\xff\xff\xff\0"
    )
    (tmp_path / "large.png").write_bytes(
        png_header(10_000, 10_000) + png_chunk(b"IDAT", b"\0")
    )  # PIL warns of a bomb, then finds no pixels
    code = (
        "import sys\nfrom pathlib import Path\nfrom tessera.media.images import UnreadableImage, read_image\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    try:\n        read_image(path, channels=1)\n"
        "    except UnreadableImage:\n        print(path.name)\n"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["large.png"]


# ---- writing


@pytest.mark.parametrize("channels", [1, 3, 4])
@SAME_FOLDER
@given(data=st.data())
def test_png_round_trip(tmp_path: Path, channels: Any, data: Any) -> None:
    picture = data.draw(pictures(channels))
    write_png(tmp_path / "a.png", picture)
    assert np.array_equal(read_image(tmp_path / "a.png", channels=channels), picture)
    assert (tmp_path / "a.png").read_bytes() == encode_png(picture.copy(order="F"))


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((3, 4, 4, 3), np.uint8),
    ],
)
def test_arrays_of_another_kind_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        encode_png(wrong)
