"""Video files (mp4, mov, webm, mkv, avi) by PyAV: times from the packets, pixels of the wanted frames as RGB.

A file is opened by what it holds, not by its name, and only as one of these containers, so no playlist leads to another file or
to the network. Reading starts at the key frame before the first wanted frame and stops at the last; between wanted frames that
lie far apart it jumps. One decoded frame is held at a time. Times are those of presentation, so variable rates come out right;
the display rotation is obeyed; pixels that are not square are left as they are stored.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.media.clip_facts import PAUSE, ClipFacts, Look, UnreadableClip, import_av, name_of
from tessera.media.images import Blob, ImageFile, Pixels, resize, stream_of

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")  # what a QuickTime or MPEG-4 file may start with
_PICTURES = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")  # brands of MPEG-4 files that are pictures
HEAD = 64  # bytes that tell what a file is


@dataclass(frozen=True, slots=True)
class VideoIndex:
    """Where the frames of a file are."""

    facts: ClipFacts
    pts: tuple[int, ...]  # of every frame, rising
    keys: tuple[int, ...]  # places in `pts` where decoding may start, rising
    counted: bool  # no usable times in the packets: frames are told apart by their order, decoding starts at the first
    odd: tuple[str, ...]  # what `inspect_clip` tells besides


def container_of(head: bytes) -> str | None:
    """FFmpeg's name of the container that a file starts as; None where it is no video."""
    if head[4:8] in _BOXES and not (head[4:8] == b"ftyp" and head[8:12] in _PICTURES):
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else None


def video_facts(file: ImageFile) -> ClipFacts:
    """Reads every packet and decodes the first frame; all of them where the packets do not say when they are shown."""
    return video_index(file).facts


def video_index(file: ImageFile) -> VideoIndex:
    """The index of a file, kept while the file does not change: a training run comes back to it."""
    if isinstance(file, Blob):
        return _index(file)
    try:
        found = os.stat(file)
    except OSError as error:
        raise UnreadableClip(file, (error.strerror or str(error)).lower()) from error
    return _stored_index(os.path.abspath(file), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1024)
def _stored_index(path: str, size: int, changed: int) -> VideoIndex:
    return _index(Path(path))


def video_frames(
    file: ImageFile, wanted: Sequence[int], look: Look, facts: ClipFacts, sizes: set[tuple[int, int]] | None = None
) -> Iterator[Pixels]:
    """The wanted frames, rising, each once. One that does not decode, or not without damage, raises `UnreadableClip`. `sizes`
    takes up the width and height of every one as it is stored."""
    index = video_index(file)
    for place, frame in decoded(file, index, wanted):
        if frame.is_corrupt:
            raise UnreadableClip(name_of(file), f"frame {place} of {len(index.pts)} is damaged")
        if sizes is not None:
            sizes.add((frame.width, frame.height))
        yield look.of_array(pixels_of(frame, facts))


def decoded(file: ImageFile, index: VideoIndex, wanted: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """(place, PyAV's frame) of every wanted one."""
    with _opened(file) as source:
        places = {pts: place for place, pts in enumerate(index.pts)}

        def placed() -> Iterator[tuple[int, Any]]:
            for order, frame in enumerate(source.frames()):
                yield (order if index.counted else places.get(frame.pts, -1)), frame

        frames, at, jumped = placed(), -1, False
        for want in wanted:
            key = 0 if index.counted else index.keys[max(bisect_right(index.keys, want) - 1, 0)]
            if key > at + 1:
                source.seek(index.pts[key])
                frames, jumped = placed(), True
            at, frame = next((found for found in frames if found[0] >= want), (-1, None))
            if at != want and jumped:  # the container's own index misled us
                source.seek(index.pts[0])
                frames, jumped = placed(), False
                at, frame = next((found for found in frames if found[0] >= want), (-1, None))
            if at != want:
                raise UnreadableClip(name_of(file), f"frame {want} of {len(index.pts)} does not decode")
            yield at, frame


def pixels_of(frame: Any, facts: ClipFacts) -> Pixels:
    """h w 3, or 4 where there is transparency; upright, and of the clip's size if the file changes its own midway."""
    array: Pixels = frame.to_ndarray(format="rgba" if facts.has_alpha else "rgb24")
    array = np.ascontiguousarray(np.rot90(array, -facts.rotation // 90))
    return resize(array, facts.height, facts.width)


def _index(file: ImageFile) -> VideoIndex:
    with _opened(file) as source:
        packets, odd = _packets(source.container, source.stream)
        guessed = source.container.format.name == "avi"  # no times in it; FFmpeg's guesses are wrong for B-frames
        promised = _promised(source.container)
    times = [pts for pts, _, _ in packets]
    counted = guessed or None in times or len(set(times)) != len(times) or not any(key for _, key, _ in packets)
    if counted:
        packets = _decoded_times(file)
    packets.sort(key=lambda found: found[0])
    if not packets:
        raise UnreadableClip(name_of(file), "no frame in it is whole; is it cut short?")
    pts, keys = tuple(found[0] for found in packets), tuple(place for place, found in enumerate(packets) if found[1])
    missing = _missing_bytes(file)
    if missing > 0:
        odd.append(f"the file is cut short by {missing} bytes")
    facts = _facts(file, pts, packets[-1][2])
    if not odd and facts.duration < 0.9 * promised:
        odd.append(f"frames are lost: they end after {facts.duration:.3g} s, and the file says {promised:.3g} s")
    return VideoIndex(facts, pts, keys, counted, tuple(odd))


def _promised(container: Any) -> float:
    """Seconds that a file of one stream says it has; 0 where it does not say. FFmpeg passes over damage in Matroska."""
    if len(container.streams) > 1 or container.duration is None:
        return 0.0
    return (container.duration - max(container.start_time or 0, 0)) / 1e6


def _packets(container: Any, stream: Any) -> tuple[list[tuple[Any, bool, int]], list[str]]:
    """(pts, whether decoding may start there, duration) of what will be shown; and what is odd."""
    found, odd, num_packets = [], [], 0
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_corrupt:
                num_packets += 1
                if not packet.is_discard and _shows(stream, packet):
                    found.append((packet.pts, packet.is_keyframe, packet.duration or 0))
    except Exception as error:  # frames before it are whole
        odd.append(f"after {len(found)} frames {_reason(error)}")
    announced = len(stream.index_entries)  # of mp4 every frame that its edit list leaves, elsewhere some
    if num_packets < announced:
        odd.append(f"the file is cut short: {num_packets} of {announced} frames are whole")
    if stream.sample_aspect_ratio not in (None, 0, 1):
        odd.append(f"pixels are not square ({stream.sample_aspect_ratio}) and are read as they are stored")
    return found, odd


def _missing_bytes(file: ImageFile) -> int:
    """How far a file falls short of the size in its header (RIFF, the segment of Matroska); below 1 where it does not."""
    with stream_of(file) as source:
        head, size = source.read(HEAD), source.seek(0, os.SEEK_END)
    if head[:4] == b"RIFF":
        return 8 + int.from_bytes(head[4:8], "little") - size
    at = head.find(b"\x18\x53\x80\x67")
    if at < 0 or at + 12 > len(head) or head[at + 4] != 1:  # another container, or a size of fewer bytes
        return 0
    length = int.from_bytes(head[at + 5 : at + 12], "big")
    return at + 12 + length - size if length != 2**56 - 1 else 0  # all ones: unknown, a live stream


def _shows(stream: Any, packet: Any) -> bool:
    """VP8 stores frames that are only referred to (RFC 6386, 9.1); every other packet is shown."""
    return stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & 0x10)


def _decoded_times(file: ImageFile) -> list[tuple[int, bool, int]]:
    """As of the packets, by decoding all of them. Frames come in the order in which they are shown, so their times do, too; where
    a time is missing or there twice, one follows the other at the rate of the file."""
    with _opened(file) as source:
        rate = source.stream.average_rate
        step = round(1 / (rate * source.stream.time_base)) if rate else 1
        times = [frame.pts for frame in source.frames()]
    if None in times or len(set(times)) != len(times):
        times = [order * step for order in range(len(times))]
    return [(time, order == 0, step) for order, time in enumerate(sorted(times))]


def _facts(file: ImageFile, pts: tuple[int, ...], last: int) -> ClipFacts:
    with _opened(file) as source:
        first = next(source.frames(), None)
        if first is None:
            raise UnreadableClip(name_of(file), "its first frame does not decode")
        tick, rate = float(source.stream.time_base), source.stream.average_rate
        form, codec = first.format, source.stream.codec_context.name
        rotation = -round(first.rotation / 90) * 90 % 360
        width, height = (first.height, first.width) if rotation in (90, 270) else (first.width, first.height)
    times: npt.NDArray[np.float64] = (np.array(pts, dtype=np.float64) - pts[0]) * tick
    if last <= 0:
        pause = float(times[-1]) / (len(pts) - 1) if len(pts) > 1 else float(1 / rate) if rate else PAUSE
    else:
        pause = last * tick
    alpha = any(component.is_alpha for component in form.components)
    return ClipFacts(len(pts), width, height, times, float(times[-1]) + pause, _kind(file), codec, form.name, alpha, rotation)


def _kind(file: ImageFile) -> str:
    with stream_of(file) as source:
        head = source.read(HEAD)
    if container_of(head) == "mov":
        return "mov" if head[4:8] != b"ftyp" or head[8:12] == b"qt  " else "mp4"
    return "avi" if head[:4] == b"RIFF" else "webm" if b"webm" in head else "mkv"


@dataclass(frozen=True, slots=True)
class _Source:
    """PyAV's container, its first video stream and what decodes it."""

    container: Any
    stream: Any
    decoder: Any

    def seek(self, pts: int) -> None:
        self.container.seek(pts, stream=self.stream)
        self.decoder.flush_buffers()

    def frames(self) -> Iterator[Any]:
        """From where the container stands, without the packet in which a file is cut short."""
        for packet in self.container.demux(self.stream):
            if not packet.is_corrupt:
                yield from self.decoder.decode(packet if packet.size else None)


@contextmanager
def _opened(file: ImageFile) -> Iterator[_Source]:
    """Whatever goes wrong inside is raised as `UnreadableClip`."""
    av = import_av(f"{name_of(file)}: a video file")
    try:
        with stream_of(file) as content:
            kind = container_of(content.read(HEAD))
            content.seek(0)
            with av.open(content, format=kind) as container:
                if not container.streams.video:
                    raise UnreadableClip(name_of(file), "no video in it, only sound?")
                stream = container.streams.video[0]
                yield _Source(container, stream, _decoder(av, stream))
    except UnreadableClip:
        raise
    except Exception as error:  # FFmpeg's errors are of a dozen kinds
        raise UnreadableClip(name_of(file), _reason(error)) from error


def _decoder(av: Any, stream: Any) -> Any:
    """FFmpeg's own decoders of VP8 and VP9 pass transparency over; libvpx does not."""
    name = {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(stream.codec_context.name, "")
    clear = stream.metadata.get("alpha_mode") == "1" and name in av.codecs_available
    decoder = av.CodecContext.create(name, "r") if clear else stream.codec_context
    decoder.thread_count = 1  # a loader has workers enough
    return decoder


def _reason(error: Exception) -> str:
    message = " ".join((getattr(error, "strerror", None) or str(error)).split())[:200]
    return f"damaged: {message or type(error).__name__}"
