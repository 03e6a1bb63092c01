"""Checkpoints that were damaged later: found out, named, passed over, and never executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from toys import cut, differing, fit, gan, placed, points, setting, snapshot

from tessera.config import UserError
from tessera.engine.checkpoint import (
    FILES,
    faults,
    list_checkpoints,
    newest_valid,
    read_json,
    read_tensors,
    restore,
    save_checkpoint,
)
from tessera.engine.step import train_step
from tessera.files import digest

EVERY = (*FILES, "manifest.json")


@pytest.fixture(scope="module")
def _two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4."""
    home = tmp_path_factory.mktemp("checkpoints")
    stage = gan()
    state = placed(stage)
    for number in range(4):
        train_step(state, stage, cut(points(number * 8, 8), 2), setting())
        if state.step % 2 == 0:
            save_checkpoint(home, state, {"stage": "toy"})
    return home


@pytest.fixture
def home(_two: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(_two, tmp_path / "checkpoints"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0b100
    path.write_bytes(raw)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def remove(path: Path) -> None:
    path.unlink()


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path], None]] = [truncate, empty, flip, grow, remove, become_a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_older_one_taken(home: Path, name: str, damage: Callable[[Path], None]) -> None:
    assert newest_valid(home) == (home / "step-000004", [])
    damage(home / "step-000004" / name)
    path, skipped = newest_valid(home)
    assert path == home / "step-000002"
    assert len(skipped) == 1
    assert skipped[0].startswith(f"step-000004: {name} ")


@pytest.mark.parametrize("damage", [empty, grow, remove, become_a_folder])
def test_a_manifest_that_cannot_be_read_is_damage(home: Path, damage: Callable[[Path], None]) -> None:
    damage(home / "step-000004" / "manifest.json")
    path, (line,) = newest_valid(home)
    assert path == home / "step-000002"
    assert "manifest.json" in line


def test_every_flipped_bit_of_the_hashes_is_found(home: Path) -> None:
    """A flip may leave valid JSON: then sizes, hashes or the step disagree, or it changed a fact that restoring does not use."""
    file = home / "step-000004" / "manifest.json"
    raw = file.read_bytes()
    start, end = raw.index(b'"files"'), raw.index(b'"format"')
    for place in range(start, end):
        if chr(raw[place]).isalnum():
            file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            assert faults(file.parent) is not None, (place, raw[place - 10 : place + 10])


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", "3", '"text"', "{}", "{", "\ufeff{}", '{"format": 1}', '{"format": 1, "step": 4}', "[" * 100_000,
        '{"format": 1, "step": 4, "files": []}', '{"format": 1, "step": 4, "files": {"model.safetensors": 3}}',
        '{"format": 1, "step": "x", "files": {}}', '{"format": 1, "step": {}, "files": {}}', '{"format": {}}',
        f'{{"format": {10**4000}}}', f'{{"format": 1{"0" * 5000}}}', '{"format": NaN}', '{"format": 2}', '{"format": null}',
    ],
)  # fmt: skip
def test_a_manifest_of_another_kind_is_damage(home: Path, text: str) -> None:
    (home / "step-000004" / "manifest.json").write_text(text, encoding="utf8")
    path, skipped = newest_valid(home)
    assert path == home / "step-000002"
    assert skipped[0].startswith("step-000004: ")
    if '"format": 2' in text:
        assert skipped == ["step-000004: format 2, this program reads 1"]


def test_all_damaged_gives_nothing_and_says_all(home: Path) -> None:
    flip(home / "step-000002" / "state.json")
    empty(home / "step-000004" / "ema.safetensors")
    path, skipped = newest_valid(home)
    assert path is None
    assert [line.split(":")[0] for line in skipped] == ["step-000004", "step-000002"]


def test_strange_neighbours_do_not_count(home: Path) -> None:
    (home / "step-000099").write_text("a file")
    (home / "step-12").mkdir()
    (home / "step-000100x").mkdir()
    (home / ".step-000101.tmp-7").mkdir()
    (home / "step-000102").mkdir()
    path, skipped = newest_valid(home)
    assert path == home / "step-000004"
    assert [line.split(":")[0] for line in skipped] == ["step-000102", "step-000099"]
    assert newest_valid(home / "nowhere") == (None, [])


def test_a_copied_folder_is_not_another_step(home: Path) -> None:
    """Taken for step 9, it would be kept as step 9 when training gets there."""
    shutil.copytree(home / "step-000004", home / "step-000009")
    assert newest_valid(home) == (home / "step-000004", ["step-000009: its manifest is that of step-000004"])


def test_a_save_replaces_a_damaged_one_of_its_step(home: Path, tmp_path: Path) -> None:
    flip(home / "step-000004" / "model.safetensors")
    stage = gan()
    state = placed(stage)
    path, _ = newest_valid(home)
    assert path is not None
    restore(path, state)
    fit(tmp_path, stage, state, steps=4, save_every_steps=2, keep_checkpoints=1, pinned=frozenset({path.name})).run()
    assert newest_valid(home) == (home / "step-000004", [])
    assert [path.name for path in list_checkpoints(home)] == ["step-000002", "step-000004"]


# ---- hostile files


class Bomb:
    """Would leave a mark when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_a_file_is_an_error_and_never_code(home: Path, tmp_path: Path, name: str, protocol: int) -> None:
    mark, path = tmp_path / "executed", home / "step-000004"
    (path / name).write_bytes(pickle.dumps(Bomb(mark), protocol=protocol))
    kind = "JSON" if name.endswith(".json") else "safetensors"
    with pytest.raises(UserError, match=rf"{name} cannot be read as {kind}"):
        restore(path, placed(gan()))
    assert newest_valid(home)[0] == home / "step-000002"
    # even where the manifest was made to fit
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": digest(path / name)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert faults(path) is None
    with pytest.raises(UserError, match=rf"{name} cannot be read as {kind}"):
        restore(path, placed(gan()))
    assert not mark.exists()


def test_a_pickle_in_the_place_of_the_manifest(home: Path, tmp_path: Path) -> None:
    mark, file = tmp_path / "executed", home / "step-000004" / "manifest.json"
    file.write_bytes(pickle.dumps(Bomb(mark)))
    assert newest_valid(home)[0] == home / "step-000002"
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_json(file)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb is live"


def test_foreign_tensors_are_refused_in_words(home: Path) -> None:
    path = home / "step-000004"
    tensors = read_tensors(path / "model.safetensors")
    save_file({name.replace("/", ":"): tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    with pytest.raises(UserError, match="does not fit net 'maker'"):
        restore(path, placed(gan()))


def test_reading_a_checkpoint_changes_nothing(home: Path) -> None:
    before = {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    state = placed(gan())
    restore(home / "step-000002", state)
    first = snapshot(state)
    restore(home / "step-000004", state)
    assert differing(first, snapshot(state))
    restore(home / "step-000002", state)
    assert differing(first, snapshot(state)) == []
    assert before == {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}
