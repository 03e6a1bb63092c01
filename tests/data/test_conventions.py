"""Split folders, class folders, several captions, Parquet tables: what each means, what the notes say, how it is turned off."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tessera.config import ImageDataConfig, UserError
from tessera.data.captions import names_side
from tessera.data.check import check_folder
from tessera.data.opening import open_source
from tessera.data.sources import StoredImages, split_indices


def put(path: Path, colour: tuple[int, int, int] = (10, 20, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), colour).save(path)
    return path


def opened(path: Path, **config: Any) -> StoredImages:
    return open_source(path, ImageDataConfig(**config))


def captions(source: StoredImages) -> dict[str, tuple[str, ...]]:
    return {source.key(index): source.captions(index) for index in range(len(source))}


def sides(source: StoredImages, fraction: float = 0.05) -> tuple[list[str], list[str]]:
    train, validation = split_indices(source, fraction)
    return [source.key(int(index)) for index in train], [source.key(int(index)) for index in validation]


# ---- split folders


@pytest.mark.parametrize("name", ["validation", "val", "valid", "test", "Validation"])
def test_split_folders_are_the_split(tmp_path: Path, name: str) -> None:
    for number in range(12):
        put(tmp_path / f"train/{number:02d}.png")
    for number in range(3):
        put(tmp_path / name / f"{number:02d}.png")
    source = opened(tmp_path)
    train, validation = sides(source, 0.5)
    assert train == [f"train/{number:02d}" for number in range(12)]
    assert validation == [f"{name}/{number:02d}" for number in range(3)]
    assert any("split folder" in note and f"{name}/ is validation" in note for note in source.notes)
    assert check_folder(tmp_path).split == {"train": 12, "validation": 3}
    assert len(sides(opened(tmp_path, split="hash"), 0.5)[1]) not in (0, 3, 15)


def test_a_test_folder_beside_a_validation_folder_is_kept_out(tmp_path: Path) -> None:
    for name in ["train/a.png", "val/b.png", "test/c.png", "d.png", "extra/e.png"]:
        put(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("file_name,text\ntrain/a.png,one\nval/b.png,two\ntest/c.png,three\nd.png,four\n")
    source = opened(tmp_path)
    assert sides(source) == (["train/a"], ["val/b"])
    assert captions(source) == {"train/a": ("one",), "val/b": ("two",)}
    assert any("not used: 3 (d.png, extra/e.png, test/c.png)" in note for note in source.notes)
    assert source.rejects == ()


def test_captions_of_pictures_that_are_kept_out_are_no_orphans(tmp_path: Path) -> None:
    for name in ["train/a.png", "val/b.png", "test/c.png"]:
        put(tmp_path / name).with_suffix(".txt").write_text("a picture")
    assert not any("without an image" in note for note in opened(tmp_path).notes)
    (tmp_path / "test/d.txt").write_text("nothing")
    assert any("without an image: 1 (test/d.txt)" in note for note in opened(tmp_path).notes)


@pytest.mark.parametrize("names", [["train/a.png", "other/b.png"], ["val/a.png", "b.png"], ["train.png", "val.png"]])
def test_half_a_split_is_none(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        put(tmp_path / name)
    source = opened(tmp_path)
    assert source.index.held_out is None
    assert len(source) == 2
    assert set(captions(source).values()) == {()}


@pytest.mark.parametrize("option", [{"group_by": "who"}, {"group_near_duplicates": True}])
def test_groups_beside_split_folders_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    for name in ["train/a.png", "val/b.png"]:
        put(tmp_path / name)
    (tmp_path / "metadata.csv").write_text("file_name,text,who\ntrain/a.png,one,x\nval/b.png,two,x\n")
    with pytest.raises(UserError, match=rf"data\.{next(iter(option))} has no effect .* data\.split=hash"):
        opened(tmp_path, **option)
    assert len(opened(tmp_path, split="hash", **option)) == 2


# ---- class folders


def test_class_folders_name_their_pictures(tmp_path: Path) -> None:
    for name in ["golden_retriever/1.png", "golden_retriever/2.png", "10_tabby cat/1.png", "7/1.png"]:
        put(tmp_path / name)
    (tmp_path / "README.txt").write_text("pets")
    source = opened(tmp_path)
    assert captions(source) == {
        "10_tabby cat/1": ("tabby cat",),
        "7/1": ("7",),
        "golden_retriever/1": ("golden retriever",),
        "golden_retriever/2": ("golden retriever",),
    }
    assert any("class folder" in note and "data.class_folders=false" in note for note in source.notes)
    assert any("every image is seen once an epoch: 1 (10_tabby cat)" in note for note in source.notes)
    assert set(captions(opened(tmp_path, class_folders=False)).values()) == {()}


def test_class_folders_below_split_folders(tmp_path: Path) -> None:
    for name in ["train/cat/1.png", "train/dog/1.png", "test/cat/1.png", "test/dog/1.png"]:
        put(tmp_path / name)
    assert captions(opened(tmp_path)) == {
        "test/cat/1": ("cat",), "test/dog/1": ("dog",), "train/cat/1": ("cat",), "train/dog/1": ("dog",)
    }  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["cat/1.png", "2.png"],  # one outside
        ["cat/1.png", "cat/2.png"],  # a single folder
        ["cat/1.png", "pets/dog/1.png"],  # of another depth
        ["cat/1.png", "dog/1.png", "dog/1.txt"],  # something else gives captions
        ["cat/1.png", "dog/1.png", "metadata.csv"],
    ],
)
def test_what_is_not_plainly_a_class_folder_gives_no_caption(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        if name.endswith(".png"):
            put(tmp_path / name)
        else:
            (tmp_path / name).write_text("file_name,text\n")
    found = set(captions(opened(tmp_path)).values())
    assert found <= {(), ("file_name,text",)}
    assert () in found


# ---- several captions


def test_several_captions_by_list_rows_and_lines(tmp_path: Path) -> None:
    for name in "abcd":
        put(tmp_path / f"{name}.png")
    rows: list[dict[str, Any]] = [
        {"file_name": "a.png", "text": ["one", " two ", "", "one"]},
        {"file_name": "b.png", "caption": "first", "who": 1},
        {"file_name": "b.png", "caption": "second", "who": 2},
        {"file_name": "b.png", "caption": "first"},
        {"file_name": "c.png", "text": ["fine", 3]},
        {"file_name": "c.png", "text": [], "prompt": "from the next column"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.caption").write_text("line one\r\n\r\n  line two\r\n")
    source = opened(tmp_path, group_by="who")
    assert captions(source) == {
        "a": ("one", "two"), "b": ("first", "second"), "c": ("from the next column",), "d": ("line one", "line two")
    }  # fmt: skip
    assert [source.group(index) for index in range(4)] == ["a", "1", "c", "d"]
    assert [(reject.path, "list of strings" in reject.reason) for reject in source.rejects] == [("metadata.jsonl:5", True)]
    assert source.caption(0) == "one"
    report = check_folder(tmp_path)
    assert (report.num_captioned, report.num_captions) == (4, 7)


# ---- Parquet


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)


def test_parquet_rows(tmp_path: Path) -> None:
    for name in ["a.png", "sub/b.png", "c.png"]:
        put(tmp_path / name)
    write_parquet(
        tmp_path / "metadata.parquet",
        [
            {"file_name": "a.png", "text": ["one", "two"], "who": 7, "image": {"bytes": b"\0" * 100}, "raw": b"x"},
            {"file_name": "sub/b.png", "text": ["three"], "who": 7, "image": None, "raw": None},
            {"file_name": "gone.png", "text": None, "who": None, "image": None, "raw": None},
        ],
    )
    source = opened(tmp_path, group_by="who")
    assert captions(source) == {"a": ("one", "two"), "c": (), "sub/b": ("three",)}
    assert [source.group(index) for index in range(3)] == ["7", "c", "7"]
    assert [reject.path for reject in source.rejects] == ["metadata.parquet:3"]
    with pytest.raises(UserError, match="they have file_name, text, who"):  # what is not a value is not loaded
        opened(tmp_path, group_by="raw")


def test_parquet_that_is_wrong(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    write_parquet(tmp_path / "metadata.parquet", [{"path": "a.png", "text": "x"}])
    with pytest.raises(UserError, match="has the columns path, text; expected file_name"):
        opened(tmp_path)
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"metadata\.parquet is not a Parquet table"):
        opened(tmp_path)


def test_parquet_without_the_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a.png")
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    plain = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'tessera-gen\[data\]'; or write the table as metadata.jsonl"):
        opened(tmp_path)


def test_two_tables_in_one_folder_whatever_lies_between(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    put(tmp_path / "metadata.d/b.png")
    for name in ["metadata.csv", "metadata.jsonl", "metadata.d/metadata.csv"]:
        (tmp_path / name).write_text("file_name,text\n")
    with pytest.raises(UserError, match=r"holds both metadata\.csv and metadata\.jsonl"):
        opened(tmp_path)


# ---- sides


@pytest.mark.parametrize(
    "caption",
    [
        "a cat on the left",
        "Right shoe",
        "left-hand drive",
        "LEFT",
        "arrow pointing leftwards",
        "the rightmost door",
        "left/right",
    ],
)
def test_captions_that_name_a_side(caption: str) -> None:
    assert names_side(["something", caption])


@pytest.mark.parametrize("caption", ["bright copyright sign", "an upright piano", "cleft chin", "rights", "a dog"])
def test_captions_that_name_none(caption: str) -> None:
    assert not names_side([caption])


def test_the_note_on_flips(tmp_path: Path) -> None:
    put(tmp_path / "a.png").with_suffix(".txt").write_text("a hand\nthe left hand")
    put(tmp_path / "b.png").with_suffix(".txt").write_text("a foot")
    assert any("not mirrored (data.flip=always: it is): 1" in note for note in opened(tmp_path, flip=True).notes)
    for flip in (False, "always"):
        assert opened(tmp_path, flip=flip).notes == opened(tmp_path).notes
    assert check_folder(tmp_path).num_naming_sides == 1
