"""Whatever lies in a folder: it is opened and checked, or refused as the user's error. Nothing else may come out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tessera.config import ImageDataConfig, UserError
from tessera.data.check import check_folder
from tessera.data.opening import open_source
from tessera.data.sources import split_indices


def _encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)).save(stream, kind)
    return stream.getvalue()


def _array() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros((2, 4, 4, 3), np.uint8))
    return stream.getvalue()


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in [("a.png", _encoded("PNG")), ("a.txt", b"text"), ("a.json", b'{"text": "x"}')]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


GOOD = [_encoded("PNG"), _encoded("JPEG"), _encoded("GIF"), _array(), _tar(), b"a caption", b"PAR1"]
FOLDERS = st.sampled_from(["", "", "train/", "val/", "test/", "cat/", "dog_1/", "10_a/b/", "é/"])
STEMS = st.one_of(st.sampled_from(["a", "b", "metadata", "captions", "images", "a.b", "."]), st.text("ab .é猫\n", max_size=4))
SUFFIXES = st.sampled_from(
    [".png", ".jpg", ".GIF", ".webp", ".txt", ".caption", ".jsonl", ".csv", ".parquet", ".npy", ".tar", ".json", ".obj", ""]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5), st.sampled_from(["a.png", "b.jpg", ".."])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
ROWS = st.dictionaries(st.sampled_from(["file_name", "text", "caption", "prompt", "who"]), VALUES, max_size=5)
TABLES = st.one_of(
    st.lists(st.one_of(ROWS, VALUES), max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    st.lists(
        st.lists(st.sampled_from(["file_name", "text", "a.png", "b.jpg", '"', "x,y", "\0", "é"]), max_size=3), max_size=4
    ).map(lambda rows: "\n".join(",".join(row) for row in rows).encode()),
    st.sampled_from([b"file_name,text\na.png,x\n", b'{"file_name": "a.png", "text": ["x", "left"]}\n', b"[" * 100_000]),
)


@st.composite
def damaged(draw: Any) -> bytes:
    """A good file with a few bytes changed, and perhaps cut."""
    content = bytearray(draw(st.sampled_from(GOOD)))
    for place in draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
        content[place] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.one_of(st.none(), st.integers(0, len(content))))])


CONTENTS = st.one_of(st.sampled_from(GOOD), damaged(), TABLES, st.binary(max_size=50))
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "group_by": st.sampled_from(["who", "text", "nothing"]),
        "group_near_duplicates": st.booleans(),
        "split": st.sampled_from(["auto", "hash"]),
        "class_folders": st.booleans(),
        "flip": st.sampled_from([True, "always"]),
        "channels": st.sampled_from([1, 4]),
    },
)


@settings(max_examples=150, deadline=None)
@given(files=st.lists(st.tuples(FOLDERS, STEMS, SUFFIXES, CONTENTS), max_size=8), config=CONFIGS, one=st.booleans())
def test_any_folder_is_opened_or_refused(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, str, str, bytes]], config: dict[str, Any], one: bool
) -> None:
    root = tmp_path_factory.mktemp("any")
    for folder, stem, suffix, content in files:
        path = root / folder / (stem + suffix)
        with contextlib.suppress(OSError):  # `.`, or a folder of that name
            os.makedirs(path.parent, exist_ok=True)
            path.write_bytes(content)
    places = [root, *(path for path in root.rglob("*") if one and path.is_file())]
    for place in places:
        open_and_check(place, config)


def open_and_check(place: Path, config: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        source = open_source(place, ImageDataConfig(**config))
        train, validation = split_indices(source, 0.3)
        assert len(train) + len(validation) == len(source) > 0
        assert len({source.key(index) for index in range(len(source))}) == len(source)
        assert all(caption.strip() for index in range(len(source)) for caption in source.captions(index))
    with contextlib.suppress(UserError):
        report = check_folder(place)
        assert json.loads(json.dumps(report.to_json()))["num_samples"] == report.num_samples
        "\n".join(report.lines()).encode()
