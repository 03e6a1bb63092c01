"""Config: values are taken as they are written, and only the forms that YAML lacks are supplied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, create_model

from tessera.config import Config
from tessera.config.base import dotted_keys, plain, slot_of


class Left(Config):
    kind: Literal["left"] = "left"
    sizes: tuple[int, ...] = ()


class Right(Config):
    kind: Literal["right"] = "right"
    left: int = 0  # named like the other kind's tag, on purpose


Side = Annotated[Left | Right, Field(discriminator="kind")]


class Everything(Config):
    number: int = 1
    """How many."""
    share: float = 0.5
    flag: bool = False
    name: str = "x"
    path: Path = Path("here")
    either: Path | Literal["auto"] = "auto"
    level: Literal[1, 2] = 1
    switch: Literal[True, "auto"] = "auto"
    pairs: tuple[tuple[int, float], ...] = ()
    sides: tuple[Side, ...] = ()
    side: Side | None = None
    named: dict[str, tuple[Path, ...]] = Field(default_factory=dict)
    listed: list[int] = Field(default_factory=list)
    mixed: tuple[int, ...] | int = 0


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("share", 3, 3.0),
        ("path", "a/b", Path("a/b")),
        ("either", "auto", "auto"),
        ("either", "a/b", Path("a/b")),
        ("pairs", [[1, 2], [3, 4.5]], ((1, 2.0), (3, 4.5))),
        ("sides", [{"kind": "left", "sizes": [1]}, {"kind": "right"}], (Left(sizes=(1,)), Right())),
        ("side", {"kind": "left", "sizes": [1, 2]}, Left(sizes=(1, 2))),
        ("side", None, None),
        ("named", {"a": ["x", "y"]}, {"a": (Path("x"), Path("y"))}),
        ("listed", [1, 2], [1, 2]),
        ("mixed", [1, 2], (1, 2)),
        ("mixed", 3, 3),
        ("level", 2, 2),
        ("switch", True, True),
    ],
)
def test_yaml_forms_are_accepted(field: str, given: object, kept: object) -> None:
    value = getattr(Everything.model_validate({field: given}), field)
    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *[("number", wrong) for wrong in ("3", 3.5, 3.0, True, None, [3])],
        *[("share", wrong) for wrong in ("0.5", True, None, float("nan"), float("inf"))],
        *[("flag", wrong) for wrong in (1, 0, "true", None)],
        *[("name", wrong) for wrong in (3, True, None, ["x"])],
        *[("path", wrong) for wrong in (3, "", None, ["x"])],
        *[("level", wrong) for wrong in (True, 1.0, "1", 3)],
        *[("switch", wrong) for wrong in (1, "on", False)],
        *[("pairs", wrong) for wrong in ("ab", {"a": 1}, [[1]], [[1, "2"]], [[1.5, 2]])],
        *[("sides", wrong) for wrong in ([{"left": 1}], [{"kind": "up"}], {"kind": "left"})],
        ("unknown", 1),
    ],
)
def test_nothing_is_converted_in_silence(field: str, given: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate({field: given})
    assert caught.value.errors()[0]["loc"][0] == field


def test_a_config_is_frozen_and_keyword_only() -> None:
    config = Everything()
    with pytest.raises(ValidationError, match="frozen"):
        config.number = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Everything(3)  # type: ignore[call-arg]


def test_the_string_under_a_field_is_its_documentation() -> None:
    assert Everything.model_fields["number"].description == "How many."


def test_defaults_are_validated_too() -> None:
    wrong: Any = create_model("Wrong", __base__=Config, number=(int, "3"))
    with pytest.raises(ValidationError):
        wrong()


def test_the_given_mapping_is_left_alone() -> None:
    given = {"pairs": [[1, 2.0]]}
    Everything.model_validate(given)
    assert given == {"pairs": [[1, 2.0]]}


def test_slots_see_through_annotated_and_optional() -> None:
    slot = slot_of(Everything.model_fields["side"])
    assert (slot.nullable, slot.tag, slot.kinds) == (True, "kind", {"left": Left, "right": Right})


def test_dotted_keys_cover_every_kind_and_stop_at_recursion() -> None:
    keys = list(dotted_keys(Everything))
    assert {"number", "side", "side.kind", "side.sizes", "side.left"} <= set(keys)
    assert list(dotted_keys(Tree)) == ["leaf", "branch"]


class Tree(Config):
    leaf: int = 0
    branch: Tree | None = None


def test_plain_keeps_field_order_and_leaves() -> None:
    values = plain(Everything(path=Path("p"), side=Left(sizes=(3,))))
    assert list(values) == list(Everything.model_fields)
    assert values["path"] == Path("p")
    assert values["side"] == {"kind": "left", "sizes": (3,)}
