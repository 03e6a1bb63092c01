"""docs/data.md: every example folder is built and opened, and gives the samples that stand under it."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.config import ImageDataConfig, VideoDataConfig
from tessera.data.opening import open_source
from tessera.data.sources import Stored
from tessera.data.synth.shapes import write_shapes
from tessera.media.clip_files import encode_mp4
from tessera.media.clips import VIDEO_SUFFIXES, Clip
from tessera.media.images import IMAGE_SUFFIXES
from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "workshop"]

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf8")
EXAMPLES = re.findall(r"```folder\n(.*?)```\n```samples\n(.*?)```", PAGE, flags=re.DOTALL)
CLIP_EXAMPLES = re.findall(r"```clips\n(.*?)```\n```found\n(.*?)```", PAGE, flags=re.DOTALL)
ARRAYS = {"pictures": (8, 8, 3), "frames": (8, 8, 3), "clips": (4, 8, 8, 3)}


def content_of(name: str, lines: list[str]) -> bytes:
    suffix = Path(name).suffix
    stream = io.BytesIO()
    if suffix in IMAGE_SUFFIXES:
        Image.new("RGB", (8, 8)).save(stream, Image.registered_extensions()[suffix])
    elif suffix == ".npy":
        count, things = lines[0].split()
        np.save(stream, np.zeros((int(count), *ARRAYS[things]), np.uint8))
    elif suffix in VIDEO_SUFFIXES:
        pytest.importorskip("av")
        stream.write(encode_mp4(Clip(np.zeros((3, 16, 16, 3), np.uint8), 10.0)))
    elif suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist([json.loads(line) for line in lines])
        pytest.importorskip("pyarrow.parquet").write_table(table, stream)
    else:
        stream.write("".join(f"{line}\n" for line in lines).encode())
    return stream.getvalue()


def build(root: Path, listing: str) -> None:
    files: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, _, text = line.partition(" ")
        files.setdefault(name, []).append(text.strip())
    for name, lines in files.items():
        shard, _, member = name.rpartition(":")
        path = root / (shard or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content_of(name, lines)
        if not shard:
            path.write_bytes(content)
            continue
        with tarfile.open(path, "a") as tar:
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def described(source: Stored) -> list[str]:
    held_out = source.index.held_out
    lines = []
    for index in range(len(source)):
        side = "hash" if held_out is None else "validation" if held_out[index] else "train"
        lines.append(f"{source.key(index)} | {side} | {' / '.join(source.captions(index))}".rstrip())
    return lines


@pytest.mark.parametrize(("listing", "samples"), EXAMPLES)
def test_an_example_gives_its_samples(tmp_path: Path, listing: str, samples: str) -> None:
    build(tmp_path, listing)
    source = open_source(tmp_path, ImageDataConfig())
    assert described(source) == samples.splitlines()
    assert source.rejects == ()
    assert all(source.read(index).shape == (8, 8, 3) for index in range(len(source)))


@pytest.mark.parametrize(("listing", "samples"), CLIP_EXAMPLES)
def test_an_example_of_clips_gives_its_samples(tmp_path: Path, listing: str, samples: str) -> None:
    build(tmp_path, listing)
    source = open_source(tmp_path, VideoDataConfig())
    assert described(source) == samples.splitlines()
    assert source.rejects == ()
    for index in range(len(source)):
        clip = source.read(index).read(lambda facts: range(facts.num_frames))
        assert clip.frames.shape[3] == 3


def test_the_page_has_an_example_of_every_convention() -> None:
    text = "".join(listing for listing, _ in EXAMPLES)
    for part in (".txt", ".caption", "metadata.jsonl", "metadata.csv", "metadata.parquet", "val/", ".tar:", ".npy", "10_cat/"):
        assert part in text
    assert PAGE.count("```folder") == PAGE.count("```samples") == len(EXAMPLES) == 8
    assert PAGE.count("```clips") == PAGE.count("```found") == len(CLIP_EXAMPLES) == 5


def run_example(number: int) -> dict[str, Any]:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    exec(compile(examples[number], "docs/data.md", "exec"), names)
    return names


def test_embeddings_are_read_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shapes(tmp_path / "photos", 24, 0, image_size=32)
    monkeypatch.chdir(tmp_path)
    names = run_example(1)
    assert names["vector"].shape == (512,)
    (promised,) = re.findall(r"print\(missing\.told\(\)\)  # (.*)", PAGE)
    assert capsys.readouterr().out.strip() == promised


def test_the_token_cache_is_read_as_the_page_says(generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(generated, tmp_path / "runs" / "muse-001")
    monkeypatch.chdir(tmp_path)
    names = run_example(0)
    assert names["ids"].shape == names["cache"].grid == (8, 8)
    assert names["length"] is None
    assert names["index"] == 29
    assert names["text"] == []
