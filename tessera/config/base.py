"""The base class of every config, and a reader for its annotations.

In: class definitions. Out: frozen, typed data, and `Slot`, the one view of an annotation that the errors and the documentation
share. Values are taken as they are written: text never becomes a number, 3.5 never an integer, true never 1. Only the forms that
YAML lacks are supplied: a list where a tuple is meant, text where a path is meant, 3 where 3.0 is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails


class Config(BaseModel):
    """A section of the config file: keyword-only, frozen, no unknown keys; the string under a field is its documentation.

    Choose between several sections with a tagged union over a `kind: Literal[...]` field. The name `kind` is kept for that:
    a layer that changes it replaces the whole section. Keys of `dict` fields are text.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_yaml_forms(cls, data: object) -> object:
        """Lists for tuples, text for paths. A model validator, because pydantic forbids "before" validators on a `kind` field."""
        if not isinstance(data, Mapping):
            return data
        adapted = {}
        for name, value in data.items():
            slot = slot_of(cls.model_fields[name]) if name in cls.model_fields else None
            if slot is not None and slot.confuses(value):
                _refuse_literal(cls.__name__, name, value, slot)
            adapted[name] = value if slot is None else slot.adapt(value)
        return adapted

    @classmethod
    def part_of(cls, section: Config) -> Self:
        """Those values of a section that this kind of section has: of one that extends it, what it extends."""
        return cls(**{name: getattr(section, name) for name in cls.model_fields})


def _refuse_literal(title: str, name: str, value: object, slot: Slot) -> None:
    expected = " or ".join(repr(choice) for choice in slot.choices)
    details = InitErrorDetails(type="literal_error", loc=(name,), input=value, ctx={"expected": expected})
    raise ValidationError.from_exception_data(title, [details])


@dataclass(frozen=True)
class Arm:
    """One alternative of an annotation, without `Annotated` and `None`: a type, and the constraints that hold for it."""

    type: Any
    constraints: tuple[object, ...] = ()

    @property
    def origin(self) -> Any:
        """`tuple` for `tuple[int, ...]`, `Literal` for a literal, the type itself where nothing is subscripted."""
        return get_origin(self.type) or self.type

    @property
    def section(self) -> type[Config] | None:
        """The config class, where this alternative is one."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, Config) else None

    @property
    def path_type(self) -> type[PurePath] | None:
        """The path class, where this alternative is one."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, PurePath) else None

    def element(self, index: int) -> Slot | None:
        """What place `index` of this list or tuple accepts."""
        arguments = get_args(self.type)
        if self.origin not in (tuple, list) or not arguments:
            return None
        if self.origin is list or arguments[-1] is Ellipsis:
            return read_annotation(arguments[0])
        return read_annotation(arguments[index]) if index < len(arguments) else None

    def child(self, part: str | int) -> Slot | None:
        """What the key or place `part` inside this alternative accepts; None where there is no such thing."""
        if isinstance(part, int):
            return self.element(part)
        if self.section is not None:
            field = self.section.model_fields.get(part)
            return None if field is None else slot_of(field)
        if self.origin is dict and get_args(self.type):
            return read_annotation(get_args(self.type)[1])
        return None


@dataclass(frozen=True)
class Slot:
    """What one place in a config accepts."""

    arms: tuple[Arm, ...]
    nullable: bool = False
    tag: str | None = None  # the field that chooses between the arms of a tagged union, normally `kind`

    @property
    def only(self) -> Arm | None:
        """The alternative, where there is a single one and no tag to choose by."""
        return self.arms[0] if len(self.arms) == 1 and self.tag is None else None

    @property
    def kinds(self) -> dict[str, type[Config]]:
        """The sections of a tagged union by their tag; empty where this is none."""
        found: dict[str, type[Config]] = {}
        for section in self.sections if self.tag else ():
            for kind in get_args(section.model_fields[self.tag or ""].annotation):
                found[kind] = section
        return found

    @property
    def sections(self) -> tuple[type[Config], ...]:
        """The config classes among the alternatives."""
        return tuple(arm.section for arm in self.arms if arm.section is not None)

    @property
    def choices(self) -> tuple[object, ...]:
        """The values of the literals among the alternatives."""
        return tuple(choice for arm in self.arms if arm.origin is Literal for choice in get_args(arm.type))

    def accepts(self, origin: type) -> bool:
        """Whether an alternative is of this type, `tuple` for any tuple."""
        return any(arm.origin is origin for arm in self.arms)

    def confuses(self, value: object) -> bool:
        """Whether pydantic would take a value for a literal of another type: True for 1, 1.0 for 1."""
        if not self.arms or any(arm.origin is not Literal for arm in self.arms):
            return False
        alike = [choice for choice in self.choices if choice == value]
        return bool(alike) and not any(type(choice) is type(value) for choice in alike)

    def adapt(self, value: Any) -> Any:
        """A list as the tuple and text as the path that this place asks for; anything else unchanged."""
        if isinstance(value, str):
            return self._adapt_text(value)
        for arm in self.arms:
            if isinstance(value, Mapping) and arm.origin is dict:
                return {key: _adapt(arm.child(key), item) for key, item in value.items()}
            as_list = isinstance(value, list) and (arm.origin is list or not self.accepts(list))
            if (as_list and arm.origin in (tuple, list)) or (isinstance(value, tuple) and arm.origin is tuple):
                items = [_adapt(arm.element(index), item) for index, item in enumerate(value)]
                return tuple(items) if arm.origin is tuple else items
        return value

    def _adapt_text(self, value: str) -> object:
        path_types = [arm.path_type for arm in self.arms if arm.path_type is not None]
        # An empty text stays text and is refused: Path("") would quietly mean the working folder.
        return path_types[0](value) if path_types and value and not self.accepts(str) and value not in self.choices else value


def _adapt(slot: Slot | None, value: object) -> object:
    return value if slot is None else slot.adapt(value)


def slot_of(field: FieldInfo) -> Slot:
    """What a field accepts."""
    slot = read_annotation(field.annotation, tuple(field.metadata))
    return replace(slot, tag=field.discriminator) if isinstance(field.discriminator, str) else slot


def read_annotation(annotation: Any, constraints: tuple[object, ...] = ()) -> Slot:
    """Reads an annotation of any depth: `Annotated`, `X | None`, tagged and plain unions."""
    if get_origin(annotation) is Annotated:
        return _read_annotated(annotation, constraints)
    if get_origin(annotation) not in (Union, UnionType):
        return Slot(arms=(Arm(annotation, constraints),))
    slots = [read_annotation(argument) for argument in get_args(annotation) if argument is not NoneType]
    return Slot(
        arms=tuple(replace(arm, constraints=arm.constraints + constraints) for slot in slots for arm in slot.arms),
        nullable=NoneType in get_args(annotation) or any(slot.nullable for slot in slots),
        tag=slots[0].tag if len(slots) == 1 else None,
    )


def _read_annotated(annotation: Any, constraints: tuple[object, ...]) -> Slot:
    inner, *extras = get_args(annotation)
    tag = None
    for extra in extras:
        if isinstance(extra, FieldInfo):
            constraints += tuple(extra.metadata)
            tag = extra.discriminator if isinstance(extra.discriminator, str) else tag
        else:
            constraints += (extra,)
    slot = read_annotation(inner, constraints)
    return slot if tag is None else replace(slot, tag=tag)


def dotted_keys(config_type: type[Config], prefix: str = "", above: tuple[type[Config], ...] = ()) -> Iterator[str]:
    """Every dotted key that a config can have, sections included, in field order; all kinds of a tagged union."""
    if config_type in above:
        return
    for name, field in config_type.model_fields.items():
        yield prefix + name
        for section in slot_of(field).sections:
            yield from dotted_keys(section, f"{prefix}{name}.", (*above, config_type))


def plain(value: object) -> Any:
    """A config as nested dicts in field order; its leaves (numbers, text, tuples, paths) stay what they are."""
    if isinstance(value, Config):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(plain(item) for item in value)
    return value
