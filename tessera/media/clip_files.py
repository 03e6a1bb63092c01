"""Clips as files: gif by our own hand and Pillow's compression, mp4 by PyAV; and as sheets of chosen frames.

Frames are uint8; floats are refused, for what lies outside 0 to 255 would wrap around. Every frame is written, also one that is
equal to the one before it. Equal clips give equal gifs; the bytes of an mp4 are its encoder's affair.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from PIL import Image

from tessera.media.animations import after_blocks
from tessera.media.clip_facts import import_av
from tessera.media.clips import Clip
from tessera.media.images import Pixels, with_channels
from tessera.media.sheets import sheet

_FASTEST = 2  # hundredths of a second: players show what claims to be faster for a tenth
_SAMPLE = 4096  # pixels that a palette is made of; all of a noisy page would take seconds
_ENCODERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("libx264", {"crf": "14", "preset": "medium", "threads": "1"}),
    ("libopenh264", {}),
    ("mpeg4", {"flags": "qscale", "global_quality": "236"}),  # 2 of 31, in units of 1/118
)


def encode_gif(clip: Clip, scale: int = 1) -> bytes:
    """An animation that repeats for ever, `scale` repeating pixels. A frame of at most 256 colours keeps them exactly, for every
    frame has a palette of its own; one of more gets the nearest of 256. The total time is right to a hundredth of a second, up to
    50 fps, which is the fastest that players show. Transparency is composited on white."""
    _check(clip, scale)
    return _gif((_rgb(frame, scale) for frame in clip.frames), _delays(len(clip.frames), clip.fps))


def encode_mp4(clip: Clip, scale: int = 1) -> bytes:
    """H.264 (MPEG-4 where that encoder is missing), 4:2:0, BT.709. Sides must be even, so an odd one repeats its last row or
    column. Transparency is composited on white. Raises `AvMissing` without PyAV."""
    _check(clip, scale)
    av = import_av("an mp4")
    name, options = next(found for found in _ENCODERS if found[0] in av.codecs_available)
    height, width = (side * scale + side * scale % 2 for side in clip.frames.shape[1:3])
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream(name, rate=Fraction(clip.fps).limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.color_range, context.colorspace, context.color_primaries, context.color_trc = 1, 1, 1, 1
        for frame in clip.frames:
            array = _rgb(frame, scale)
            array = np.pad(array, ((0, height - array.shape[0]), (0, width - array.shape[1]), (0, 0)), mode="edge")
            picture = av.VideoFrame.from_ndarray(array, format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(stream.encode())
    return content.getvalue()


def frame_sheet(clips: Sequence[Clip], captions: Sequence[str], *, most: int = 8, scale: int = 1) -> Pixels:
    """A picture: of every clip a row of at most `most` frames, evenly chosen, the first and the last among them; under it its
    caption."""
    if not clips or len(clips) != len(captions) or most < 1:
        raise ValueError(f"got {len(clips)} clips, {len(captions)} captions, most={most}; expected a caption a clip, most from 1")
    rows = [sheet([[clip.frames[place] for place in evenly(len(clip.frames), most)]], scale=scale) for clip in clips]
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    return np.concatenate(
        [sheet([[row]], captions=[caption], gap=0) for row, caption in zip(padded, captions, strict=True)], axis=0
    )


def evenly(num_frames: int, most: int) -> list[int]:
    """At most `most` places from the first frame to the last, both included; of one, the middle."""
    if most == 1:
        return [(num_frames - 1) // 2]
    return [round(place) for place in np.linspace(0, num_frames - 1, min(most, num_frames)).tolist()]


def grid_gif(
    rows: Sequence[Sequence[Clip]], *, row_names: Sequence[str] = (), captions: Sequence[str] = (), scale: int = 1
) -> bytes:
    """Clips of one size side by side in one gif, with row names and captions as on a `sheet`. All start together; one that has
    ended shows its last frame. The rate is that of the fastest."""
    clips = [clip for row in rows for clip in row]
    for clip in clips:
        _check(clip, scale)
    if not clips:
        raise ValueError("got no clips; expected at least one")
    fps = max(clip.fps for clip in clips)
    count = max(math.ceil(len(clip.frames) / clip.fps * fps - 1e-6) for clip in clips)
    pages = (
        sheet([[_at(clip, step / fps) for clip in row] for row in rows], row_names=row_names, captions=captions, scale=scale)
        for step in range(count)
    )
    return _gif(pages, _delays(count, fps))


def _at(clip: Clip, seconds: float) -> Pixels:
    return clip.frames[min(int(seconds * clip.fps + 1e-6), len(clip.frames) - 1)]


def _check(clip: Clip, scale: int) -> None:
    frames = clip.frames
    if frames.dtype != np.uint8 or frames.ndim != 4 or 0 in frames.shape or frames.shape[3] not in (1, 3, 4):
        raise ValueError(f"got frames of {frames.dtype} shaped {frames.shape}; expected uint8, t h w c with 1, 3 or 4 channels")
    if not (math.isfinite(clip.fps) and clip.fps > 0) or scale < 1:
        raise ValueError(f"got {clip.fps} frames a second and a scale of {scale}; expected a rate above 0 and 1 or more")


def _rgb(frame: Pixels, scale: int) -> Pixels:
    return with_channels(frame, channels=3).repeat(scale, axis=0).repeat(scale, axis=1)


def _delays(count: int, fps: float) -> list[int]:
    """Hundredths of a second that add up: each frame ends at the nearest one to its true end."""
    ends = [round(100 * place / fps) for place in range(count + 1)]
    return [min(max(end - start, _FASTEST), 65535) for start, end in pairwise(ends)]


def _gif(frames: Iterable[Pixels], delays: Sequence[int]) -> bytes:
    """GIF 89a, written here: Pillow's own writer drops a frame that is equal to the one before it."""
    parts: list[bytes] = []
    for frame, delay in zip(frames, delays, strict=True):
        if not parts:
            height, width = frame.shape[:2]
            parts.append(b"GIF89a" + struct.pack("<HHBBB", width, height, 0x70, 0, 0))
            parts.append(b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")  # for ever
        parts.append(b"\x21\xf9\x04" + struct.pack("<BHBB", 1 << 2, delay, 0, 0))  # stays until the next one covers it
        parts.append(_image_block(frame))
    return b"".join([*parts, b"\x3b"])


def _image_block(frame: Pixels) -> bytes:
    """Image descriptor, local palette and data, cut out of a file of one frame that Pillow compressed."""
    stream = io.BytesIO()
    _with_palette(frame).save(stream, "GIF", optimize=False, interlace=0)
    content = stream.getvalue()
    bits, at = content[10] & 7, 13
    palette = content[at : at + (3 << bits + 1)]
    at += len(palette)
    while content[at] == 0x21:
        at = after_blocks(content, at + 2)
    end = after_blocks(content, at + 11)
    return content[at : at + 9] + bytes([0x80 | bits]) + palette + content[at + 10 : end]


def _with_palette(frame: Pixels) -> Image.Image:
    codes = frame.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
    colours, places = np.unique(codes, return_inverse=True)
    if len(colours) > 256:
        step = codes.size // _SAMPLE | 1  # odd, so that the sample is not one of a few columns
        sample = Image.fromarray(frame.reshape(1, -1, 3)[:, ::step]).quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=1)
        return Image.fromarray(frame).quantize(palette=sample, dither=Image.Dither.NONE)
    picture = Image.frombytes("P", codes.shape[::-1], places.astype(np.uint8).tobytes())
    picture.putpalette(np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.uint8).tobytes())
    return picture
