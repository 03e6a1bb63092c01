"""metrics.jsonl, TensorBoard, log.txt and the live line."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import termios
from io import StringIO
from pathlib import Path

import pytest

from tessera.engine.track import Journal, Metrics, cut_back, read_metrics

# ---- metrics


def write_lines(path: Path, *steps: int) -> None:
    path.write_text("".join(f'{{"step": {step}, "kind": "train", "loss": 0.5}}\n' for step in steps))


@pytest.mark.parametrize(
    "tail",
    [b"", b"{", b'{"step": 2, "kind": "tr', b'{"step": 2}', b"\xff\xfe\x00", b"\0" * 100, b'{"step": 2, "kind": "train"}\n{"ste'],
)
def test_cut_back_drops_an_unfinished_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, 1, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    cut_back(path, 2)
    assert path.read_bytes().startswith(whole)
    assert [line["step"] for line in read_metrics(path)] == [1, 1, 2] + [2] * tail.count(b"}\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_cut_back_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, kept in ((0, []), (2, [1, 2, 2]), (3, [1, 2, 2, 3]), (99, [1, 2, 2, 3, 5])):
        write_lines(path, 1, 2, 2, 3, 5)
        cut_back(path, step)
        assert [line["step"] for line in read_metrics(path)] == kept
    cut_back(tmp_path / "nowhere.jsonl", 3)
    assert not (tmp_path / "nowhere.jsonl").exists()


@pytest.mark.parametrize("line", ["[1]", "3", "null", "{}", '{"step": null}', '{"step": "2"}', "text", ""])
def test_cut_back_drops_lines_that_are_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    cut_back(path, 5)
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2]


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, (), 0)
    metrics.write(1, "train", {"loss": 0.1, "bad": float("nan"), "big": float("inf"), "small": float("-inf"), "count": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # flushed before it is closed: a kill loses nothing
    metrics.write(2, "valid", {"loss": 1e-300})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "kind": "train", "loss": 0.1, "bad": None, "big": None, "small": None, "count": 3}
    ]
    again = Metrics(tmp_path, (), 1)
    again.write(2, "train", {"loss": 0.2})
    again.close()
    assert [(line["step"], line["kind"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [(1, "train"), (2, "train")]


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, ("tensorboard",), 0)
    for step in (1, 2, 3):
        metrics.write(step, "train", {"loss": step / 4, "bad": float("nan")})
    metrics.close()
    resumed = Metrics(tmp_path, ("tensorboard",), 2)  # cut back to step 2: step 3 is written anew
    resumed.write(3, "train", {"loss": 0.125})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.25), (2, 0.5), (3, 0.125)]


def test_tensorboard_is_not_started_unasked(tmp_path: Path) -> None:
    Metrics(tmp_path, (), 0).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---- journal


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = StringIO()
    journal = Journal(tmp_path / "log.txt", stream=stream)
    journal.progress("step 1")
    journal.say("hello")
    journal.progress("step 2" + "." * 300)
    journal.note("only in the log")
    assert stream.getvalue() == "step 1\nhello\nstep 2" + "." * 300 + "\n"
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in log] == ["hello", "only in the log"]
    assert all(line[:4].isdigit() for line in log)


def seen_on_a_terminal(columns: int, *calls: tuple[str, str]) -> str:
    """What a journal sends to a terminal of some width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(follower, "w") as stream:
        journal = Journal(None, stream=stream)
        for method, text in calls:
            getattr(journal, method)(text)
        seen = b""
        while select.select([leader], [], [], 0.2)[0]:
            seen += os.read(leader, 10_000)
    os.close(leader)
    return seen.decode().replace("\r\n", "\n")


def test_one_live_line_on_a_terminal() -> None:
    long = "x" * 200
    seen = seen_on_a_terminal(
        40, ("progress", "step 1"), ("progress", long), ("say", "saved"), ("say", "again"), ("progress", "3")
    )
    assert seen == f"\r\x1b[Kstep 1\r\x1b[K{'x' * 39}\r\x1b[Ksaved\nagain\n\r\x1b[K3"


def test_a_terminal_that_does_not_know_its_width_shows_the_line() -> None:
    """A pseudo-terminal in a container often has 0 columns."""
    line = "tokenizer 100/2000  tokenizer 0.1234  lr 3.0e-04  99 items/s"
    assert seen_on_a_terminal(0, ("progress", line)) == f"\r\x1b[K{line}"


def test_other_ranks_are_silent(tmp_path: Path) -> None:
    stream = StringIO()
    journal = Journal(tmp_path / "log.txt", speaks=False, stream=stream)
    for call in (journal.say, journal.note, journal.progress):
        call("hello")
    assert stream.getvalue() == ""
    assert not (tmp_path / "log.txt").exists()


def test_a_reader_that_left_does_not_stop_the_run(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    journal = Journal(tmp_path / "log.txt", stream=stream)
    journal.say("first")
    journal.progress("second")
    journal.say("third")
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "third"]
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # or closing would complain about what it still holds
    stream.close()
