"""What every synthetic set shares: combinations that are held out, and a folder that appears complete or not at all."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from tessera.config.errors import UserError
from tessera.files import in_the_way
from tessera.randomness import Draws

SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]
Cell = TypeVar("Cell", bound=tuple[str, ...])


def hold_out(groups: Sequence[tuple[Cell, ...]], num_cells: int, draws: Draws) -> frozenset[Cell]:
    """About one cell in eight, spread as a Latin square spreads them; cells of a group are held out together.

    A line is the cells that differ in one word only. No line loses more than a quarter of its cells (of two or three: one),
    so every smaller combination, above all every pair of words, still occurs in training.
    """
    axes = range(len(groups[0][0]))
    words = [{cell[axis] for group in groups for cell in group} for axis in axes]
    most = [-(-len(values) // 4) for values in words]
    held: set[Cell] = set()
    lost: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for group in draws.shuffled(groups):
        fresh = set(group) - held
        lines = Counter((axis, cell[:axis] + cell[axis + 1 :]) for cell in fresh for axis in axes)
        if all(lost[line] + count <= most[line[0]] for line, count in lines.items()):
            held |= fresh
            lost += lines
        if len(held) >= max(1, num_cells // 8):
            break
    assert held, "no combination could be held out"
    assert all(count < len(words[axis]) for (axis, _), count in lost.items()), "a line is held out as a whole"
    return frozenset(held)


def write_set(
    out: Path, n: int, about: Mapping[str, object], suffix: str, write_sample: Callable[[Path, Split, int], str],
    more: Mapping[str, bytes] | None = None, text_files: bool = False,
) -> None:  # fmt: skip
    """Writes train/ (n samples), heldout/ (an eighth as many) and synth.json, which says what it is `about`.

    `write_sample` writes sample i of a split to the path it is given, and returns its caption; captions go to metadata.jsonl, or
    with `text_files` to a .txt beside each sample. `more`: files beside synth.json. The folder appears complete or not at all:
    it is made under another name beside `out`, and renamed.
    """
    if n < 1:
        raise UserError(f"n is {n}; expected the number of training samples, 1 or more")
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; nothing is overwritten, name a new folder")
    if blocked := in_the_way(out):
        raise UserError(f"{blocked}; name another --out, a new folder")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write_split = _write_beside if text_files else _write_split
        write_split(partial / "train", "train", n, suffix, write_sample)
        write_split(partial / "heldout", "heldout", max(1, n // 8), suffix, write_sample)
        for name, content in (more or {}).items():
            (partial / name).write_bytes(content)
        (partial / "synth.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()  # refuses when somebody has put a file there meanwhile
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_split(folder: Path, split: Split, n: int, suffix: str, write_sample: Callable[[Path, Split, int], str]) -> None:
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for index in range(n):
            name = f"{index:06d}{suffix}"
            metadata.write(json.dumps({"file_name": name, "text": write_sample(folder / name, split, index)}) + "\n")


def _write_beside(folder: Path, split: Split, n: int, suffix: str, write_sample: Callable[[Path, Split, int], str]) -> None:
    folder.mkdir()
    for index in range(n):
        path = folder / f"{index:06d}{suffix}"
        path.with_suffix(".txt").write_text(write_sample(path, split, index) + "\n", encoding="utf-8")
