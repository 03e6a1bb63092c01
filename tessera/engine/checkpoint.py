"""Checkpoints: a folder of safetensors and JSON, written beside its final place, hashed, then renamed into it.

A folder named `step-000500` is therefore complete, or was damaged later, which its manifest shows. Nothing here is
pickled. Equal state gives equal bytes: no time, path or run name is inside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera.config import UserError
from tessera.engine.optim import named_state, restore_state
from tessera.engine.shard import cut_like, whole
from tessera.engine.state import TrainState
from tessera.files import digest, sync_folder, write_json, write_text

FORMAT = 1
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
_STEP = re.compile(r"step-(\d{6,})")


class NonFiniteWeights(Exception):
    """Weights that must not replace good ones on disk."""


def save_checkpoint(folder: Path, state: TrainState, facts: Mapping[str, Any], *, writes: bool = True) -> Path:
    """Writes `folder/step-N` and moves `latest` to it. Every rank calls it, because slices are gathered; one of them writes."""
    final = folder / step_name(state.step)
    files = gather(state, keep=writes)
    if not writes:
        return final
    refuse_nonfinite(files["model.safetensors"], state.step)
    if final.exists() and not faults(final):
        point(folder / "latest", final.name)
        return final
    temporary = folder / f".{final.name}.tmp-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        for name, tensors in files.items():
            write_tensors(temporary / name, tensors)
        write_json(temporary / "state.json", _numbers_of(state))
        sums = {name: {"bytes": (temporary / name).stat().st_size, "sha256": digest(temporary / name)} for name in FILES}
        write_json(
            temporary / "manifest.json", {"format": FORMAT, "step": state.step, "seed": state.seed, **facts, "files": sums}
        )
        sync_folder(temporary)
        if final.exists():
            _discard(final)  # damaged, or it would have been taken above
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)
    point(folder / "latest", final.name)
    return final


def tensors_of(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The three tensor files, by `net/parameter`."""
    model = {f"{net}/{name}": t for net, module in state.nets.items() for name, t in module.state_dict().items()}
    ema = {f"{net}/{name}": t for net, module in state.averages.items() for name, t in module.state_dict().items()}
    optimizer = {
        f"{net}/{name}": t for net, adam in state.optimizers.items() for name, t in named_state(state.parameters[net], adam)
    }
    return {"model.safetensors": model, "ema.safetensors": ema, "optimizer.safetensors": optimizer}


def gather(state: TrainState, *, keep: bool) -> dict[str, dict[str, Tensor]]:
    """`tensors_of` with slices put together, one tensor at a time, in the CPU's memory of the rank that keeps them."""
    found: dict[str, dict[str, Tensor]] = {}
    for file, tensors in tensors_of(state).items():
        found[file] = {}
        for name, tensor in tensors.items():
            value = whole(tensor.detach())
            if keep:
                found[file][name] = value.to("cpu", copy=True)  # a copy each: tied tensors are written once a name
    return found


def refuse_nonfinite(tensors: Mapping[str, Tensor], step: int) -> None:
    """Weights that are not finite must not replace good ones."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NonFiniteWeights(f"{name} holds non-finite numbers at step {step}; not saved")


def _numbers_of(state: TrainState) -> dict[str, Any]:
    names = ("step", "seed", "best", "best_step", "best_metric", "skips", "replaced")
    return {name: getattr(state, name) for name in names}


def restore(path: Path, state: TrainState) -> None:
    """Fills a freshly placed state from a checkpoint folder."""
    _fill(state.nets, read_tensors(path / "model.safetensors"), path)
    _fill(state.averages, read_tensors(path / "ema.safetensors"), path)
    moments = by_net(read_tensors(path / "optimizer.safetensors"))
    for net in state.nets:
        restore_state(state.parameters[net], state.optimizers[net], moments.get(net, {}))
    numbers = read_json(path / "state.json")
    state.step, state.seed, state.skips = numbers["step"], numbers["seed"], numbers["skips"]
    state.best, state.best_step = numbers["best"], numbers["best_step"]
    state.best_metric, state.replaced = numbers.get("best_metric"), numbers.get("replaced", 0)  # older checkpoints have neither


def _fill(nets: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], path: Path) -> None:
    parts = by_net(tensors)
    for name, net in nets.items():
        found = parts.get(name, {})
        if wrong := misfits(found, net):
            some, differ = ", ".join(sorted(wrong)[:4]), "tensor differs" if len(wrong) == 1 else "tensors differ"
            raise UserError(
                f"{path} does not fit net {name!r} of this config: {len(wrong)} {differ} ({some}); "
                f"leave what decides its shapes as it was trained: undo what --set changed (in Python: pass the same stages=)"
            )
        net.load_state_dict(cut_like(found, net))


def misfits(found: Mapping[str, Tensor], net: nn.Module) -> set[str]:
    """Names that only one side has, or whose shapes differ."""
    wanted = net.state_dict()
    return found.keys() ^ wanted.keys() | {
        name for name in found.keys() & wanted.keys() if found[name].shape != wanted[name].shape
    }


def read_weights(path: Path) -> dict[str, dict[str, Tensor]]:
    """net -> parameter -> tensor of a checkpoint: the averages where there are any, else the raw weights."""
    return {**by_net(read_tensors(path / "model.safetensors")), **by_net(read_tensors(path / "ema.safetensors"))}


def by_net(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`net/parameter` -> tensor, as net -> parameter -> tensor."""
    nets: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        net, _, name = full_name.partition("/")
        nets.setdefault(net, {})[name] = tensor
    return nets


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that its manifest confirms, and what was passed over on the way."""
    skipped: list[str] = []
    for path in list_checkpoints(folder)[::-1]:
        fault = faults(path)
        if fault is None:
            return path, skipped
        skipped.append(f"{path.name}: {fault}")
    return None, skipped


def faults(path: Path) -> str | None:
    """What is wrong with a checkpoint folder: None if sizes and hashes are those of its manifest."""
    try:
        manifest = read_json(path / "manifest.json")
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this program reads {FORMAT}"
        if step_name(manifest["step"]) != path.name:
            return f"its manifest is that of {step_name(manifest['step'])}"
        for name in FILES:
            wanted, file = manifest["files"][name], path / name
            if file.stat().st_size != wanted["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, expected {wanted['bytes']}"
            if digest(file) != wanted["sha256"]:
                return f"{name} is not what was written (sha256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        return f"manifest.json cannot be used ({type(error).__name__}: {error})"
    return None


def prune(folder: Path, keep: int, protected: set[str]) -> list[str]:
    """Deletes all but the newest `keep` checkpoints and the protected ones; called after a new one was published.

    Newer ones than the one just published are damaged, or they would have been resumed from: they neither count nor go.
    """
    names = [path.name for path in list_checkpoints(folder)]
    latest = read_pointer(folder / "latest")
    names = names[: names.index(latest) + 1] if latest in names else names
    spared = {*names[-keep:], *protected, *(name for name in (read_pointer(folder / "best"),) if name)}
    gone = [name for name in names if name not in spared]
    for name in gone:
        _discard(folder / name)
    return gone


def sweep(folder: Path) -> None:
    """Removes what an interrupted save or prune left behind."""
    for path in folder.glob(".*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def hashes_of(path: Path) -> set[str]:
    """Every hash by which a manifest may refer to a checkpoint: of its manifest, and of each of its files."""
    try:
        files = read_json(path / "manifest.json").get("files")
    except (OSError, UserError):  # a damaged one is nobody's
        return set()
    known = [entry.get("sha256") for entry in files.values() if isinstance(entry, dict)] if isinstance(files, dict) else []
    return {digest(path / "manifest.json"), *(value for value in known if isinstance(value, str))}


def weights_hash(path: Path) -> str:
    """The hash of the weights that use reads: of the averages, or of the trained weights where nothing is averaged."""
    files = read_json(path / "manifest.json")["files"]
    with safe_open(path / "ema.safetensors", framework="pt") as file:
        averaged = bool(list(file.keys()))
    return str(files["ema.safetensors" if averaged else "model.safetensors"]["sha256"])


def step_name(step: int) -> str:
    """The name of a step's folder and files."""
    return f"step-{step:06d}"


def point(pointer: Path, name: str) -> None:
    """Replaces a one-line text file atomically."""
    temporary = pointer.with_name(f".{pointer.name}.tmp-{os.getpid()}")
    write_text(temporary, name + "\n")
    os.replace(temporary, pointer)
    sync_folder(pointer.parent)


def point_back(folder: Path, name: str, best_step: int | None) -> None:
    """Sets the pointers as the resumed checkpoint's own save does: a kill may have come between that save and them."""
    point(folder / "latest", name)
    if best_step is not None and (folder / step_name(best_step)).is_dir():
        point(folder / "best", step_name(best_step))


def read_pointer(pointer: Path) -> str | None:
    """The folder that `latest` or `best` names, if it is there."""
    try:
        name = pointer.read_text(encoding="utf8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _STEP.fullmatch(name) and (pointer.parent / name).is_dir() else None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, flushed to the disk, as readable as its folder: the library itself would keep it to its owner."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # its only reason here: the disk
        raise OSError(f"{path.name}: {error}") from None
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file; anything else in its place is an error, never code."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def _discard(path: Path) -> None:
    """Out of sight by a rename first, so that a kill in the middle leaves no half checkpoint under a real name."""
    trash = path.with_name(f".{path.name}.tmp-gone-{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sizes(state: TrainState) -> Iterator[int]:
    """Bytes of every tensor that a checkpoint holds, the optimizer's two moments counted before they exist."""
    for net, module in state.nets.items():
        for tensor in module.state_dict().values():
            yield tensor.numel() * tensor.element_size() * (2 if net in state.averages else 1)
        for parameter in module.parameters():
            yield 2 * parameter.numel() * parameter.element_size() + 4
