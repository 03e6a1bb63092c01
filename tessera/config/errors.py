"""What a user reads when the input is wrong.

In: pydantic's errors, the values they are about, and where each value came from. Out: one `UserError` with a line per problem:
the dotted key, its origin (file and line, or --set), what was found, what was expected, and the nearest right name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tessera.config.base import Arm, Config, Slot, dotted_keys
from tessera.config.document import in_words, join_words, literal_text

MAX_PROBLEMS = 8
MAX_NAMES = 16
MAX_LETTERS = 60

# What other trainers call it -> what it is called here, the end of a dotted key.
_ALIASES = {
    "learning_rate": "lr",
    "max_train_steps": "steps",
    "num_train_steps": "steps",
    "max_steps": "steps",
    "train_batch_size": "batch_size",
    "image_size": "data.resolution",
    "num_workers": "data.workers",
    "mixed_precision": "engine.precision",
}
_ADVICE = {
    "gradient_accumulation_steps": "set engine.micro_batch_size instead: batch_size is the whole batch of an update, "
    "and how often gradients are accumulated follows from the two",
    "resume_from_checkpoint": "to continue a run, use the command `tessera resume RUN`",
}
# Errors for which the type in words says all; any other error is told in pydantic's own words.
_TYPE_ERRORS = {
    *(
        "bool_type",
        "int_type",
        "float_type",
        "string_type",
        "tuple_type",
        "list_type",
        "dict_type",
        "model_type",
        "literal_error",
    ),
    *("model_attributes_type", "is_instance_of", "none_required", "greater_than", "greater_than_equal", "less_than"),
    *("less_than_equal", "multiple_of", "too_short", "too_long", "string_too_short", "string_too_long"),
}


class UserError(Exception):
    """The user's input is wrong. The message says what was found, where, what was expected and what to do."""


def refuse_broken_json(text: str, where: Callable[[int], str]) -> None:
    """A file that YAML refuses, in the words of JSON where these refuse it, too; a valid one may be indented with tabs."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where(error.lineno)}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # too many digits, nested too deeply: YAML said so
        return


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like a name, or None where nothing is; case and `-` or `_` make no difference."""
    wanted = _normal(name)
    scored = [(SequenceMatcher(None, wanted, _normal(choice)).ratio(), choice) for choice in choices]
    score, choice = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return choice if score >= cutoff else None


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


@dataclass(frozen=True)
class _Place:
    """A location of pydantic's, without the tags and union labels that pydantic mixes into it."""

    path: tuple[str | int, ...]
    slot: Slot | None
    union: Slot | None = None  # the tagged union whose tag chose this slot
    cut: bool = False  # the error lies inside one alternative of a plain union

    @property
    def key(self) -> str:
        return ".".join(str(part) for part in self.path)


def _locate(config_type: type[Config], location: Sequence[str | int]) -> _Place:
    """Follows a location through the types, because only they tell a tag from a key of the same name."""
    place = _Place((), Slot(arms=(Arm(config_type),)))
    for part in location:
        slot = place.slot
        if slot is not None and slot.tag is not None:
            chosen = slot.kinds.get(str(part))
            place = _Place(place.path, Slot(arms=(Arm(chosen),)) if chosen else None, union=slot)
        elif slot is not None and slot.only is None:
            return replace(place, cut=True)  # the rest is pydantic's label of one alternative
        else:
            child = None if slot is None or slot.only is None else slot.only.child(part)
            place = _Place((*place.path, part), child)
    return place


@dataclass(frozen=True)
class Elsewhere:
    """Root configs of other kinds than the one at hand, which may have the keys that it lacks."""

    key: str  # that chose between them
    kind: str  # what was chosen
    others: Mapping[str, type[Config]]

    def about(self, key: str) -> str | None:
        """What to say of a dotted key that another kind has."""
        kinds = [kind for kind, config_type in self.others.items() if key in dotted_keys(config_type)]
        if not kinds:
            return None
        belongs = join_words([literal_text(kind) for kind in kinds])
        return f"unknown key where {self.key} is {self.kind!r}; it belongs to {belongs}"


def explain(
    config_type: type[Config], error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str],
    elsewhere: Elsewhere | None = None,
) -> UserError:  # fmt: skip
    """All of pydantic's complaints about `values` as one error, a line each; `origins` says where a dotted key came from."""
    report = _Report(config_type, values, origins, elsewhere)
    problems: dict[object, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        problems.setdefault(report.identity(details), details)
    # Only the lines that are shown are written: looking for the nearest name is slow, and a wrong file can have many thousand.
    lines = [f"  {report.line(details)}" for details in list(problems.values())[:MAX_PROBLEMS]]
    if len(problems) == 1:
        return UserError(lines[0].strip())
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    return UserError("\n".join([f"the config has {len(problems)} problems:", *lines]))


@dataclass(frozen=True)
class _Report:
    config_type: type[Config]
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    elsewhere: Elsewhere | None = None

    def identity(self, details: ErrorDetails) -> tuple[object, ...]:
        """Equal for two errors that are one problem: pydantic complains once per alternative of a plain union."""
        authored = details["type"] in ("value_error", "assertion_error")
        return self.place(details).path, details["msg"] if authored else ""

    def place(self, details: ErrorDetails) -> _Place:
        location = details["loc"]
        if _is_short_list(details):
            location = location[:-1]  # the list is too short; there is no key for the place that is missing
        return _locate(self.config_type, location)

    def line(self, details: ErrorDetails) -> str:
        place = self.place(details)
        if details["type"] in ("union_tag_invalid", "union_tag_not_found") and place.slot is not None and not place.cut:
            place, sentence = self.about_tag(place, place.slot)
        else:
            sentence = self.sentence(place, details)
        key = place.key if place.key.isprintable() else ascii(place.key)
        origin = self.origin_of_words(place, sentence) or self.origin(place.path)
        return f"{key or 'config'}{f' ({origin})' if origin else ''}: {sentence}"

    def sentence(self, place: _Place, details: ErrorDetails) -> str:
        kind = details["type"]
        if kind in ("value_error", "assertion_error"):
            return str(details["ctx"]["error"])  # as the author of the validator wrote it
        if kind == "extra_forbidden" and not place.cut:
            return self.about_unknown(place, _locate(self.config_type, details["loc"][:-1]))
        words = in_words(place.slot) if place.slot is not None else ""
        if kind == "missing" and not place.cut and not _is_short_list(details):
            example = f"{place.key}.KEY" if place.slot is not None and place.slot.sections else place.key
            return f"missing; expected {words}; write it in the file or give --set {example}=VALUE"
        value = self.value(place.path, details["input"])
        if place.slot is None or not (place.cut or kind in _TYPE_ERRORS or _is_short_list(details)):
            return f"found {_found(value)}; {details['msg'].replace('Input should be', 'expected', 1)}"
        return "; ".join([f"found {_found(value)}", f"expected {words}", *_hints(value, place.slot)])

    def about_tag(self, place: _Place, union: Slot) -> tuple[_Place, str]:
        tag = union.tag or ""
        expected = f"expected {join_words([literal_text(kind) for kind in union.kinds])}"
        section = self.value(place.path, {})
        place = _Place((*place.path, tag), None)
        if tag not in section:
            return place, f"missing; {expected}"
        near = nearest(section[tag], union.kinds) if isinstance(section[tag], str) else None
        return place, "; ".join([f"found {_found(section[tag])}", expected, *_did_you_mean([near] if near else [])])

    def about_unknown(self, place: _Place, parent: _Place) -> str:
        name = str(place.path[-1])
        if advice := _ADVICE.get(_normal(name)):
            return f"unknown key; {advice}"
        if self.elsewhere is not None and (said := self.elsewhere.about(place.key)):
            return said
        if parent.union and (kinds := [kind for kind, section in parent.union.kinds.items() if name in section.model_fields]):
            found = self.value((*parent.path, parent.union.tag or ""), None)
            belongs = join_words([literal_text(kind) for kind in kinds])
            return f"unknown key with {parent.union.tag} {literal_text(found)}; it belongs to {parent.union.tag} {belongs}"
        siblings = [key for section in (parent.slot.sections if parent.slot else ()) for key in section.model_fields]
        keys = list(dict.fromkeys(dotted_keys(self.config_type)))
        if name in keys and "." in name:
            return f"unknown key; a dot does not nest in a file, write {name.replace('.', ': {')}: ..{'}' * name.count('.')}"
        if names := _candidates(name, parent.key, siblings, keys):
            return f"unknown key; {_did_you_mean(names)[0]}"
        return f"unknown key; expected {_some(siblings)}"

    def value(self, path: Sequence[str | int], default: object) -> Any:
        """What the user wrote at a path: pydantic's own input may be a part or a converted form of it."""
        value: Any = self.values
        for part in path:
            places = value if isinstance(value, Mapping) else range(len(value) if isinstance(value, (list, tuple)) else 0)
            if part not in places:
                return default
            value = value[part]
        return value

    def origin_of_words(self, place: _Place, sentence: str) -> str:
        """Where the keys came from that a sentence about a whole section names: one of them is the mistake."""
        section = place.slot is not None and bool(place.slot.sections)
        words = re.findall(r"[A-Za-z_][\w.]*\w", sentence) if section else []
        keys = [f"{place.key}.{word}" if place.key else word for word in words]
        return " + ".join(dict.fromkeys(self.origins[key] for key in keys if "." in key and key in self.origins))

    def origin(self, path: Sequence[str | int]) -> str:
        """Where a key came from; for a key that is not there, where the section around it came from."""
        keys = [".".join(str(part) for part in path[:length]) for length in range(len(path), -1, -1)]
        return next((self.origins[key] for key in keys if key in self.origins), "")


def _is_short_list(details: ErrorDetails) -> bool:
    return details["type"] == "missing" and isinstance(details["loc"][-1], int)


def _candidates(name: str, section: str, siblings: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The dotted keys that an unknown name may have meant, best first: beside it, then by its exact name anywhere, then alike."""
    inside = {sibling: f"{section}.{sibling}" if section else sibling for sibling in siblings}
    if near := nearest(name, siblings, cutoff=0.85):
        return [inside[near]]
    if alias := _ALIASES.get(_normal(name)):
        return _ending(alias, section, keys) or [alias]
    if elsewhere := _ending(name, section, keys):
        return elsewhere
    if near := nearest(name, siblings):
        return [inside[near]]
    near = nearest(name, [key.rpartition(".")[2] for key in keys], cutoff=0.75)
    return _ending(near, section, keys) if near else []


def _ending(tail: str, section: str, keys: Sequence[str]) -> list[str]:
    """The keys that end in `tail`, only those nearest to `section` (`lr` in `base` means `base.optim.lr`)."""
    found = [key for key in keys if f".{_normal(key)}".endswith(f".{_normal(tail)}")]
    shared = {key: _shared(key.split("."), section.split(".")) for key in found}
    return [key for key in found if shared[key] == max(shared.values())]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def _did_you_mean(names: Sequence[str]) -> list[str]:
    return [f"did you mean {join_words([repr(name) for name in names[:3]])}?"] if names else []


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no keys here"
    more = [f"{len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    return f"one of {', '.join([*names[:MAX_NAMES], *more])}"


def _found(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a section with {', '.join(str(key) for key in value)}"[:MAX_LETTERS] if value else "an empty section"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a whole number of more than 60 digits"
    text = literal_text(list(value) if isinstance(value, tuple) else value)
    text = text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 4]} ..."
    return f"the text {text}" if isinstance(value, str) else text


def _hints(value: object, slot: Slot) -> list[str]:
    """What to write instead, where the mistake is a usual one."""
    if isinstance(value, str):
        if value in slot.kinds:
            return [f"write {{{slot.tag}: {value}}}"]
        numeric = slot.accepts(int) or slot.accepts(float) or any(isinstance(choice, int) for choice in slot.choices)
        if numeric and _is_number(value):
            return ["write it without quotes"]
        near = nearest(value, [choice for choice in slot.choices if isinstance(choice, str)])
        return _did_you_mean([near] if near else [])
    if slot.accepts(str) and isinstance(value, (bool, int, float)):
        return ["put it in quotes"]
    if slot.accepts(int) and isinstance(value, float) and value.is_integer():
        return [f"write {int(value)}"]
    if isinstance(value, (bool, int, float)) and any(_is_list_of_scalars(arm) for arm in slot.arms):
        return [f"write [{literal_text(value)}]"]
    return []


def _is_list_of_scalars(arm: Arm) -> bool:
    element = arm.element(0)
    return Ellipsis in get_args(arm.type) and element is not None and not element.sections


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
