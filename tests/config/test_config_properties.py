"""Properties: whatever is read, nothing but a config or a UserError comes out; what is written reads back equal."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tessera.config import (
    Config,
    Layer,
    UserError,
    build,
    difference,
    document,
    dump_yaml,
    layer_of,
    nearest,
    parse_sets,
    read_yaml,
)


class Fsq(Config):
    kind: Literal["fsq"] = "fsq"
    levels: tuple[int, ...] = (8, 8)


class Vq(Config):
    kind: Literal["vq"] = "vq"
    codes: int = 512
    kept: float | None = None


Quantizer = Annotated[Fsq | Vq, Field(discriminator="kind")]


class Root(Config):
    seed: int = 0
    lr: float = 3e-4
    note: str | None = None
    flag: bool = False
    path: Path = Path("photos")
    precision: Literal["fp32", "bf16"] = "fp32"
    size: int | Literal["auto"] = "auto"
    quantizer: Quantizer = Vq()
    blocks: tuple[Quantizer, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    pairs: tuple[tuple[int, str], ...] = ()


def names() -> st.SearchStrategy[str]:
    own = [*Root.model_fields, "kind", "levels", "codes", "kept", "fsq", "vq", "0", "learning_rate", "a.b", "<<"]
    return st.sampled_from(own) | st.text(max_size=5)


def leaves() -> st.SearchStrategy[object]:
    words = st.sampled_from(["fsq", "vq", "fp32", "auto", "3e-4", "null", "no", "16:9", ""])
    return st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=8)


def values() -> st.SearchStrategy[object]:
    return st.recursive(
        leaves(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names(), inner, max_size=4), max_leaves=8
    )


def mappings() -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(names(), values(), max_size=5)


def finite() -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False)


def configs() -> st.SearchStrategy[Root]:
    quantizers = st.builds(Fsq, levels=st.lists(st.integers(), max_size=3).map(tuple)) | st.builds(
        Vq, codes=st.integers(), kept=st.none() | finite()
    )
    return st.builds(
        Root,
        seed=st.integers(),
        lr=finite(),
        note=st.none() | st.text(),
        path=st.text(st.characters(exclude_characters="\0"), min_size=1).map(Path),
        size=st.integers() | st.just("auto"),
        quantizer=quantizers,
        blocks=st.lists(quantizers, max_size=2).map(tuple),
        weights=st.dictionaries(st.text(), finite(), max_size=3),
        pairs=st.lists(st.tuples(st.integers(), st.text()), max_size=2).map(tuple),
    )


def read(text: str | bytes) -> Layer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return read_yaml(path)


def outcome(*layers: Layer) -> Root | None:
    """The config, or None for a UserError; any other exception fails the test."""
    try:
        return build(Root, layers)
    except UserError:
        return None


@settings(max_examples=80, deadline=None)
@given(mappings(), mappings())
def test_any_mappings(first: dict[str, Any], second: dict[str, Any]) -> None:
    preset = layer_of(Root(), "preset")
    config = outcome(preset, Layer.of(first, "first"), Layer.of(second, "second"))
    if config is not None:
        assert outcome(layer_of(config, "again")) == config


YAML_PIECES = [
    *(
        "\n",
        "  ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&a ",
        "*a",
        "!!int ",
        "!x ",
        "'",
        '"',
        "|",
        ">",
        "#",
        "? ",
        "<<",
        "%",
        "---",
    ),
    *("\t", "3e-4", "null", "seed", "quantizer", "kind", "fsq", "\\U", "@", "0", "\ufeff", "\x00", "é"),
]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(YAML_PIECES) | st.text(max_size=3), max_size=25).map("".join) | st.binary(max_size=40))
def test_any_text(text: str | bytes) -> None:
    try:
        layer = read(text)
    except UserError:
        return
    outcome(layer)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.sampled_from([*YAML_PIECES, "=", "."]) | st.text(max_size=3), max_size=8).map("".join), max_size=3))
def test_any_sets(items: list[str]) -> None:
    try:
        layer = parse_sets(items)
    except UserError:
        return
    outcome(layer)


@settings(max_examples=80, deadline=None)
@given(configs())
def test_what_is_written_reads_back_equal(config: Root) -> None:
    text = dump_yaml(config)
    again = build(Root, [read(text)])
    assert again == config
    assert difference(config, again) == []
    assert dump_yaml(again) == text


@settings(max_examples=40, deadline=None)
@given(configs(), configs())
def test_differences_are_what_it_takes(old: Root, new: Root) -> None:
    assert build(Root, [layer_of(old, "old"), layer_of(new, "new")]).quantizer == new.quantizer
    assert (difference(old, new) == []) == (old == new)


@settings(max_examples=40, deadline=None)
@given(st.text(), st.lists(st.text(), max_size=5))
def test_nearest_answers_with_a_choice(name: str, choices: list[str]) -> None:
    assert nearest(name, choices) in [None, *choices]
    assert not choices or nearest(choices[0], choices) is not None or not choices[0]


def test_the_reference_of_the_toy_mentions_every_key() -> None:
    text = document(Root)
    assert all(f"`{name}`" in text for section in (Root, Fsq, Vq) for name in section.model_fields)
