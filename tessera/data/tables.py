"""Metadata tables in, rows out: metadata.jsonl, metadata.csv or metadata.parquet, each with `file_name` and a caption column."""

from __future__ import annotations

import csv
import json
import posixpath
import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.config import UserError
from tessera.data.kinds import Kind

CAPTION_COLUMNS = ("text", "caption", "prompt")  # the first one that is filled wins
METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of metadata: where it stands, its captions, and all its columns."""

    where: str
    captions: tuple[str, ...]
    columns: Mapping[str, Any]


def table_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Each row's number with its columns; a ValueError in their place when they cannot be read."""
    read = {".jsonl": jsonl_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}[path.suffix.lower()]
    try:
        yield from read(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; repair it, or remove it") from None


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Empty lines are left out, but counted."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, json.loads(text)
            except UnicodeDecodeError:
                yield number, ValueError("not UTF-8")
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON: {error}; expected one object a line")


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered by the last line of each row."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        try:
            names = next(reader, [])
            _require_file_name(path, names)
            for values in reader:
                if len(values) == len(names):
                    yield reader.line_num, dict(zip(names, values, strict=True))
                elif values:  # otherwise an empty line
                    wrong = f"{len(values)} fields under a header of {len(names)}; a text with commas in it needs quotes"
                    yield reader.line_num, ValueError(wrong)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num} is not CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Pictures or vectors inside the table are left there: only columns of text, numbers and lists of text are loaded."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path} needs pyarrow, which is not installed: pip install 'tessera-gen[data]'; "
            "or write the table as metadata.jsonl or metadata.csv"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            kinds = pyarrow.types
            names = [
                field.name for field in table.schema_arrow if not (kinds.is_nested(field.type) or kinds.is_binary(field.type))
            ]
            names += [field.name for field in table.schema_arrow if field.name in CAPTION_COLUMNS and field.name not in names]
            _require_file_name(path, names)
            number = 0
            for batch in table.iter_batches(columns=names):
                for columns in batch.to_pylist():
                    number += 1
                    yield number, columns
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{path} is not a Parquet table that can be read: {' '.join(str(error).split())[:200]}") from None


def _require_file_name(path: Path, names: Sequence[str]) -> None:
    if "file_name" not in names:
        separated = ", separated by commas," if path.suffix.lower() == ".csv" else ""
        raise UserError(
            f"{path} has the columns {', '.join(names) or '(none)'}; expected{separated} "
            f"file_name and one of {', '.join(CAPTION_COLUMNS)}"
        )


def sample_of(columns: Any, folder: str, by_name: Mapping[str, str], kind: Kind, sketches: Container[str] = ()) -> str:
    """The sample that a row names, `by_name` and `sketches` being NFC paths; ValueError says what is wrong with the row."""
    if isinstance(columns, ValueError):
        raise columns
    if not isinstance(columns, dict):
        raise ValueError(
            f"a JSON {type(columns).__name__}; expected an object with file_name and one of {', '.join(CAPTION_COLUMNS)}"
        )
    name = columns.get("file_name")
    if name is None:
        raise ValueError(f"file_name is missing; expected the path of {kind.an}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"file_name is {name!r:.60}; expected the path of {kind.an}")
    path = unicodedata.normalize("NFC", posixpath.normpath(posixpath.join(folder, name.replace("\\", "/"))))
    if path.startswith(("/", "../")):
        raise ValueError(f"{name} lies outside the folder; expected a path relative to the metadata file")
    if path in sketches:
        raise ValueError(f"{name} is a sketch of {kind.an}, not a sample; leave the row out")
    if path not in by_name:
        raise ValueError(f"{name}: no such file" if path.lower().endswith(kind.suffixes) else f"{name}: not {kind.an} file")
    return by_name[path]


def filled_captions(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The captions in the first caption column that holds any: a string, or a list of strings, each a caption of its own."""
    for column in CAPTION_COLUMNS:
        if captions := clean_captions(columns.get(column), column):
            return captions
    return ()


def clean_captions(value: Any, where: str) -> tuple[str, ...]:
    """Stripped, without empty and repeated ones; ValueError says what is wrong."""
    texts = value if isinstance(value, list) else [] if value is None else [value]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{where} is {value!r:.60}; expected a string, or a list of strings")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} holds half of a surrogate pair, which is not Unicode text") from None
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))
