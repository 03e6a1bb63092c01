"""Checkpoints: what goes in comes out, equal state gives equal bytes, and a save that fails leaves everything as it was."""

from __future__ import annotations

import errno
import json
import os
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import Maker, cut, differing, gan, placed, points, setting, snapshot

from tessera.config import UserError
from tessera.engine import checkpoint
from tessera.engine.checkpoint import (
    FILES,
    faults,
    list_checkpoints,
    newest_valid,
    point,
    prune,
    read_pointer,
    read_tensors,
    read_weights,
    restore,
    save_checkpoint,
    sizes,
    step_name,
    sweep,
)
from tessera.engine.state import TrainState
from tessera.engine.step import train_step

FACTS = {"stage": "toy", "config": {"lr": 0.1, "name": "päinting"}}


def trained(steps: int = 3, seed: int = 5) -> TrainState:
    """A state in which every tensor has moved."""
    stage = gan()
    state = placed(stage, seed=seed)
    for number in range(steps):
        train_step(state, stage, cut(points(number * 8, 8), 2), setting())
    state.best, state.best_step, state.skips = 0.125, 2, 1
    return state


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- round trip


def test_everything_comes_back(tmp_path: Path) -> None:
    state = trained()
    path = save_checkpoint(tmp_path, state, FACTS)
    assert (path.name, listed(path)) == ("step-000003", sorted([*FILES, "manifest.json"]))
    assert (tmp_path / "latest").read_text() == "step-000003\n"
    other = placed(gan(), seed=99)
    assert differing(snapshot(state), snapshot(other))
    restore(path, other)
    assert differing(snapshot(state), snapshot(other)) == []
    numbers = ("step", "seed", "best", "best_step", "skips")
    assert [getattr(other, name) for name in numbers] == [getattr(state, name) for name in numbers] == [3, 5, 0.125, 2, 1]
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf8"))
    assert {"format": 1, "step": 3, "seed": 5, **FACTS}.items() <= manifest.items()


def test_a_state_that_never_trained_comes_back(tmp_path: Path) -> None:
    state = placed(gan(averaged=()))
    path = save_checkpoint(tmp_path, state, {})
    assert faults(path) is None
    assert read_tensors(path / "optimizer.safetensors") == read_tensors(path / "ema.safetensors") == {}
    other = trained()
    other.averages.clear()
    restore(path, other)
    assert not other.optimizers["maker"].state, "old moments are gone"
    assert differing(snapshot(state), snapshot(other)) == []


def test_equal_state_gives_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save_checkpoint(tmp_path / "a", trained(), FACTS)
    monkeypatch.setattr(os, "getpid", lambda: 4242)
    monkeypatch.chdir(tmp_path)
    state = trained()
    state.nets = dict(reversed(state.nets.items()))
    second = save_checkpoint(tmp_path / "another" / "place", state, dict(reversed(FACTS.items())))
    assert contents(first) == contents(second)
    third = save_checkpoint(tmp_path / "c", trained(seed=6), FACTS)
    assert contents(first)["state.json"] != contents(third)["state.json"]


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    """safetensors start with the length of a JSON header, and every other file is JSON."""
    path = save_checkpoint(tmp_path, trained(), FACTS)
    for name in listed(path):
        raw = (path / name).read_bytes()
        if name.endswith(".safetensors"):
            (length,) = struct.unpack("<Q", raw[:8])
            header = json.loads(raw[8 : 8 + length])
            assert all({"dtype", "shape", "data_offsets"} == set(entry) for entry in header.values())
        else:
            assert isinstance(json.loads(raw), dict)
        with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the reader says
            list(pickletools.genops(raw))


def test_weights_to_use_are_the_averages_where_there_are_any(tmp_path: Path) -> None:
    state = trained()
    weights = read_weights(save_checkpoint(tmp_path, state, {}))
    assert set(weights) == {"maker", "judge"}
    assert all(torch.equal(value, weights["maker"][name]) for name, value in state.averages["maker"].state_dict().items())
    assert all(torch.equal(value, weights["judge"][name]) for name, value in state.nets["judge"].state_dict().items())
    assert not torch.equal(weights["maker"]["first.weight"], state.nets["maker"].state_dict()["first.weight"])


class Tied(nn.Module):
    """Two names for one tensor, a transposed one, half precision, integers and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("low", torch.randn(4).bfloat16())
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("empty", torch.zeros(0, 2))


def test_awkward_tensors_come_back(tmp_path: Path) -> None:
    kept, other = Tied(), Tied()
    states = [
        TrainState(0, 5, {"tied": net}, {}, {"tied": torch.optim.AdamW(net.parameters(), fused=True)}) for net in (kept, other)
    ]
    restore(save_checkpoint(tmp_path, states[0], {}), states[1])
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in kept.state_dict().items())
    assert other.two.weight is other.one.weight


def test_size_estimate_is_close(tmp_path: Path) -> None:
    state = trained()
    path = save_checkpoint(tmp_path, state, {})
    payload = sum(
        tensor.numel() * tensor.element_size() for file in path.glob("*.safetensors") for tensor in read_tensors(file).values()
    )
    assert sum(sizes(state)) == payload


def test_another_model_is_refused_with_names(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), {})
    wider, renamed = Maker(), Maker()
    wider.first = nn.Linear(5, 8)
    renamed.other = renamed.last
    for maker, told in ((wider, r"1 tensor differs \(first.weight"), (renamed, r"2 tensors differ \(.*other.bias")):
        with pytest.raises(UserError, match=rf"does not fit net 'maker' of this config: {told}"):
            restore(path, placed(gan(nets={"maker": maker, "judge": gan().nets["judge"]})))


# ---- saves that fail


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def late(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Works a number of times, then the disk is full."""
    count = iter(range(10**6))

    def wrapped(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if next(count) < calls else full()

    return wrapped


# A save calls os.fsync for 3 tensor files, 2 JSON files, the temporary folder; then for the parent, the pointer, its folder.
@pytest.mark.parametrize(
    ("place", "name", "calls"),
    [("os", "rename", 0), ("os", "fsync", 0), ("os", "fsync", 2), ("os", "fsync", 3), ("os", "fsync", 4), ("os", "fsync", 5),
     ("checkpoint", "save_file", 0), ("checkpoint", "save_file", 2), ("checkpoint", "write_json", 1),
     ("checkpoint", "digest", 3)],
)  # fmt: skip
def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, calls: int
) -> None:
    state = trained()
    save_checkpoint(tmp_path, state, {})
    before = contents(tmp_path)
    state.step = 4
    module = {"os": os, "checkpoint": checkpoint}[place]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, late(getattr(module, name), calls))
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, state, {})
    assert contents(tmp_path) == before
    assert listed(tmp_path) == ["latest", "step-000003"]
    assert save_checkpoint(tmp_path, state, {}).name == "step-000004"


@pytest.mark.parametrize("calls", [6, 7, 8])
def test_a_failure_after_publishing_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    state = trained()
    save_checkpoint(tmp_path, state, {})
    state.step = 4
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", late(os.fsync, calls))
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, state, {})
    assert newest_valid(tmp_path) == (tmp_path / "step-000004", [])
    assert read_pointer(tmp_path / "latest") in ("step-000003", "step-000004")
    sweep(tmp_path)
    assert listed(tmp_path) == ["latest", "step-000003", "step-000004"]


def test_a_kill_in_a_save_leaves_only_what_sweep_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    state = trained()
    save_checkpoint(tmp_path, state, {})
    state.step = 4
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", kill)
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, state, {})
    assert len(listed(tmp_path)) == 3
    assert newest_valid(tmp_path) == (tmp_path / "step-000003", [])
    (tmp_path / ".latest.tmp-1").write_text("half")
    (tmp_path / ".step-000001.tmp-gone-1").mkdir()
    (tmp_path / "notes.tmp-1").write_text("the user's own")
    sweep(tmp_path)
    assert listed(tmp_path) == ["latest", "notes.tmp-1", "step-000003"]


def test_saving_the_same_step_again(tmp_path: Path) -> None:
    state = trained()
    path = save_checkpoint(tmp_path, state, {})
    before = contents(tmp_path)
    inode = (path / "model.safetensors").stat().st_ino
    point(tmp_path / "latest", "step-000001")
    save_checkpoint(tmp_path, state, {})
    assert contents(tmp_path) == before
    assert (path / "model.safetensors").stat().st_ino == inode, "an intact one is left alone"
    (path / "model.safetensors").write_bytes(b"damaged")
    save_checkpoint(tmp_path, state, {})
    assert contents(tmp_path) == before
    assert faults(path) is None


# ---- retention and pointers


def folders(home: Path, *steps: int) -> None:
    for step in steps:
        (home / step_name(step)).mkdir(parents=True)
    point(home / "latest", step_name(steps[-1]))


def test_prune_keeps_the_newest_the_best_and_the_pinned(tmp_path: Path) -> None:
    folders(tmp_path, 1, 2, 3, 4, 5, 6)
    (tmp_path / "notes").mkdir()
    point(tmp_path / "best", "step-000002")
    gone = prune(tmp_path, 2, {"step-000004", "step-000099"})
    assert gone == ["step-000001", "step-000003"]
    assert listed(tmp_path) == ["best", "latest", "notes", *(step_name(step) for step in (2, 4, 5, 6))]
    assert prune(tmp_path, 2, {"step-000004"}) == []


def test_prune_never_takes_what_was_just_published(tmp_path: Path) -> None:
    """After a fall back to step 4 the damaged, newer 8 and 9 must not count as the newest."""
    folders(tmp_path, 3, 4, 8, 9, 5)
    assert prune(tmp_path, 1, {"step-000004"}) == ["step-000003"]
    assert [path.name for path in list_checkpoints(tmp_path)] == [step_name(step) for step in (4, 5, 8, 9)]


def test_prune_orders_by_number_not_by_name(tmp_path: Path) -> None:
    folders(tmp_path, 999_998, 999_999, 1_000_000, 1_000_001)
    assert prune(tmp_path, 2, set()) == ["step-999998", "step-999999"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe",
        b"step-000001\nstep-000002",
        b"../step-000001",
        b"step-1",
        b"step-000009",
        b"/etc",
        b"\0",
        b"step-000001x",
    ],
)
def test_a_pointer_with_garbage_points_nowhere(tmp_path: Path, content: bytes) -> None:
    folders(tmp_path, 1)
    (tmp_path / "best").write_bytes(content)
    assert read_pointer(tmp_path / "best") is None
    assert prune(tmp_path, 1, set()) == []


def test_pointers_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders(tmp_path, 1, 2)
    point(tmp_path / "best", "step-000001")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            point(tmp_path / "best", "step-000002")
    assert read_pointer(tmp_path / "best") == "step-000001"
    point(tmp_path / "best", "step-000002")
    assert read_pointer(tmp_path / "best") == "step-000002"
    assert read_pointer(tmp_path / "nowhere") is None
    (tmp_path / "folder").mkdir()
    assert read_pointer(tmp_path / "folder") is None
