"""Embeddings by key: three kinds of files, one interface, every kind of damage named, and never another sample's vector."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.config import (
    ImageDataConfig,
    ListedEmbeddingsConfig,
    ShardEmbeddingsConfig,
    TarEmbeddingsConfig,
    UserError,
)
from tessera.data import embedding_files
from tessera.data.embedding_files import Rows
from tessera.data.embedding_opening import open_embeddings
from tessera.data.embeddings import Absent, Embeddings, Missing
from tessera.data.opening import open_source
from tessera.data.shards import TarShards
from tests.data.array_makers import DAMAGED, saved
from tests.data.shard_makers import encoded, pack

WIDTH, PER_SHARD = 6, 4
KEYS = [f"{shard:05d}/{shard:05d}{number:04d}" for shard in range(3) for number in range(PER_SHARD)]


def vector(key: str) -> np.ndarray:
    """A function of the key alone, so that any exchange is seen."""
    return np.random.default_rng(int(key.rpartition("/")[2])).normal(size=WIDTH).astype(np.float16)


def write_tars(folder: Path, arrays: bool = True, leave_out: tuple[str, ...] = (), **other: bytes) -> Path:
    """Three shards as img2dataset writes them; `other` are arrays that stand for those of a key's name."""
    for shard in range(3):
        members = {}
        for number in range(PER_SHARD):
            name = f"{shard:05d}{number:04d}"
            if name in leave_out:
                continue
            members[f"{name}.png"] = encoded(number)
            members[f"{name}.txt"] = f"caption {name}".encode()
            if arrays:
                members[f"{name}.img_emb.npy"] = other.get(f"k{name}", saved(vector(name)))
        pack(folder / f"{shard:05d}.tar", members)
    return folder


def write_rows(folder: Path, prefix: str = "img_emb") -> Path:
    """As the reordering tools write them: the row is the number in the shard."""
    folder.mkdir(exist_ok=True)
    for shard in range(3):
        np.save(folder / f"{prefix}_{shard:04d}.npy", np.stack([vector(key) for key in KEYS[4 * shard : 4 * shard + 4]]))
    return folder


def tars(path: Path) -> TarShards:
    source = open_source(path, ImageDataConfig())
    assert isinstance(source, TarShards)
    return source


def check(embeddings: Embeddings, missing: dict[str, str], keys: list[str] = KEYS) -> None:
    """Each sample has its own vector, or is missing for the reason told."""
    embeddings = pickle.loads(pickle.dumps(embeddings))
    assert embeddings.width == WIDTH
    found = Missing.among(embeddings, keys)
    assert found.reasons.keys() == missing.keys()
    for key, part in missing.items():
        assert part in found.reasons[key]
        assert embeddings.of(key) is None
    for key in keys:
        if key not in missing:
            own = embeddings.of(key)
            assert own is not None
            assert own.dtype == np.float32
            assert np.array_equal(own, vector(key).astype(np.float32))
    assert embeddings.of("00000/000009999") is None
    assert embeddings.of("another/" + keys[0]) is None


def shards_config(path: Path, **more: Any) -> ShardEmbeddingsConfig:
    return ShardEmbeddingsConfig(path=path, **{"digits": 4, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tars(tmp_path / "tars")


def test_arrays_in_tars(folder: Path) -> None:
    check(open_embeddings(TarEmbeddingsConfig(), tars(folder)), {})
    assert "array in a shard, read only where embeddings are asked for: *.img_emb.npy: 12" in "".join(tars(folder).notes)


def test_arrays_in_tars_that_cannot_be_used(tmp_path: Path) -> None:
    bad = {
        "k000000001": saved(np.zeros(WIDTH, np.float32)),
        "k000000002": saved(np.full(WIDTH, np.nan, np.float32)),
        "k000010000": saved(np.ones(WIDTH + 1, np.float32)),
        "k000010001": saved(np.ones(WIDTH, np.int64)),
        "k000010002": saved(vector("7"))[:-3],
        "k000020003": pickle.dumps({"img": [1.0]}),
    }
    folder = write_tars(tmp_path, **bad)
    expected = {
        "00000/000000001": "all zeros",
        "00000/000000002": "not finite",
        "00001/000010000": "shape (7,), expected (6,)",
        "00001/000010001": "int64, expected floats",
        "00001/000010002": "cannot be read",
        "00002/000020003": "cannot be read",
    }
    embeddings = open_embeddings(TarEmbeddingsConfig(), tars(folder))
    check(embeddings, expected)
    missing = Missing.among(embeddings, KEYS)
    assert missing.told().startswith("6 of 12 samples have no embedding. all zeros, which stands for none: 1 (00000/000000001); ")
    missing.refuse(0.5)
    with pytest.raises(UserError, match=r"6 of 12 .* more than data\.corrupt_budget=0\.4 allows"):
        missing.refuse(0.4)


@pytest.mark.parametrize("raised", DAMAGED)
def test_a_damaged_header_costs_its_own_samples(raised: str, tmp_path: Path) -> None:
    """In a tar one; in an array for each tar, those of that tar."""
    folder = write_tars(tmp_path / "tars", k000010002=DAMAGED[raised])
    check(open_embeddings(TarEmbeddingsConfig(), tars(folder)), {KEYS[6]: "its array cannot be read ("})
    rows = write_rows(tmp_path / "rows")
    (rows / "img_emb_0001.npy").write_bytes(DAMAGED[raised])
    check(open_embeddings(shards_config(rows), tars(folder)), dict.fromkeys(KEYS[4:8], "img_emb_0001.npy "))


@pytest.mark.parametrize("shape", [(77, 768), (0,), (), (2, 3, 4)])
def test_arrays_in_tars_that_are_no_vectors(shape: tuple[int, ...], tmp_path: Path) -> None:
    content = saved(np.ones(shape, np.float16))
    folder = write_tars(tmp_path, **{f"k{key[6:]}": content for key in KEYS[2:]})
    told = f"10 of the first 12 *.img_emb.npy of {folder} are arrays of shape {shape}; expected a vector for every picture"
    with pytest.raises(UserError, match=re.escape(told) + ".*: set suffix to the ending of those"):
        open_embeddings(TarEmbeddingsConfig(), tars(folder))


def test_a_row_of_one_in_a_tar_is_a_vector(tmp_path: Path) -> None:
    folder = write_tars(tmp_path, **{"k000000000": saved(vector("0")[None])})
    check(open_embeddings(TarEmbeddingsConfig(suffix=".img_emb.npy"), tars(folder)), {})


@pytest.mark.parametrize("length", range(600, 24_000, 1700))
def test_a_tar_that_is_cut_in_the_middle(tmp_path: Path, length: int) -> None:
    """Whatever samples are left, each has its own vector or none."""
    folder = write_tars(tmp_path / "tars")
    path = folder / "00001.tar"
    path.write_bytes(path.read_bytes()[:length])
    source = tars(folder)
    keys = [source.key(index) for index in range(len(source))]
    assert set(KEYS[:4] + KEYS[8:]) <= set(keys) <= set(KEYS)
    embeddings = open_embeddings(TarEmbeddingsConfig(), source)
    lost = [key for key in keys if embeddings.of(key) is None]
    assert len(lost) <= 1, "its picture is whole, and the array behind it is cut"
    check(embeddings, dict.fromkeys(lost, "no *.img_emb.npy of its own in its tar"), keys)
    rows = write_rows(tmp_path / "rows")
    short = [key for key in keys if key.startswith("00001/")]
    for how, told in (("name", "4 rows, and no sample of its tar asks for rows"), ("place", "4 rows, and its tar")):
        wrong = {} if len(short) in (0, 4) else dict.fromkeys(short, told)
        check(open_embeddings(shards_config(rows, rows=how), source), wrong, keys)


def test_a_tar_that_is_cut_after_it_was_opened(folder: Path) -> None:
    embeddings = open_embeddings(TarEmbeddingsConfig(), tars(folder))
    (folder / "00001.tar").write_bytes((folder / "00001.tar").read_bytes()[:1024])
    (folder / "00002.tar").unlink()
    check(embeddings, dict.fromkeys(KEYS[4:], "cannot be read"))


def test_two_arrays_for_one_key_in_a_tar(folder: Path) -> None:
    pack(folder / "00001.tar", {"000010002.img_emb.npy": saved(vector("5"))}, "a")
    check(open_embeddings(TarEmbeddingsConfig(), tars(folder)), {"00001/000010002": "of its own"})


def test_several_endings_in_tars(folder: Path) -> None:
    pack(folder / "00000.tar", {"000000000.text_emb.npy": saved(vector("5"))}, "a")
    with pytest.raises(UserError, match=r"arrays called \*\.img_emb\.npy, \*\.text_emb\.npy; .* set suffix"):
        open_embeddings(TarEmbeddingsConfig(), tars(folder))
    check(open_embeddings(TarEmbeddingsConfig(suffix=".img_emb.npy"), tars(folder)), {})
    (folder / "none").mkdir()
    write_tars(folder / "none", arrays=False)
    with pytest.raises(UserError, match=r"hold no arrays beside the pictures; expected one \.npy for every picture"):
        open_embeddings(TarEmbeddingsConfig(), tars(folder / "none"))


def test_an_array_for_each_tar(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    for how in ("name", "place"):
        check(open_embeddings(shards_config(rows, rows=how), tars(folder)), {})


def test_rows_follow_names_where_samples_are_left_out(tmp_path: Path) -> None:
    """A tar that lacks samples: their rows stay unused, and no other sample moves up."""
    left_out = ("000010001", "000020000")
    source = tars(write_tars(tmp_path / "tars", arrays=False, leave_out=left_out))
    keys = [key for key in KEYS if not key.endswith(left_out)]
    rows = write_rows(tmp_path / "rows")
    check(open_embeddings(shards_config(rows), source), {}, keys)
    by_place = open_embeddings(shards_config(rows, rows="place"), source)
    check(by_place, {key: "4 rows, and its tar 3 pictures" for key in keys if key[:5] != "00000"}, keys)


def test_rows_by_place_follow_the_pictures_of_a_tar(tmp_path: Path) -> None:
    """Wherever its captions lie, and in whatever order its samples are."""
    folder, order = tmp_path / "tars", [KEYS[number] for number in (6, 4, 7, 5)]
    names = [key.rpartition("/")[2] for key in KEYS]
    members = {f"{name}.txt": b"a caption" for name in names[4:7]} | {f"{key[6:]}.png": encoded(0) for key in order}
    pack(folder / "00000.tar", {f"{name}.png": encoded(0) for name in names[:4]})
    pack(folder / "00001.tar", members)
    source, rows = tars(folder), tmp_path / "rows"
    keys = [source.key(index) for index in range(len(source))]
    assert keys == KEYS[:8], "by the first member of each"
    rows.mkdir()
    for shard, shown in enumerate((KEYS[:4], order)):
        np.save(rows / f"img_emb_{shard:04d}.npy", np.stack([vector(key) for key in shown]))
    check(open_embeddings(shards_config(rows, rows="place"), source), {}, keys)


def test_rows_behind_the_last_name_are_zeros_or_nobody_s(tmp_path: Path) -> None:
    source = tars(write_tars(tmp_path / "tars", arrays=False, leave_out=("000010003",)))
    keys = [key for key in KEYS if not key.endswith("000010003")]
    path = write_rows(tmp_path / "rows") / "img_emb_0001.npy"
    wrong = "4 rows, and no sample of its tar asks for rows 3 to 3, which should then be missing or zeros"
    check(open_embeddings(shards_config(path.parent), source), dict.fromkeys(keys[4:7], wrong), keys)
    array = np.load(path)
    array[3] = 0
    np.save(path, array)
    check(open_embeddings(shards_config(path.parent), source), {}, keys)


def test_empty_rows_are_looked_for_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As row by row, wherever blocks end; one opening a file."""
    monkeypatch.setattr(embedding_files, "BLOCK_ROWS", 3)
    path, array = tmp_path / "a.npy", np.zeros((11, WIDTH), np.float32)
    for last in (None, 0, 2, 3, 6, 10):
        array[:] = 0
        if last is not None:
            array[last, -1] = np.nan if last == 6 else 1
        np.save(path, array)
        rows = Rows.open(path)
        for start in range(12):
            assert rows.empty_from(start) == (not any(rows.read(row).any() for row in range(start, 11)))
    np.save(path, np.zeros((11, WIDTH), np.float32))
    rows = Rows.open(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Absent, match=r"a\.npy was cut since it was opened"):
        rows.empty_from(5)
    path.unlink()
    with pytest.raises(Absent, match=r"a\.npy cannot be read \(no such file"):
        rows.empty_from(5)
    np.save(path, np.zeros((11, 0), np.float32))
    with pytest.raises(Absent, match=r"holds float32 of shape \(11, 0\), expected floats by rows"):
        Rows.open(path)


@pytest.mark.filterwarnings("error")
def test_rows_of_doubles_that_float32_cannot_hold(tmp_path: Path) -> None:
    """At the door as when they are read."""
    array = np.stack([vector(key).astype(np.float64) for key in KEYS])
    array[1], array[2] = 1e-60, 1e300
    np.save(tmp_path / "a.npy", array)
    (tmp_path / "a.txt").write_text("\n".join(KEYS))
    wrong = {KEYS[1]: "all zeros, which stands for none", KEYS[2]: "numbers that are not finite"}
    source = tars(write_tars(tmp_path / "tars", arrays=False))
    check(open_embeddings(ListedEmbeddingsConfig(path=tmp_path / "a.npy"), source), wrong)


def test_packed_rows_are_not_taken_for_numbered_ones(tmp_path: Path) -> None:
    """Rows without those of failed downloads: the file is too short for the last name, so none of it is used."""
    source = tars(write_tars(tmp_path / "tars", arrays=False, leave_out=("000010001",)))
    keys = [key for key in KEYS if not key.endswith("000010001")]
    rows = write_rows(tmp_path / "rows")
    np.save(rows / "img_emb_0001.npy", np.stack([vector(key) for key in keys[4:7]]))
    wrong = "img_emb_0001.npy has 3 rows, and a sample of its tar asks for row 3"
    check(open_embeddings(shards_config(rows), source), dict.fromkeys(keys[4:7], wrong), keys)
    check(open_embeddings(shards_config(rows, rows="place"), source), {}, keys)


def damage(rows: Path, how: str) -> str:
    """One file spoilt; returns what is told of it."""
    path = rows / "img_emb_0001.npy"
    array = np.load(path)
    if how == "missing":
        path.unlink()
        return "img_emb_0001.npy is missing"
    if how == "short":
        np.save(path, array[:2])
        return "has 2 rows, and a sample of its tar asks for row 3"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-5])
        return "bytes, its header says"
    if how == "longer than its header":
        path.write_bytes(path.read_bytes() + b"12345678")
        return "bytes, its header says"
    if how == "width":
        np.save(path, np.ones((4, 9), np.float16))
        return "rows of 9 channels, others have 6"
    if how == "integers":
        np.save(path, np.ones((4, 6), np.int32))
        return "expected floats by rows"
    if how == "by column":
        np.save(path, np.asfortranarray(array))
        return "column by column"
    path.write_bytes(pickle.dumps(array))
    return "is no .npy file"


@pytest.mark.parametrize(
    "how", ["missing", "short", "cut", "longer than its header", "width", "integers", "by column", "a pickle"]
)
def test_an_array_that_cannot_be_used_takes_its_samples_along(folder: Path, tmp_path: Path, how: str) -> None:
    rows = write_rows(tmp_path / "rows")
    told = damage(rows, how)
    check(open_embeddings(shards_config(rows), tars(folder)), dict.fromkeys(KEYS[4:8], told))


def test_rows_that_are_empty(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    array = np.load(rows / "img_emb_0002.npy")
    array[1], array[3, 2] = 0, np.inf
    np.save(rows / "img_emb_0002.npy", array)
    expected = {KEYS[9]: "all zeros", KEYS[11]: "not finite"}
    check(open_embeddings(shards_config(rows), tars(folder)), expected)


def test_an_array_that_changes_after_it_was_opened(folder: Path, tmp_path: Path) -> None:
    """No map of it is kept: what is read is there, or missing."""
    rows = write_rows(tmp_path / "rows")
    embeddings = open_embeddings(shards_config(rows), tars(folder))
    check(embeddings, {})
    path = rows / "img_emb_0001.npy"
    path.write_bytes(path.read_bytes()[: -2 * 2 * WIDTH])
    (rows / "img_emb_0002.npy").unlink()
    expected = dict.fromkeys(KEYS[6:8], "was cut") | dict.fromkeys(KEYS[8:], "no such file")
    check(embeddings, expected)


def test_names_that_begin_with_their_tars_number_ask_for_digits(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    embeddings = open_embeddings(ShardEmbeddingsConfig(path=rows), tars(folder))
    expected = dict.fromkeys(KEYS[4:], "set digits")  # the first tar's number is 0
    check(embeddings, expected)


def test_folders_of_arrays_that_are_ambiguous(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    write_rows(rows, "text_emb")
    with pytest.raises(UserError, match=r"arrays called img_emb, text_emb; set prefix"):
        open_embeddings(shards_config(rows), tars(folder))
    check(open_embeddings(shards_config(rows, prefix="img_emb"), tars(folder)), {})
    with pytest.raises(UserError, match=r"holds no clip_<number>\.npy; expected one for every tar"):
        open_embeddings(shards_config(rows, prefix="clip"), tars(folder))
    np.save(rows / "img_emb_2.npy", np.ones((4, 6), np.float32))
    with pytest.raises(UserError, match=r"several arrays of .* have the number 2"):
        open_embeddings(shards_config(rows, prefix="img_emb"), tars(folder))
    with pytest.raises(UserError, match=r"is no folder; expected one with <prefix>_<number of the tar>\.npy"):
        open_embeddings(shards_config(tmp_path / "nothing"), tars(folder))


def test_tars_without_numbers(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows")
    (folder / "00002.tar").rename(folder / "last.tar")
    source = tars(folder)
    keys = [source.key(index) for index in range(len(source))]
    expected = dict.fromkeys(keys[8:], "last.tar has no number at its end")
    check(open_embeddings(shards_config(rows), source), expected, keys)


def write_list(path: Path, keys: list[str], as_json: bool = False) -> Path:
    np.save(path, np.stack([vector(key) for key in keys]).astype(np.float32))
    if as_json:
        path.with_suffix(".json").write_text(json.dumps(keys))
    else:
        path.with_suffix(".txt").write_text("".join(f"{key}\n" for key in keys))
    return path


def test_a_list_of_keys(folder: Path, tmp_path: Path) -> None:
    order = [*KEYS[7:], *KEYS[:6]]
    path = write_list(tmp_path / "all.npy", order)
    for place in (path, tmp_path):
        embeddings = open_embeddings(ListedEmbeddingsConfig(path=place), tars(folder))
        check(embeddings, {KEYS[6]: "not among the keys listed"})
    write_list(tmp_path / "more.npy", KEYS[6:7], as_json=True)
    check(open_embeddings(ListedEmbeddingsConfig(path=tmp_path), tars(folder)), {})


def test_a_list_of_odd_names(folder: Path, tmp_path: Path) -> None:
    """Only a line feed ends a key; a byte order mark is none of its letters."""
    odd = ["a\u2028b", "c\x85", *KEYS[2:]]
    path = tmp_path / "a.npy"
    np.save(path, np.stack([vector(key) for key in KEYS]).astype(np.float32))
    for text in ("\n".join(odd), "\ufeff" + "".join(f"{key}\r\n" for key in odd)):
        path.with_suffix(".txt").write_bytes(text.encode())
        embeddings = open_embeddings(ListedEmbeddingsConfig(path=path), tars(folder))
        check(embeddings, {}, KEYS[2:])
        assert all(
            np.array_equal(embeddings.read(new), vector(old).astype(np.float32)) for new, old in zip(odd, KEYS, strict=True)
        )
    path.with_suffix(".txt").unlink()
    path.with_suffix(".json").write_text(json.dumps(odd), encoding="utf-8-sig")
    check(open_embeddings(ListedEmbeddingsConfig(path=path), tars(folder)), {}, KEYS[2:])


def test_a_list_of_another_length_is_not_used(folder: Path, tmp_path: Path) -> None:
    write_list(tmp_path / "a.npy", KEYS[:6])
    np.save(write_list(tmp_path / "b.npy", KEYS[6:]), np.ones((5, WIDTH), np.float32))
    told = "b.npy has 5 rows, and its list 6 keys"
    check(open_embeddings(ListedEmbeddingsConfig(path=tmp_path), tars(folder)), dict.fromkeys(KEYS[6:], told))
    (tmp_path / "a.npy").unlink()
    with pytest.raises(UserError, match=r"no array of .* can be used: b\.npy has 5 rows"):
        open_embeddings(ListedEmbeddingsConfig(path=tmp_path), tars(folder))


def test_lists_that_are_wrong(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.npy does not exist; expected NAME\.npy with its keys"):
        open_embeddings(ListedEmbeddingsConfig(path=tmp_path / "nothing.npy"), tars(folder))
    path = write_list(tmp_path / "a.npy", [*KEYS, KEYS[0]])
    with pytest.raises(UserError, match=r"the key '00000/000000000' is listed twice"):
        open_embeddings(ListedEmbeddingsConfig(path=path), tars(folder))
    path.with_suffix(".txt").unlink()
    with pytest.raises(UserError, match=r"has no list of its keys; expected a\.txt, a line a row, or a\.json"):
        open_embeddings(ListedEmbeddingsConfig(path=path), tars(folder))
    path.with_suffix(".json").write_text('{"keys": []}')
    with pytest.raises(UserError, match=r"cannot be read: expected a list of strings"):
        open_embeddings(ListedEmbeddingsConfig(path=path), tars(folder))


def test_a_folder_of_pictures_takes_a_list_only(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(encoded(number))
    source = open_source(tmp_path / "pictures", ImageDataConfig())
    write_list(tmp_path / "a.npy", ["0", "2"])
    check(open_embeddings(ListedEmbeddingsConfig(path=tmp_path / "a.npy"), source), {"1": "not among"}, ["0", "1", "2"])
    with pytest.raises(UserError, match=r"belong to webdataset tars, and the data is ImageFolder; .* kind list"):
        open_embeddings(TarEmbeddingsConfig(), source)
