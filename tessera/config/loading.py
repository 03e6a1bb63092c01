"""From files and flags to a config, and back.

In: YAML files, `--set key=value` items, presets. Out: a validated config, or one `UserError` that names every wrong key with its
file and line. YAML is read through its node graph, so that each key knows its line, with the scalars of YAML 1.2: `3e-4` is a
number; `no`, `16:9`, a date and a number with a leading zero are text; keys are always text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError

from tessera.config.base import Config, plain
from tessera.config.document import float_text
from tessera.config.errors import Elsewhere, UserError, explain, nearest, refuse_broken_json

C = TypeVar("C", bound=Config)

MAX_BYTES = 4 << 20
MAX_NODES = 100_000  # aliases of aliases grow exponentially

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9_]*)",
    "float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
_PATTERNS = {name: re.compile(rf"(?:{pattern})\Z") for name, pattern in _SCALARS.items()}


@dataclass(frozen=True)
class Layer:
    """One source of values, and where each dotted key of it came from; the key "" stands for the whole layer."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> Layer:
        """A layer whose values all came from one place, such as a flag."""
        return cls(plain(values), dict.fromkeys(_nodes(values), origin))


def _nodes(value: object, key: str = "") -> Iterator[str]:
    """The dotted keys of a value and of everything inside it."""
    yield key
    for name, item in _items(value):
        yield from _nodes(item, _under(key, name))


def _items(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), item) for index, item in enumerate(value))


def _under(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


# --- Reading --------------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own shape); filled below with the scalars above


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what either this reader or a YAML 1.1 reader would not take for text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _PATTERNS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, None)


def read_yaml(path: Path) -> Layer:
    """Reads a config file. Anything but one mapping in UTF-8 YAML is a `UserError` with the file and the line."""

    def where(line: int) -> str:
        return f"{path}, line {line}"

    text = _read_text(path)
    try:
        node = _compose(text, where)
    except UserError:
        if path.suffix.lower() == ".json":
            refuse_broken_json(text, where)
        raise
    if node is None:
        raise UserError(f"{path} is empty; expected keys and values, such as 'seed: 0'")
    conversion = _Conversion(where)
    values = conversion.convert(node)
    if not isinstance(values, dict):
        raise UserError(f"{where(_line(node))}: the file must hold keys and values, such as 'seed: 0'; found {values!r:.60}")
    return Layer(values, {**conversion.origins, "": str(path)})


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; expected a YAML file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = nearest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else None
        raise UserError(f"{path} does not exist{f'; did you mean {path.with_name(near)}?' if near else ''}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES >> 20} MiB; expected a YAML config file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; expected a YAML file saved as UTF-8") from error


def _compose(text: str, where: Callable[[int], str]) -> yaml.Node | None:
    """The node graph of a YAML text. PyYAML lets some ValueErrors of `chr` and `int` through, so they are caught too."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        advice = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{where(mark.line + 1 if mark else 1)}: not valid YAML: {reason}{advice}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{where(line)}: not valid YAML: a control character, code {error.character}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{where(1)}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where(1)}: nested too deeply") from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


@dataclass
class _Conversion:
    """Nodes to values, noting the line of every key."""

    where: Callable[[int], str]
    origins: dict[str, str] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    num_nodes: int = 0

    def convert(self, node: yaml.Node) -> Any:
        try:
            return self.value(node, "")
        except RecursionError as error:
            raise self.error(node, "nested too deeply, or an alias that contains itself") from error

    def value(self, node: yaml.Node, key: str) -> Any:
        self.count(node)
        if id(node) in self.open:
            raise self.error(node, "an alias (*name) stands inside the value that it repeats")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self.mapping(node, key)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return self.sequence(node, key)
            return self.scalar(node)
        finally:
            self.open.discard(id(node))

    def sequence(self, node: yaml.SequenceNode, key: str) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            inner = _under(key, str(index))
            self.origins[inner] = self.where(_line(item))
            items.append(self.value(item, inner))
        return items

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values = {}
        for name, (key_node, value_node) in self.pairs(node).items():
            inner = _under(key, name)
            self.origins[inner] = self.where(_line(key_node))
            values[name] = self.value(value_node, inner)
        return values

    def pairs(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The entries of a mapping by name: its own, then those that `<<: *other` brings along and it does not have."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        inherited: list[yaml.Node] = []
        for key_node, value_node in node.value:
            self.count(key_node)
            if key_node.tag == _TAG + "merge":
                inherited += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            name = self.name(key_node)
            if name in own:
                first = _line(own[name][0])
                raise self.error(key_node, f"the key {name!r} is given twice, first in line {first}; remove one")
            own[name] = (key_node, value_node)
        for other in inherited:
            if not isinstance(other, yaml.MappingNode):
                raise self.error(other, "'<<' must name a mapping, as in '<<: *name'")
            own = {**self.pairs(other), **own}
        return own

    def name(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG) not in ("str", *_PATTERNS):
            raise self.error(node, "a key must be plain text")
        return str(node.value)

    def scalar(self, node: yaml.Node) -> object:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if not isinstance(text, str) or kind not in ("str", *_PATTERNS):
            raise self.error(node, f"the tag {node.tag} is not allowed; only plain values, lists and mappings are read")
        if kind in ("str", "merge"):
            return text
        if not (_PATTERNS[kind].match(text) or (kind == "float" and _PATTERNS["int"].match(text))):
            raise self.error(node, f"{text!r:.60} cannot be read as {kind}")
        if kind in ("null", "bool"):
            return None if kind == "null" else text.lower() == "true"
        digits = text.replace("_", "").lower()
        try:
            return int(digits) if kind == "int" else float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError as error:  # Python reads at most 4300 digits
            raise self.error(node, f"the number {text:.20}... has too many digits") from error

    def count(self, node: yaml.Node) -> None:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise self.error(node, f"more than {MAX_NODES} values, counting each alias (*name) in full")

    def error(self, node: yaml.Node, problem: str) -> UserError:
        return UserError(f"{self.where(_line(node))}: {problem}")


def parse_sets(items: Sequence[str]) -> Layer:
    """Reads `a.b.c=VALUE` items as one layer; VALUE is YAML, so `null`, `[1, 2]`, `3e-4` and `{kind: fsq}` mean what they say."""
    tree: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise UserError(f"--set {item!r} is not KEY=VALUE; write for example --set tokenizer.optim.lr=3e-4")
        value = _read_value(text, item)
        for name in reversed(names):
            value = {name: value}
        _join(tree, value, item)
    return Layer.of(tree, "--set")


def _read_value(text: str, item: str) -> Any:
    try:
        node = _compose(text, lambda line: "its value")
        return None if node is None else _Conversion(lambda line: "its value").convert(node)
    except UserError as error:
        advice = "put text with special characters in quotes, for example --set 'key=\"@ text\"'"
        raise UserError(f"--set {item!r}: {error}; {advice}") from error


def _join(tree: dict[str, Any], new: dict[str, Any], item: str, above: str = "") -> None:
    for name, value in new.items():
        key = _under(above, name)
        if name not in tree:
            tree[name] = value
        elif isinstance(value, dict) and isinstance(tree[name], dict):
            _join(tree[name], value, item, key)
        else:
            raise UserError(
                f"--set {item!r}: {key!r} already has a value from another --set; give each key once, either "
                f"whole (--set a={{b: 1}}) or in parts (--set a.b=1)"
            )


# --- Building -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kinds(Generic[C]):
    """Root configs of one recipe. The value of one key, such as base.model.kind, says which of them a config is. Two kinds may
    share one type, and differ in what presets say of them."""

    key: str
    types: Mapping[str, type[C]]  # the first is that of a config that does not say

    def said(self, layers: Sequence[Layer]) -> str | None:
        """The last kind that a layer names; None where none does."""
        found = None
        for layer in layers:
            value: Any = layer.values
            for name in self.key.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if isinstance(value, str) and value not in self.types:
                near, origin = nearest(value, self.types), layer.origins.get(self.key, "")
                raise UserError(
                    f"{self.key}{f' ({origin})' if origin else ''}: found {value!r}; expected "
                    f"{' or '.join(map(repr, self.types))}{f'; did you mean {near!r}?' if near else ''}"
                )
            found = value if isinstance(value, str) else found
        return found

    def chosen(self, layers: Sequence[Layer]) -> tuple[type[C], Elsewhere]:
        """The type of what layers make together, and what a key may belong to that it does not have."""
        kind = self.said(layers) or next(iter(self.types))
        own = self.types[kind]
        return own, Elsewhere(self.key, kind, {name: other for name, other in self.types.items() if other is not own})


def build(config_type: type[C] | Kinds[C], layers: Sequence[Layer]) -> C:
    """Merges layers, later over earlier, and validates the result; every problem found comes out in one `UserError`.

    Mappings merge key by key. A mapping with another `kind` than the one below replaces it, since the old keys belong to the
    old kind; null replaces anything; a mapping over null or nothing starts from the defaults of its class.
    """
    root, elsewhere = config_type.chosen(layers) if isinstance(config_type, Kinds) else (config_type, None)
    values: Any = {}
    origins: dict[str, str] = {}
    for layer in (layer for layer in layers if layer.values):  # no --set at all is no origin either
        values = _merge(values, layer.values, "", origins, layer.origins)
    try:
        return root.model_validate(values)
    except ValidationError as error:
        raise explain(root, error, values, origins, elsewhere) from error


def _merge(below: Any, above: Any, key: str, origins: dict[str, str], new: Mapping[str, str]) -> Any:
    """`above` over `below`. A mapping made by several layers has all their origins: any of them may hold the mistake."""
    mappings = isinstance(below, Mapping) and isinstance(above, Mapping)
    if not mappings or ("kind" in below and "kind" in above and below["kind"] != above["kind"]):
        for old in _nodes(below, key):
            origins.pop(old, None)
        origins.update({node: new[node] for node in _nodes(above, key) if node in new})
        return above
    known = origins.get(key, "").split(" + ") if key in origins else []
    origins[key] = " + ".join(dict.fromkeys([*known, *([new[key]] if key in new else [])]))
    merged = dict(below)
    for name, value in above.items():
        merged[name] = _merge(below.get(name), value, _under(key, name), origins, new)
    return merged


def layer_of(config: Config, origin: str) -> Layer:
    """A whole config as a layer, such as a preset under the user's file."""
    return Layer.of(plain(config), origin)


# --- Writing --------------------------------------------------------------------------------------------------------------------


def dump_yaml(config: Config) -> str:
    """The complete config in field order. Reading it again gives an equal config, here and, for numbers, in YAML 1.1 readers."""
    text: str = yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Odd characters are escaped: PyYAML does not read back every line break that it writes."""
    return dumper.represent_scalar(_TAG + "str", value, style=None if value.isprintable() else '"')


def _represent_list(dumper: yaml.SafeDumper, value: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence(_TAG + "seq", value, flow_style=not any(isinstance(item, Mapping) for item in value))


_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar(_TAG + "float", float_text(value)))
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, _represent_list)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_multi_representer(PurePath, lambda dumper, value: _represent_text(dumper, str(value)))


def difference(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """The dotted keys in which two configs differ, with both values; a key that one side lacks counts as None there."""
    return list(_differences(plain(old), plain(new), ""))


def _differences(old: dict[str, Any], new: dict[str, Any], above: str) -> Iterator[tuple[str, object, object]]:
    for name in dict.fromkeys([*old, *new]):
        key, before, after = _under(above, name), old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, key)
        elif before != after:
            yield key, before, after
