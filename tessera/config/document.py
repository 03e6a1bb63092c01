"""The config reference, written from the classes themselves.

In: a config class. Out: Markdown, a table per section, with each key's type in words, its default and the string under the field.
`in_words` is also what an error message says it expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from inspect import cleandoc
from math import isfinite
from pathlib import PurePath
from typing import Any, Literal, get_args

import annotated_types
from pydantic.fields import FieldInfo

from tessera.config.base import Arm, Config, Slot, plain, read_annotation, slot_of

_NOUNS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ("a mapping", "mappings"),
    tuple: ("a list", "lists"),
    list: ("a list", "lists"),
    Any: ("any value", "any values"),
    object: ("any value", "any values"),
}


def join_words(words: Sequence[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def float_text(value: float) -> str:
    """A float as every YAML reader takes it for one; 1.1 asks for a point and a signed exponent: 3.0e-4, not 3e-4."""
    text = repr(value)
    if not isfinite(value):
        return text.replace("inf", ".inf").replace("nan", ".nan")
    if value == 0 or 1e-3 <= abs(value) < 1e16:
        return text
    mantissa, _, exponent = f"{Decimal(text):e}".partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"


def literal_text(value: object) -> str:
    """A scalar as one writes it in YAML: null, true, 3, 3.0e-4, 'text'."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return float_text(value)
    return repr(str(value)) if isinstance(value, PurePath) else repr(value)


def in_words(slot: Slot, plural: bool = False) -> str:
    """What a place accepts, in words: `a number > 0 or null`, `'bf16' or 'fp32'`, `a list of whole numbers`."""
    if slot.tag:
        words = [
            f"{'sections' if plural else 'a section'} with {slot.tag} {join_words([literal_text(kind) for kind in slot.kinds])}"
        ]
    else:
        words = [_arm_in_words(arm, plural) for arm in slot.arms if arm.origin is not Literal]
        words += [literal_text(choice) for choice in slot.choices]
    return join_words(list(dict.fromkeys([*words, *(["null"] if slot.nullable else [])])))


def _arm_in_words(arm: Arm, plural: bool) -> str:
    if arm.section is not None:
        noun = "sections" if plural else "a section of keys"
    elif arm.path_type is not None:
        noun = "paths" if plural else "a path"
    elif get_args(arm.type) and arm.origin in (tuple, list):
        noun = _list_in_words(arm, plural)
    elif get_args(arm.type) and arm.origin is dict:
        noun = f"{_NOUNS[dict][plural]} from names to {in_words(read_annotation(get_args(arm.type)[1]), plural=True)}"
    else:
        noun = _NOUNS.get(arm.type, (f"a value of type {_type_name(arm.type)}", f"values of type {_type_name(arm.type)}"))[plural]
    limits = _limits(arm)
    return f"{noun}{', each' if plural and limits else ''} {join_words(limits, 'and')}" if limits else noun


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _list_in_words(arm: Arm, plural: bool) -> str:
    noun, arguments = _NOUNS[list][plural], get_args(arm.type)
    if arm.origin is list or arguments[-1] is Ellipsis:
        return f"{noun} of {in_words(read_annotation(arguments[0]), plural=True)}"
    slots = [read_annotation(argument) for argument in arguments]
    if len(slots) > 1 and all(slot == slots[0] for slot in slots):
        return f"{noun} of {len(slots)} {in_words(slots[0], plural=True)}"
    return f"{noun} of {join_words([in_words(slot) for slot in slots], 'and')}"


def _limits(arm: Arm) -> list[str]:
    """The constraints in words: `>= 0 and <= 1`, `>= 8 and divisible by 8`."""
    unit = "characters" if arm.type is str else "items"
    low, high, others = [], [], []
    for constraint in _single_constraints(arm.constraints):
        match constraint:
            case annotated_types.Ge(ge):
                low.append(f">= {ge}")
            case annotated_types.Gt(gt):
                low.append(f"> {gt}")
            case annotated_types.Le(le):
                high.append(f"<= {le}")
            case annotated_types.Lt(lt):
                high.append(f"< {lt}")
            case annotated_types.MultipleOf(multiple_of):
                others.append(f"divisible by {multiple_of}")
            case annotated_types.MinLen(min_length):
                others.append(f"with at least {min_length} {unit}")
            case annotated_types.MaxLen(max_length):
                others.append(f"with at most {max_length} {unit}")
    return [*low, *high, *others]


def _single_constraints(constraints: tuple[object, ...]) -> Iterator[object]:
    for constraint in constraints:
        if isinstance(constraint, annotated_types.GroupedMetadata):
            yield from constraint
        else:
            yield constraint


def document(config_type: type[Config]) -> str:
    """The Markdown reference of a config class: a table per section, kinds of a tagged union one after the other."""
    reference = _Reference()
    reference.add(config_type, "", "Top level")
    return "\n".join(reference.lines).rstrip() + "\n"


@dataclass
class _Reference:
    lines: list[str] = field(default_factory=list)
    titles: dict[type[Config], str] = field(default_factory=dict)  # a class used twice is written once, then linked

    def add(self, config_type: type[Config], key: str, title: str) -> None:
        self.lines += [f"## {title}", ""]
        if config_type in self.titles:
            self.lines += [f"The keys of {_link(self.titles[config_type])}.", ""]
            return
        self.titles[config_type] = title
        # Not inspect.getdoc: a section without a docstring of its own must not show that of Config.
        if meaning := config_type.__doc__:
            self.lines += [cleandoc(meaning), ""]
        self.lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        self.lines += [_row(name, info) for name, info in config_type.model_fields.items()]
        self.lines.append("")
        for name, info in config_type.model_fields.items():
            self.add_slot(slot_of(info), f"{key}.{name}" if key else name)

    def add_slot(self, slot: Slot, key: str) -> None:
        if slot.tag:
            for kind, section in slot.kinds.items():
                self.add(section, key, f"`{key}` ({slot.tag}: {kind})")
            return
        for arm in slot.arms:
            if arm.section is not None:
                several = f" ({arm.section.__name__})" if len(slot.sections) > 1 else ""
                self.add(arm.section, key, f"`{key}`{several}")
            elif arm.origin in (tuple, list) and (element := arm.element(0)) is not None:
                self.add_slot(element, f"{key}.0")
            elif arm.origin is dict and (value := arm.child("")) is not None:
                self.add_slot(value, f"{key}.NAME")


def _link(title: str) -> str:
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{anchor})"


def _row(name: str, info: FieldInfo) -> str:
    cells = [f"`{name}`", in_words(slot_of(info)), _default(info), info.description or ""]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default_factory_takes_validated_data:
        return "from the other keys"
    value = info.get_default(call_default_factory=True)
    if not isinstance(value, Config):
        return f"`{_value_text(plain(value))}`"
    changed = _changed_defaults(value)
    return f"`{_value_text(changed)}`" if changed else "its defaults"


def _changed_defaults(section: Config) -> dict[str, object]:
    """The values in which a default section differs from its class; always its kind, which the reader must know."""
    changed: dict[str, object] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if info.is_required() or name == "kind" or value != info.get_default(call_default_factory=True):
            changed[name] = plain(value)
    return changed


def _value_text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_./][\w./ -]*", value) else literal_text(value)
    return literal_text(value)
