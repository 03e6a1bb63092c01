"""What every synthetic set shares: combinations that are held out, and a folder that appears complete or not at all."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, TypeVar

from tessera.config.errors import UserError
from tessera.files import in_the_way
from tessera.randomness import Draws

SPLITS = ("train", "heldout")
Split = Literal["train", "heldout"]
Cell = TypeVar("Cell", bound=tuple[str, ...])
WriteSample = Callable[[Path, Split, int], str]  # sample i of a split to a path -> its caption
FEWEST_A_CORE = 250  # samples; for fewer it is not worth to start a process


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
    out: Path, n: int, about: Mapping[str, object], suffix: str, write_sample: WriteSample,
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
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}; name another --out") from None
    try:
        write_split = _write_beside if text_files else _write_split
        splits: tuple[tuple[Split, int], ...] = (("train", n), ("heldout", max(1, n // 8)))
        for split, num in splits:
            (partial / split).mkdir()
            write_split(partial / split, split, num, suffix, write_sample)
        for name, content in (more or {}).items():
            (partial / name).write_bytes(content)
        (partial / "synth.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()  # refuses when somebody has put a file there meanwhile
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_split(folder: Path, split: Split, n: int, suffix: str, write_sample: WriteSample) -> None:
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for index, caption in enumerate(_write_samples(folder, split, n, suffix, write_sample)):
            metadata.write(json.dumps({"file_name": f"{index:06d}{suffix}", "text": caption}) + "\n")


def _write_beside(folder: Path, split: Split, n: int, suffix: str, write_sample: WriteSample) -> None:
    for index, caption in enumerate(_write_samples(folder, split, n, suffix, write_sample)):
        (folder / f"{index:06d}.txt").write_text(caption + "\n", encoding="utf-8")


def _write_samples(folder: Path, split: Split, n: int, suffix: str, write_sample: WriteSample) -> list[str]:
    """Captions, in order. A sample is a function of its number, so cores share the work and change no byte of it."""

    starter = os.getpid()

    def part(first: int, step: int) -> list[str]:
        captions = []
        for index in range(first, n, step):
            if starter not in (os.getpid(), os.getppid()):
                break  # whoever asked was killed
            captions.append(write_sample(folder / f"{index:06d}{suffix}", split, index))
        return captions

    cores = min(os.cpu_count() or 1, n // FEWEST_A_CORE)
    if cores < 2 or sys.platform != "linux":  # elsewhere a process cannot take over what this one has
        return part(0, 1)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(cores)]
    workers = [
        context.Process(target=_send, args=(sender, part, first, cores), daemon=True) for first, (_, sender) in enumerate(pipes)
    ]
    try:
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()  # so that a worker that dies is an end of file here
        captions = [""] * n
        for first, (receiver, _) in enumerate(pipes):
            try:
                found = receiver.recv()
            except EOFError:
                raise UserError(
                    "a process that wrote samples was killed, perhaps for memory; nothing is left, try again"
                ) from None
            if isinstance(found, Exception):
                raise found
            captions[first::cores] = found
        return captions
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _send(sender: Connection, part: Callable[[int, int], list[str]], first: int, step: int) -> None:
    """In a worker; whoever asked ends it, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        sender.send(part(first, step))
    except UserError as error:
        sender.send(error)
    except Exception as error:  # which may not be one that can be sent
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))
