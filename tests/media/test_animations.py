"""Animated pictures and folders of frames as clips: pixels against Pillow and by hand, times against bytes written here."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from tessera.media.animations import animation_frames
from tessera.media.clip_facts import Look
from tessera.media.clips import (
    AvMissing,
    Clip,
    ClipFacts,
    UnreadableClip,
    inspect_clip,
    read_clip,
    read_facts,
)
from tessera.media.frame_folders import frame_files, is_frame_folder
from tessera.media.images import Blob, encode_png, write_png

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def every(facts: ClipFacts) -> Sequence[int]:
    return range(facts.num_frames)


def noise(count: int, channels: int = 3, side: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side + 4, channels), dtype=np.uint8)


def saved(frames: np.ndarray, kind: str, **options: object) -> Blob:
    pictures = [Image.fromarray(frame) for frame in frames]
    stream = io.BytesIO()
    pictures[0].save(stream, kind, save_all=True, append_images=pictures[1:], **options)
    return Blob(f"clip.{kind.lower()}", stream.getvalue())


def gif_frame(indices: np.ndarray, x: int, y: int, *, delay: int, disposal: int, clear: int | None = None) -> bytes:
    """Control block, descriptor and data of nine bits a code, each pixel a literal: no compression, but LZW all the same."""
    height, width = indices.shape
    control = struct.pack("<BHBB", disposal << 2 | (clear is not None), delay, clear or 0, 0)
    bits, filled, out = 0, 0, bytearray()
    codes = [256, *indices.reshape(-1).tolist(), 257]
    assert len(codes) < 250  # the table never outgrows nine bits
    for code in codes:
        bits |= code << filled
        filled += 9
        while filled >= 8:
            out.append(bits & 255)
            bits, filled = bits >> 8, filled - 8
    out.append(bits & 255)
    blocks = b"".join(bytes([len(part)]) + part for part in (bytes(out[at : at + 255]) for at in range(0, len(out), 255)))
    place = struct.pack("<HHHHB", x, y, width, height, 0)
    return b"\x21\xf9\x04" + control + b"\x2c" + place + b"\x08" + blocks + b"\0"


def gif(width: int, height: int, palette: Sequence[tuple[int, int, int]], *frames: bytes) -> Blob:
    table = bytes(value for colour in palette for value in colour).ljust(768, b"\0")
    return Blob("hand.gif", b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + table + b"".join(frames) + b"\x3b")


def test_partial_frames_and_disposal_by_hand() -> None:
    """4 x 4: all red; a green square that is taken back; a blue one that stays; a frame whose clear pixels let red through."""
    palette, whole = (RED, GREEN, BLUE), np.zeros((4, 4), int)
    small = np.ones((2, 2), int)
    cut = np.array([[1, 3], [3, 1]])  # 3 is clear
    clip = read_clip(
        gif(
            4, 4, palette,
            gif_frame(whole, 0, 0, delay=7, disposal=1),
            gif_frame(small, 1, 1, delay=20, disposal=3),
            gif_frame(small * 2, 2, 2, delay=5, disposal=1),
            gif_frame(cut, 0, 0, delay=100, disposal=1, clear=3),
        ),
        every,
    )  # fmt: skip
    expected = np.broadcast_to(np.array(RED, np.uint8), (4, 4, 4, 3)).copy()
    expected[1, 1:3, 1:3] = GREEN
    expected[2:, 2:, 2:] = BLUE
    expected[3, 0, 0] = expected[3, 1, 1] = GREEN
    assert np.array_equal(clip.frames, expected)


def test_times_of_a_gif_by_hand() -> None:
    frames = [gif_frame(np.full((2, 2), index), 0, 0, delay=delay, disposal=1) for index, delay in enumerate((7, 0, 1, 50))]
    facts = read_facts(gif(2, 2, (RED, GREEN, BLUE), *frames))
    assert facts.num_frames == 4
    assert facts.times == pytest.approx([0, 0.07, 0.17, 0.27])  # 0 and 1 are shown for a tenth of a second, as browsers do
    assert facts.duration == pytest.approx(0.77)
    assert facts.fps == pytest.approx(4 / 0.77)
    assert (facts.width, facts.height, facts.format, facts.mode, facts.has_alpha) == (2, 2, "GIF", "P", False)


def test_a_gif_without_durations_has_ten_frames_a_second_and_is_told() -> None:
    frames = [gif_frame(np.full((2, 2), index), 0, 0, delay=0, disposal=1) for index in range(3)]
    seen = inspect_clip(gif(2, 2, (RED, GREEN, BLUE), *frames))
    assert seen.facts.fps == pytest.approx(10)
    assert seen.odd == ("no frame says how long it is shown; taken for 0.1 s",)


def test_transparent_gif_lies_on_the_background() -> None:
    frames = [gif_frame(np.array([[0, 3], [3, 1]]), 0, 0, delay=10, disposal=2, clear=3) for _ in range(2)]
    file = gif(2, 2, (RED, GREEN, BLUE), *frames)
    assert read_facts(file).has_alpha
    for background in ((255, 255, 255), (1, 2, 3)):
        expected = np.array([[RED, background], [background, GREEN]])
        assert (read_clip(file, every, background=background).frames == expected).all()
    assert read_clip(file, every, channels=4).frames[..., 3].tolist() == [[[255, 0], [0, 255]]] * 2


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True, "exact": True})])
@pytest.mark.parametrize("channels", [3, 4])
def test_animated_png_and_webp(kind: str, options: dict[str, object], channels: int) -> None:
    frames = noise(5, channels)
    file = saved(frames, kind, duration=[20, 130, 40, 1000, 60], **options)
    facts = read_facts(file)
    assert facts.times == pytest.approx([0, 0.02, 0.15, 0.19, 1.19])
    assert facts.duration == pytest.approx(1.25)
    assert (facts.width, facts.height, facts.format, facts.has_alpha) == (16, 12, kind, channels == 4)
    colour, alpha = frames[..., :3].astype(int), frames[..., 3:].astype(int) if channels == 4 else 255
    over = (2 * (alpha * colour + (255 - alpha) * 255) + 255) // 510
    assert np.array_equal(read_clip(file, every).frames, over)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_frames_are_those_that_were_picked(kind: str) -> None:
    file = saved(noise(7), kind, duration=100)
    whole = read_clip(file, every).frames
    assert len(whole) == 7
    got = read_clip(file, lambda _: [1, 1, 4, 6])
    assert np.array_equal(got.frames, whole[[1, 1, 4, 6]])
    for wrong in ([], [2, 1], [-1], [7]):
        with pytest.raises(ValueError, match=r"frames .* of 7"):
            read_clip(file, lambda _, wrong=wrong: wrong)


def test_rate_is_that_of_the_picked_frames() -> None:
    file = saved(noise(9), "PNG", duration=50)
    for pick, fps in ((range(9), 20), (range(0, 9, 2), 10), ([0, 0, 1, 1, 2, 2], 40), ([3], 20)):
        assert read_clip(file, lambda _, pick=pick: pick).fps == pytest.approx(fps)


def test_what_lies_behind_the_last_wanted_frame_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file, sought = saved(noise(9), "GIF", duration=50), []
    seek = GifImageFile.seek
    monkeypatch.setattr(GifImageFile, "seek", lambda self, place: (sought.append(place), seek(self, place))[1])
    read_clip(file, lambda _: [1, 3])
    assert max(sought) == 3


def test_frames_are_held_one_at_a_time() -> None:
    frames = animation_frames(saved(noise(3), "PNG", duration=50), range(3), Look(), read_facts(saved(noise(3), "PNG")))
    assert np.array_equal(next(frames), noise(3)[0])  # a generator: the rest is not decoded yet


def test_min_side_scales_down_and_never_up() -> None:
    frames = noise(3, side=40)  # 40 x 44
    file = saved(frames, "PNG", duration=100)
    small = read_clip(file, every, min_side=20).frames
    assert small.shape == (3, 20, 22, 3)
    expected = np.array(Image.fromarray(frames[1]).resize((22, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(small[1], expected)
    assert np.array_equal(read_clip(file, every, min_side=41).frames, frames)


def test_grey_is_luma() -> None:
    frames = noise(2)
    got = read_clip(saved(frames, "PNG", duration=100), every, channels=1).frames
    assert got.shape == (2, 12, 16, 1)
    assert np.abs(got[..., 0] - frames @ np.array([0.299, 0.587, 0.114])).max() <= 1


def test_a_still_picture_is_a_clip_of_one_frame(tmp_path: Path) -> None:
    picture = noise(1)[0]
    write_png(tmp_path / "still.png", picture)
    Image.fromarray(picture).save(tmp_path / "still.webp", lossless=True)
    Image.fromarray(picture).save(tmp_path / "still.bmp")
    for path in sorted(tmp_path.iterdir()):
        seen = inspect_clip(path)
        assert (seen.facts.num_frames, seen.facts.fps, seen.odd) == (1, 10, ())
        assert np.array_equal(read_clip(path, every).frames, picture[None])


def test_a_picture_before_an_apng_is_not_a_frame() -> None:
    frames = noise(4)
    file = saved(frames, "PNG", duration=100, default_image=True)
    assert read_facts(file).num_frames == 3
    assert np.array_equal(read_clip(file, every).frames, frames[1:])


def test_orientation_holds_for_all_frames() -> None:
    frames, exif = noise(3), Image.Exif()
    exif[0x0112] = 6  # turned clockwise
    file = saved(frames, "WEBP", duration=100, lossless=True, exif=exif.tobytes())
    facts = read_facts(file)
    assert (facts.width, facts.height, facts.rotation) == (12, 16, 90)
    assert np.array_equal(read_clip(file, every).frames, np.rot90(frames, -1, axes=(1, 2)))


def test_cut_gif_has_its_whole_frames() -> None:
    frames = [gif_frame(np.full((5, 5), index), 0, 0, delay=10, disposal=1) for index in range(3)]
    content = gif(5, 5, (RED, GREEN, BLUE), *frames).content
    for missing, left in ((1, 3), (5, 2), (len(frames[2]) + 1, 2), (len(frames[2]) + 9, 1)):
        seen = inspect_clip(Blob("cut.gif", content[:-missing]))
        assert seen.facts.num_frames == left
        assert seen.odd[0] == f"the file is cut short: {left} frames are whole"
    with pytest.raises(UnreadableClip, match=r"cut\.gif: the file is cut short in its first frame"):
        read_facts(Blob("cut.gif", content[: 13 + 768 + 25]))


def test_cut_apng_has_its_whole_frames() -> None:
    frames = noise(4, side=30)
    content = saved(frames, "PNG", duration=100).content
    cut = Blob("cut.png", content[: len(content) * 5 // 8])
    seen = inspect_clip(cut)
    assert (seen.facts.num_frames, seen.odd) == (2, ("the file is cut short: 2 frames are whole",))
    assert np.array_equal(read_clip(cut, every).frames, frames[:2])


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    webp = saved(noise(4), "WEBP", duration=100).content
    cases = {
        "cut.webp": webp[: len(webp) // 2],
        "empty.gif": b"",
        "page.gif": b"<html>",
        "avif.mp4": b"\0\0\0\x20ftypavif" + b"\0" * 30,
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableClip, match=name) as caught:
            read_clip(tmp_path / name, every)
        assert "\n" not in caught.value.reason
        assert "image" not in caught.value.reason.replace("image file is truncated", "")
    with pytest.raises(UnreadableClip, match="no such file"):
        read_facts(tmp_path / "nowhere.gif")


def test_damaged_pixels_are_found(tmp_path: Path) -> None:
    content = bytearray(saved(noise(4, side=30), "PNG", duration=100).content)
    at = content.rindex(b"fdAT") + 40
    content[at : at + 20] = bytes(20)
    (tmp_path / "bad.png").write_bytes(content)
    assert read_facts(tmp_path / "bad.png").num_frames == 4
    with pytest.raises(UnreadableClip, match="damaged"):
        inspect_clip(tmp_path / "bad.png")


def test_errors_travel_between_processes() -> None:
    for error in (UnreadableClip("a.gif", "why"), AvMissing("what is missing")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))


def test_nothing_moves_and_uneven_times_are_told() -> None:
    palette = (RED, GREEN, BLUE)
    still = gif(2, 2, palette, *[gif_frame(np.zeros((2, 2), int), 0, 0, delay=10, disposal=1)] * 3)
    assert inspect_clip(still).odd == ("nothing moves: all 3 frames are equal",)
    frames = [gif_frame(np.full((2, 2), index), 0, 0, delay=delay, disposal=1) for index, delay in enumerate((10, 50, 9))]
    assert inspect_clip(gif(2, 2, palette, *frames)).odd == ("frames are shown for 0.1 to 0.5 s",)


def test_inspection_hands_over_every_frame() -> None:
    frames, got = noise(4), {}
    inspect_clip(saved(frames, "PNG", duration=100), got.__setitem__)
    assert np.array_equal(np.stack([got[place] for place in range(4)]), frames)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, frame in zip((1, 2, 10, 11, 100), noise(5), strict=True):
        write_png(tmp_path / f"frame{number}.png", frame)
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / ".frame5.png").write_bytes(b"hidden")
    return tmp_path


def test_folder_in_the_order_of_its_numbers(folder: Path) -> None:
    assert [path.name for path in frame_files(folder)] == [f"frame{number}.png" for number in (1, 2, 10, 11, 100)]
    facts = read_facts(folder)
    assert (facts.num_frames, facts.width, facts.height, facts.format, facts.codec) == (5, 16, 12, "folder", "PNG")
    assert facts.fps == pytest.approx(10)
    assert np.array_equal(read_clip(folder, every).frames, noise(5))
    got = read_clip(folder, lambda facts: [0, 2, 4])
    assert np.array_equal(got.frames, noise(5)[::2])
    assert got.fps == pytest.approx(5)
    assert inspect_clip(folder).odd == ("95 numbers are missing between the first and the last picture",)


def test_which_folders_are_clips(folder: Path) -> None:
    assert is_frame_folder(folder)
    write_png(folder / "cat.png", noise(1)[0])
    assert not is_frame_folder(folder)
    (folder / "empty").mkdir()
    assert not is_frame_folder(folder / "empty")
    with pytest.raises(UnreadableClip, match="no pictures"):
        read_facts(folder / "empty")


def test_folder_refuses_another_size_and_a_damaged_picture(folder: Path) -> None:
    (folder / "frame11.png").write_bytes(encode_png(noise(1, side=20)[0]))
    assert len(read_clip(folder, lambda _: [0, 4]).frames) == 2
    with pytest.raises(UnreadableClip, match=r"frame11\.png is 24 x 20, the first 16 x 12"):
        read_clip(folder, every)
    (folder / "frame11.png").write_bytes(b"\x89PNG")
    with pytest.raises(UnreadableClip, match=r"frame11\.png: "):
        inspect_clip(folder)


@pytest.mark.skipif(REAL_DATA is None, reason="TESSERA_REAL_DATA names no folder")
def test_sprites_are_as_pillow_shows_them() -> None:
    files = sorted((Path(REAL_DATA or "") / "sprites").glob("*.gif"))[::50]
    assert files
    for path in files:
        clip, facts = read_clip(path, every), read_facts(path)
        shown = np.diff(facts.times, append=facts.duration)
        with Image.open(path) as image:
            assert facts.num_frames == image.n_frames
            for place in range(image.n_frames):
                image.seek(place)
                assert shown[place] == pytest.approx(image.info["duration"] / 1000)
                assert np.array_equal(clip.frames[place], np.array(image.convert("RGB")))
        assert isinstance(clip, Clip)


def test_png_chunks_of_other_kinds_do_not_count() -> None:
    frames = noise(3)
    content = saved(frames, "PNG", duration=100).content
    text = struct.pack(">I", 4) + b"tEXt" + b"a\0bc" + struct.pack(">I", zlib.crc32(b"tEXta\0bc"))
    at = content.index(b"fdAT") - 4
    assert np.array_equal(read_clip(Blob("a.png", content[:at] + text + content[at:]), every).frames, frames)
