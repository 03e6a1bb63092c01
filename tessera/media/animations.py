"""Animated gif, png and webp: when each frame is shown, from the file's own blocks; its pixels, by Pillow.

Any other picture that `images` reads is a clip of one frame. Disposal, blending and local palettes are Pillow's work; what is
transparent after them is composited on the background. Frames are decoded one after another and none is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image

from tessera.media.clip_facts import PAUSE, ClipFacts, Look, UnreadableClip, name_of, starts
from tessera.media.images import ImageFile, Pixels, UnreadableImage, opened, orientation_of, stream_of

_TURNS = {3: 180, 4: 180, 5: 90, 6: 90, 7: 270, 8: 270}  # of EXIF orientations; the even rest is mirrored, too


@dataclass(frozen=True, slots=True)
class Timing:
    """What the blocks of a file say."""

    shown: list[float]  # seconds of each frame that is there as a whole, 0 where the file does not say
    whole: bool  # False: the file ends before its last frame does, or before its end mark
    first: int = 0  # Pillow's number of the first frame; 1 where a still picture stands before the animation


def animation_facts(file: ImageFile) -> ClipFacts:
    """Nothing is decoded, except for what Pillow does when it opens a file."""
    return _facts(file, timing_of(file))


def _facts(file: ImageFile, timing: Timing) -> ClipFacts:
    with _opened(file) as image:
        orientation = orientation_of(image.info.get("exif", b""))
        width, height = image.size[::-1] if orientation in (5, 6, 7, 8) else image.size
        kind = image.format or "unknown"
        alpha = "transparency" in image.info or image.mode in ("RGBA", "LA", "PA")
        mode = image.mode
    if not timing.shown:
        raise UnreadableClip(name_of(file), "the file is cut short in its first frame")
    times, duration = starts(timing.shown)
    return ClipFacts(len(times), width, height, times, duration, kind, kind, mode, alpha, _TURNS.get(orientation, 0))


def animation_frames(file: ImageFile, wanted: Sequence[int], look: Look, facts: ClipFacts) -> Iterator[Pixels]:
    """The wanted frames, rising, each once. What lies before one must be decoded, what lies behind the last is not."""
    first = timing_of(file).first if facts.num_frames > 1 else 0
    with _opened(file) as image:
        exif, asked = image.info.get("exif"), set(wanted)
        for index in range(wanted[-1] + 1):
            if facts.num_frames > 1:
                image.seek(first + index)
            image.load()
            if index in asked:
                if exif is not None:
                    image.info["exif"] = exif  # of the file, not of its first frame
                yield look.of_picture(image)


def animation_oddities(file: ImageFile) -> list[str]:
    """What the blocks of a file say that its facts do not."""
    timing, odd = timing_of(file), []
    if not timing.whole:
        odd.append(f"the file is cut short: {len(timing.shown)} frames are whole")
    if len(timing.shown) > 1 and max(timing.shown) == 0:
        odd.append(f"no frame says how long it is shown; taken for {PAUSE:g} s")
    return odd


def timing_of(file: ImageFile) -> Timing:
    """Durations from the blocks of the file. A kind that cannot be animated has one frame."""
    try:
        with stream_of(file) as stream:
            head = stream.read(16)
            stream.seek(0)
            if head[:4] == b"GIF8":
                return _gif_timing(stream.read())
            if head[:4] == b"\x89PNG":
                return _png_timing(stream.read())
            if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
                return _webp_timing(stream.read())
    except OSError as error:
        raise UnreadableClip(name_of(file), (error.strerror or str(error)).lower()) from error
    return Timing([PAUSE], whole=True)


def _gif_timing(content: bytes) -> Timing:
    """GIF 89a, sections 18 to 27. A frame counts when all of its data blocks are there."""
    shown: list[float] = []
    try:
        flags, at, pause = content[10], 13, 0
        at += 3 << (flags & 7) + 1 if flags & 0x80 else 0
        while content[at] != 0x3B:
            if content[at : at + 2] == b"\x21\xf9":  # graphic control: the delay of the frame that follows
                (pause,) = struct.unpack_from("<H", content, at + 4)
            if content[at] == 0x21:
                at = after_blocks(content, at + 2)
            elif content[at] == 0x2C:
                flags = content[at + 9]
                at = after_blocks(content, at + 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0))
                shown.append(pause / 100)
                pause = 0
            else:
                at += 1  # padding between blocks, as Pillow passes it over
    except (IndexError, struct.error):
        return Timing(shown, whole=False)
    return Timing(shown, whole=True)


def after_blocks(content: bytes, at: int) -> int:
    """Where the data blocks of a GIF that start at a place have ended."""
    while size := content[at]:
        at += 1 + size
    return at + 1


def _png_timing(content: bytes) -> Timing:
    """PNG, third edition: acTL announces frames, each has an fcTL; a picture before the first fcTL is not one of them."""
    shown: list[float] = []
    announced, pending, still, at, ended = 0, False, False, 8, False
    pause = 0.0
    while not ended and at + 12 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        if at + 12 + size > len(content):
            break
        if kind == b"acTL":
            (announced,) = struct.unpack_from(">I", content, at + 8)
        elif kind == b"IDAT" and not pending and not shown:
            still = True
        if kind in (b"fcTL", b"IEND") and pending:  # the frame before is there as a whole
            shown.append(pause)
            pending = False
        if kind == b"fcTL" and announced:
            numerator, denominator = struct.unpack_from(">HH", content, at + 8 + 20)
            pause, pending = numerator / (denominator or 100), True
        ended = kind == b"IEND"
        at += 12 + size
    if not announced:
        return Timing([PAUSE], whole=ended)
    return Timing(shown, whole=ended and len(shown) >= announced, first=int(still))


def _webp_timing(content: bytes) -> Timing:
    """The RIFF container of WebP: an ANMF chunk a frame, whose last bytes of the header before the flags are milliseconds."""
    shown: list[float] = []
    at = 12
    while at + 8 <= len(content):
        kind, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
        if at + 8 + size > len(content):
            return Timing(shown, whole=False)
        if kind == b"ANMF":
            shown.append(int.from_bytes(content[at + 8 + 12 : at + 8 + 15], "little") / 1000)
        at += 8 + size + size % 2
    return Timing(shown or [PAUSE], whole=True)


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image.Image]:
    try:
        with opened(file) as image:
            yield image
    except UnreadableImage as error:
        raise UnreadableClip(error.path, error.reason.replace("not an image", "not a clip")) from error
