"""The generated reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from tessera.config import Config, document
from tessera.config.base import read_annotation
from tessera.config.document import in_words


class Small(Config):
    """A small one."""

    kind: Literal["small"] = "small"
    """Chooses this."""
    width: int = Field(8, ge=8)
    """Channels | wide,
    over two lines."""


class Large(Config):
    kind: Literal["large"] = "large"
    path: Path
    """A required one."""


Model = Annotated[Small | Large, Field(discriminator="kind")]


class Optim(Config):
    lr: float = 3e-4
    """Peak."""


class Root(Config):
    """The root."""

    seed: int = 0
    """The seed."""
    optim: Optim = Optim()
    """First."""
    other: Optim | None = None
    slow: Optim = Field(default_factory=lambda: Optim(lr=1e-5))
    model: Model = Small(width=16)
    models: tuple[Model, ...] = ()
    named: dict[str, Small] = Field(default_factory=dict)


TEXT = document(Root)


@pytest.mark.parametrize(
    "line",
    [
        "## Top level",
        "The root.",
        "| `seed` | a whole number | `0` | The seed. |",
        "| `optim` | a section of keys | its defaults | First. |",
        "| `other` | a section of keys or null | `null` |  |",
        "| `slow` | a section of keys | `{lr: 1.0e-5}` |  |",
        "| `model` | a section with kind 'small' or 'large' | `{kind: small, width: 16}` |  |",
        "| `models` | a list of sections with kind 'small' or 'large' | `[]` |  |",
        "| `named` | a mapping from names to sections | `{}` |  |",
        "## `optim`",
        "| `lr` | a number | `3.0e-4` | Peak. |",
        "## `other`",
        "The keys of [`optim`](#optim).",
        "## `model` (kind: small)",
        "A small one.",
        "| `width` | a whole number >= 8 | `8` | Channels \\| wide, over two lines. |",
        "## `model` (kind: large)",
        "| `path` | a path | required | A required one. |",
        "## `models.0` (kind: small)",
        "The keys of [`model` (kind: small)](#model-kind-small).",
        "## `named.NAME`",
    ],
)
def test_the_reference_holds(line: str) -> None:
    assert line in TEXT.splitlines()


def test_every_table_row_has_four_cells() -> None:
    rows = [line.replace("\\|", "") for line in TEXT.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}


def test_a_section_without_docstring_shows_none() -> None:
    assert "tagged union" not in TEXT
    assert "keyword-only" not in TEXT


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (str | None, "text or null"),
        (int | Literal["auto"] | None, "a whole number, 'auto' or null"),
        (Literal["a", "b", 3, True], "'a', 'b', 3 or true"),
        (PositiveInt, "a whole number > 0"),
        (Annotated[float, Field(ge=0, lt=1)] | None, "a number >= 0 and < 1 or null"),
        (tuple[int, ...], "a list of whole numbers"),
        (tuple[PositiveInt, ...], "a list of whole numbers, each > 0"),
        (tuple[int, int, int], "a list of 3 whole numbers"),
        (tuple[int, str], "a list of a whole number and text"),
        (tuple[tuple[float, float], ...], "a list of lists of 2 numbers"),
        (Annotated[tuple[int, ...], Field(min_length=1)], "a list of whole numbers with at least 1 items"),
        (Annotated[str, Field(max_length=3)], "text with at most 3 characters"),
        (dict[str, Path], "a mapping from names to paths"),
        (list[Literal["a", "b"]], "a list of 'a' or 'b'"),
        (Any, "any value"),
        (bytes, "a value of type bytes"),
        (tuple, "a list"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert in_words(read_annotation(annotation)) == words
