"""Video files as clips: colours and times that were written here, frames alone against the whole, damage by cutting."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.media import videos
from tessera.media.clips import ClipFacts, UnreadableClip, inspect_clip, read_clip, read_facts
from tessera.media.images import Blob
from tessera.media.videos import container_of, video_index

av = pytest.importorskip("av")

CORNERS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]], dtype=np.uint8)
GROUPS = {"g": "10", "bf": "3", "keyint_min": "10", "sc_threshold": "0"}


def every(facts: ClipFacts) -> Sequence[int]:
    return range(facts.num_frames)


def colours(count: int) -> np.ndarray:
    """n 3: all different, and red, green and blue told apart."""
    places = np.arange(count)
    return np.stack([40 + 4 * places, 230 - 3 * places, 60 + 20 * (places % 8)], axis=1).astype(np.uint8)


def plain(count: int, height: int = 32, width: int = 48) -> np.ndarray:
    return np.broadcast_to(colours(count)[:, None, None], (count, height, width, 3)).copy()


def write(
    path: Path,
    frames: np.ndarray,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    times: Sequence[int] | None = None,
    rate: int = 24,
    options: dict[str, str] | None = None,
    mux: dict[str, str] | None = None,
    **reformat: Any,
) -> Path:
    """`times` in hundredths of a second; `reformat` may name the matrix and the range of the colours, which are then marked."""
    with av.open(str(path), "w", options=mux or {}) as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "4", **GROUPS} if options is None else options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        if reformat:
            stream.codec_context.colorspace = {"ITU709": 1, "ITU601": 5}[reformat["dst_colorspace"]]
            stream.codec_context.color_range = reformat["dst_color_range"]
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 100)
        for place, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgba" if frame.shape[2] == 4 else "rgb24")
            picture = picture.reformat(format=pixels, **reformat)
            if times is not None:
                picture.pts, picture.time_base = times[place], Fraction(1, 100)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


KINDS = [
    ("a.mp4", "libx264", "yuv420p", None),
    ("long.mp4", "libx264", "yuv420p10le", None),
    ("a.mov", "png", "rgb24", {}),
    ("a.mkv", "libx264", "yuv444p", None),
    ("a.webm", "libvpx-vp9", "yuv420p", {"g": "10", "crf": "10", "b": "0", "cpu-used": "8"}),
    ("old.webm", "libvpx", "yuv420p", {"g": "20", "crf": "4", "b": "2M", "auto-alt-ref": "1", "lag-in-frames": "8"}),
    ("a.avi", "mpeg4", "yuv420p", {"g": "10", "b": "4M"}),
    ("b.avi", "libx264", "yuv420p", None),
]


@pytest.mark.parametrize(("name", "codec", "pixels", "options"), KINDS)
def test_colours_times_and_frames_alone(name: str, codec: str, pixels: str, options: Any, tmp_path: Path) -> None:
    """All frames are there, the last too, in RGB; and frame k read alone is frame k of the whole."""
    path = write(tmp_path / name, plain(45), codec, pixels, options=options)
    facts, clip = read_facts(path), read_clip(path, every)
    assert clip.frames.shape == (45, 32, 48, 3)
    assert np.abs(clip.frames.astype(int) - plain(45)).max() <= (12 if codec in ("mpeg4", "libvpx") else 6)
    assert facts.times == pytest.approx(np.arange(45) / 24, abs=1.1e-3)  # matroska counts milliseconds
    assert facts.duration == pytest.approx(45 / 24, abs=2e-3)
    assert clip.fps == pytest.approx(24, rel=2e-3)
    assert (facts.width, facts.height, facts.mode, facts.has_alpha) == (48, 32, pixels, False)
    assert facts.format == path.suffix[1:]
    for place in (0, 1, 9, 10, 11, 23, 29, 30, 44):
        assert np.array_equal(read_clip(path, lambda _, place=place: [place]).frames[0], clip.frames[place])
    assert np.array_equal(read_clip(path, lambda _: [3, 3, 12, 40, 44]).frames, clip.frames[[3, 3, 12, 40, 44]])
    assert inspect_clip(path).odd == ()


def test_hidden_frames_of_vp8_are_not_counted(tmp_path: Path) -> None:
    """RFC 6386, 9.1: bit 4 of the first byte says whether a frame is shown. Here it is taken from two."""
    path, hidden = write(tmp_path / "a.webm", plain(20), "libvpx", options={"g": "40", "b": "4M"}), tmp_path / "b.webm"
    with av.open(str(path)) as source, av.open(str(hidden), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for place, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            content = bytearray(bytes(packet))
            content[0] &= 0xEF if place in (5, 11) else 0xFF
            changed = av.Packet(bytes(content))
            changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
            changed.is_keyframe, changed.stream = packet.is_keyframe, stream
            target.mux(changed)
    shown = [place for place in range(20) if place not in (5, 11)]
    facts = read_facts(hidden)
    assert facts.times == pytest.approx(np.array(shown) / 24, abs=1.1e-3)
    assert np.abs(read_clip(hidden, every).frames.astype(int) - plain(20)[shown]).max() <= 12


def test_uneven_times(tmp_path: Path) -> None:
    times = [0, 3, 10, 11, 50, 80]
    for name in ("a.mp4", "a.mkv"):
        path = write(tmp_path / name, plain(6), times=times, rate=25)
        facts = read_facts(path)
        assert facts.times == pytest.approx(np.array(times) / 100, abs=1e-3)
        assert facts.duration >= 0.8
        assert np.abs(read_clip(path, every).frames.astype(int) - plain(6)).max() <= 6
        assert inspect_clip(path).odd == ("frames are shown for 0.01 to 0.39 s",)


def test_packets_without_times_are_decoded(tmp_path: Path) -> None:
    """An avi does not say when frames that are stored out of order are shown."""
    path = write(tmp_path / "a.avi", plain(30))
    assert video_index(path).counted
    clip, facts = read_clip(path, every), read_facts(path)
    assert np.abs(clip.frames.astype(int) - plain(30)).max() <= 6
    assert facts.times == pytest.approx(np.arange(30) / 24)
    assert facts.fps == pytest.approx(24, rel=1e-3)
    assert np.array_equal(read_clip(path, lambda _: [20]).frames[0], clip.frames[20])


@pytest.mark.parametrize(("matrix", "range_"), [("ITU709", 1), ("ITU601", 1), ("ITU709", 2)])
def test_matrix_and_range_of_colours_are_obeyed(matrix: str, range_: int, tmp_path: Path) -> None:
    frames = np.repeat(CORNERS.reshape(4, 1, 1, 3), 32, axis=1).repeat(32, axis=2)
    path = write(tmp_path / "a.mp4", frames, options={"crf": "1"}, dst_colorspace=matrix, dst_color_range=range_)
    assert np.abs(read_clip(path, every).frames.astype(int) - frames).max() <= 4


@pytest.mark.parametrize(
    ("matrix", "angle"), [((0, 1, -1, 0), 90), ((-1, 0, 0, -1), 180), ((0, -1, 1, 0), 270), ((1, 0, 0, 1), 0)]
)
def test_rotation_is_obeyed(matrix: tuple[int, int, int, int], angle: int, tmp_path: Path) -> None:
    """The matrix of a track (ISO 14496-12, 8.3.2) sends (x, y) to (ax + cy, bx + dy); y runs down. Written into the file."""
    path = write(tmp_path / "a.mp4", np.stack([CORNERS.repeat(8, axis=0).repeat(16, axis=1)] * 3))  # 16 x 32
    a, b, c, d = matrix
    content = bytearray(path.read_bytes())
    struct.pack_into(">6i", content, content.index(b"tkhd") + 44, a << 16, b << 16, 0, c << 16, d << 16, 0)
    path.write_bytes(content)
    facts, got = read_facts(path), read_clip(path, every).frames[0].astype(int)
    height, width = got.shape[:2]
    assert (facts.width, facts.height) == (width, height) == ((16, 32) if a == 0 else (32, 16))
    assert facts.rotation == angle
    for y in (0, 1):
        for x in (0, 1):
            right, down = a * (2 * x - 1) + c * (2 * y - 1) > 0, b * (2 * x - 1) + d * (2 * y - 1) > 0
            seen = got[height // 4 + down * height // 2, width // 4 + right * width // 2]
            assert np.abs(seen - CORNERS[y, x]).max() <= 8


@pytest.mark.parametrize(("name", "codec", "pixels"), [("a.webm", "libvpx-vp9", "yuva420p"), ("a.mkv", "ffv1", "bgra")])
def test_transparent_videos_lie_on_the_background(name: str, codec: str, pixels: str, tmp_path: Path) -> None:
    frames = np.zeros((30, 32, 32, 4), dtype=np.uint8)
    frames[..., :3], frames[:, :, 16:, 3] = colours(30)[:, None, None], 255
    path = write(tmp_path / name, frames, codec, pixels, options={"g": "10"})
    assert read_facts(path).has_alpha
    clip = read_clip(path, every, background=(9, 99, 199)).frames.astype(int)
    assert np.abs(clip[:, :, :14] - (9, 99, 199)).max() <= 2
    assert np.abs(clip[:, :, 18:] - frames[:, :, 18:, :3]).max() <= 16
    alone = read_clip(path, lambda _: [25], background=(9, 99, 199)).frames[0]
    assert np.array_equal(alone, clip[25])


class Counting:
    """Counts the frames that a decoder gives out."""

    def __init__(self, decoder: Any, count: list[int]) -> None:
        self.decoder, self.count = decoder, count

    def decode(self, packet: Any) -> Any:
        frames = self.decoder.decode(packet)
        self.count.append(len(frames))
        return frames

    def flush_buffers(self) -> None:
        self.decoder.flush_buffers()


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_only_what_is_needed_is_decoded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = write(tmp_path / name, plain(50)), []
    facts, decoder = read_facts(path), videos._decoder
    monkeypatch.setattr(videos, "_decoder", lambda av, stream: Counting(decoder(av, stream), count))
    read_clip(path, lambda _: [33], facts=facts)
    assert 1 <= sum(count) <= 10  # from key frame 30; the decoder runs a little ahead
    count.clear()
    read_clip(path, lambda _: [2, 45], facts=facts)
    assert sum(count) <= 20  # from 0 and from 40


def test_memory_is_that_of_the_wanted_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", plain(120, 240, 320))
    facts, frame = read_facts(path), 240 * 320 * 3
    wanted: list[tuple[Any, int | None]] = [([0, 119], None), (range(120), 24)]  # two whole frames, 120 small ones
    for places, min_side in wanted:
        tracemalloc.start()
        read_clip(path, lambda _, places=places: places, facts=facts, min_side=min_side)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 * frame


def test_size_may_change_midway(tmp_path: Path) -> None:
    large, small = write(tmp_path / "a.mkv", plain(3), "mjpeg", "yuvj420p", options={"q": "2"}), tmp_path / "b.mkv"
    with av.open(str(large)) as source, av.open(str(small), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        coder = av.CodecContext.create("mjpeg", "w")
        coder.width, coder.height, coder.pix_fmt, coder.time_base = 24, 16, "yuvj420p", Fraction(1, 24)
        last = coder.encode(av.VideoFrame.from_ndarray(plain(3, 16, 24)[2], format="rgb24").reformat(format="yuvj420p"))
        last = [*last, *coder.encode(None)][0]
        last.pts, last.dts, last.time_base = packets[2].pts, packets[2].dts, packets[2].time_base
        for packet in (packets[0], packets[1], last):
            packet.stream = stream
            target.mux(packet)
    clip = read_clip(small, every)
    assert np.abs(clip.frames.astype(int) - plain(3)).max() <= 8
    assert inspect_clip(small).odd == ("the picture changes its size: 24 x 16, 48 x 32",)


@pytest.mark.parametrize("options", [{"bf": "0", "g": "10", "crf": "4"}, None])
def test_what_an_edit_list_cuts_away_is_not_there(options: dict[str, str] | None, tmp_path: Path) -> None:
    """ISO 14496-12, 8.6.6: how long the edit is, in the time of the movie, and where it starts, in that of the track."""
    path = write(tmp_path / "a.mp4", plain(30), options=options)
    content = bytearray(path.read_bytes())
    edit, (scale,) = content.index(b"elst") + 12, struct.unpack_from(">I", content, content.index(b"mdhd") + 16)
    duration, start = struct.unpack_from(">Ii", content, edit)
    struct.pack_into(">Ii", content, edit, duration * 15 // 30, start + scale * 7 // 24)
    path.write_bytes(content)
    seen = inspect_clip(path)
    assert (seen.facts.num_frames, seen.facts.times[0], seen.odd) == (15, 0, ())
    assert np.abs(read_clip(path, every).frames.astype(int) - plain(30)[7:22]).max() <= 6
    assert np.array_equal(read_clip(path, lambda _: [12]).frames[0], read_clip(path, every).frames[12])


@pytest.mark.parametrize(
    ("name", "params", "mux"),
    [
        ("open.mp4", {"x264-params": "keyint=10:min-keyint=10:open-gop=1:bframes=3:scenecut=0:b-adapt=0"}, {}),
        ("open.mkv", {"x264-params": "keyint=10:min-keyint=10:open-gop=1:bframes=3:scenecut=0:b-adapt=0"}, {}),
        ("refresh.mp4", {"x264-params": "keyint=10:intra-refresh=1"}, {}),
        ("fragments.mp4", None, {"movflags": "frag_keyframe+empty_moov"}),
    ],
)
def test_frames_alone_where_groups_are_open(name: str, params: Any, mux: dict[str, str], tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    path = write(tmp_path / name, np.stack([np.roll(noise, shift, axis=1) for shift in range(35)]), options=params, mux=mux)
    whole = read_clip(path, every).frames
    assert len(whole) == 35
    for place in range(35):
        assert np.array_equal(read_clip(path, lambda _, place=place: [place]).frames[0], whole[place])


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_cut_videos_have_their_whole_frames(name: str, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (40, 32, 48, 3), dtype=np.uint8)
    path = write(tmp_path / name, frames, mux={"movflags": "faststart"} if name == "a.mp4" else {})
    whole, content = read_clip(path, every).frames, path.read_bytes()
    cut = tmp_path / f"cut{path.suffix}"
    cut.write_bytes(content[: len(content) * 6 // 10])
    seen = inspect_clip(cut)
    assert 15 < seen.facts.num_frames < 30
    assert "cut short" in seen.odd[0]
    got = read_clip(cut, every).frames
    assert np.array_equal(got[:15], whole[:15])


def test_frames_that_are_lost_in_the_middle_are_told(tmp_path: Path) -> None:
    """FFmpeg skips to the end, and the header still says how long the file was."""
    frames = np.random.default_rng(0).integers(0, 256, (40, 32, 48, 3), dtype=np.uint8)
    path = write(tmp_path / "a.webm", frames, codec="libvpx-vp9", options={})
    assert inspect_clip(path).odd == ()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) * 7 // 10] = bytes(len(content) * 7 // 10 - len(content) // 2)
    path.write_bytes(content)
    seen = inspect_clip(path)
    assert seen.facts.num_frames < 36
    assert "frames are lost: they end after" in seen.odd[0]
    assert "the file says 1.67 s" in seen.odd[0]


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    content = write(tmp_path / "a.mp4", plain(20)).read_bytes()
    sound = tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    cases = {
        "index.mp4": content[: len(content) // 2],  # its index stood at the end
        "zeros.mp4": content[:100] + bytes(len(content) - 100),
        "head.mkv": b"\x1a\x45\xdf\xa3" + bytes(100),
        "sound.mp4": sound.read_bytes(),
    }
    for name, damaged in cases.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UnreadableClip, match=name) as caught:
            read_clip(tmp_path / name, every)
        assert "\n" not in caught.value.reason
    with pytest.raises(UnreadableClip, match="only sound"):
        read_facts(sound)


def test_zeroed_packets_do_not_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", np.random.default_rng(0).integers(0, 256, (20, 32, 48, 3), dtype=np.uint8))
    content = bytearray(path.read_bytes())
    at = content.index(b"mdat") + 4
    middle = at + (content.index(b"moov") - at) // 2
    content[middle : middle + 4000] = bytes(4000)
    path.write_bytes(content)
    with pytest.raises(UnreadableClip, match=r"a\.mp4: "):
        inspect_clip(path)


def test_a_file_is_what_it_holds_and_a_playlist_is_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", plain(5))
    named = path.rename(tmp_path / "wrong.gif")
    assert read_facts(named).format == "mp4"
    assert np.array_equal(read_clip(Blob("in a shard", named.read_bytes()), every).frames, read_clip(named, every).frames)
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{named}\n#EXT-X-ENDLIST\n")
    with pytest.raises(UnreadableClip, match="not a clip that is read here"):
        read_facts(tmp_path / "list.mp4")
    assert container_of(b"RIFF\0\0\0\0WEBPVP8 ") is None


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", plain(5))
    assert read_facts(path).num_frames == 5
    write(path, plain(8))
    os.utime(path, ns=(1, 1))
    assert read_facts(path).num_frames == 8


def test_one_frame_and_short_gaps(tmp_path: Path) -> None:
    path = write(tmp_path / "one.mp4", plain(1))
    facts = read_facts(path)
    assert (facts.num_frames, facts.times.tolist()) == (1, [0.0])
    assert facts.fps == pytest.approx(24)
    assert read_clip(path, every).frames.shape == (1, 32, 48, 3)


def test_without_pyav_the_message_names_the_extra(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", plain(2))
    program = (
        "import sys; sys.modules['av'] = None\n"
        "from tessera.media.clips import AvMissing, Clip, read_facts\n"
        "from tessera.media.clip_files import encode_gif, encode_mp4\n"
        "import numpy as np\n"
        "clip = Clip(np.zeros((2, 4, 4, 3), np.uint8), 8.0)\n"
        "assert encode_gif(clip)\n"
        "for call in (lambda: read_facts(sys.argv[1]), lambda: encode_mp4(clip)):\n"
        "    try: call()\n"
        "    except AvMissing as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    assert len(lines) == 2
    assert all("pip install 'tessera-gen[video]'" in line for line in lines)
