"""Reading, merging, writing and comparing configs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field

from tessera.config import Config, Kinds, Layer, UserError, build, difference, dump_yaml, layer_of, parse_sets, read_yaml


class Fsq(Config):
    kind: Literal["fsq"] = "fsq"
    levels: tuple[int, ...] = (8, 8)


class Vq(Config):
    kind: Literal["vq"] = "vq"
    codes: int = 512
    decay: float = 0.99


class Optim(Config):
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.99)


class Root(Config):
    seed: int = 0
    path: Path = Path("photos")
    note: str | None = None
    quantizer: Annotated[Fsq | Vq, Field(discriminator="kind")] = Vq()
    optim: Optim = Optim()
    critic: Optim | None = None
    blocks: tuple[Fsq, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    anything: Any = None


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def values_of(folder: Path, text: str) -> Any:
    return read_yaml(write(folder, text)).values


# --- read_yaml ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1_000", -1000),
        ("+0", 0),
        ("3e-4", 3e-4),
        ("1e5", 1e5),
        ("1.5E+3", 1500.0),
        ("-.5", -0.5),
        ("2.", 2.0),
        (".inf", float("inf")),
        ("1e400", float("inf")),
        ("null", None),
        ("~", None),
        ("", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("16:9", "16:9"),
        ("2024-01-01", "2024-01-01"),
        ("007", "007"),
        ("0x10", "0x10"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("<<", "<<"),
        ("'3'", "3"),
        ('"null"', "null"),
        ("a red circle", "a red circle"),
        ("[1, [2.5, x], {a: 1}]", [1, [2.5, "x"], {"a": 1}]),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
    ],
)
def test_scalars(tmp_path: Path, text: str, value: object) -> None:
    read = values_of(tmp_path, f"key: {text}")["key"]
    assert read == value
    assert type(read) is type(value)


def test_keys_are_text_and_know_their_line(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\n\noptim:\n  lr: 1\n  betas:\n    - 0.5\n    - 0.9\non: {1: 2, null: 3}\n")
    layer = read_yaml(path)
    assert layer.values["on"] == {"1": 2, "null": 3}
    lines = {"seed": 1, "optim": 3, "optim.lr": 4, "optim.betas": 5, "optim.betas.1": 7, "on": 8, "on.1": 8, "on.null": 8}
    assert {key: layer.origins[key] for key in lines} == {key: f"{path}, line {line}" for key, line in lines.items()}
    assert layer.origins[""] == str(path)


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: *a\nc:\n  <<: *a\n  y: 3\nd:\n  <<: [{x: 5}, *a]\n"
    layer = read_yaml(write(tmp_path, text))
    assert layer.values["b"] == {"x": 1, "y": 2}
    assert layer.values["c"] == {"x": 1, "y": 3}
    assert layer.values["d"] == {"x": 5, "y": 2}
    assert layer.origins["c.y"].endswith("line 5")
    assert layer.origins["c.x"].endswith("line 1")


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, b"\xef\xbb\xbfseed: 1\n")).values == {"seed": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n "seed": 1,\n "n": 2\n', "line 4: not valid JSON: Expecting ',' delimiter"),
        ('{"seed": }}', "line 1: not valid JSON: Expecting value"),
        ('{\n\t"seed": 1\n}', "line 2: not valid YAML: while scanning for the next token found character '\\t'"),
    ],
    ids=["cut short", "no value", "valid, but for tabs"],
)
def test_a_broken_json_file_is_told_as_json(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}, {said}")


BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is given twice, first in line 1"),
        ("o:\n  lr: 1\n  'lr': 2\n", 3, "'lr' is given twice, first in line 2"),
        ("a: 1\nb: [1, 2\n", 3, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "spaces, not tabs"),
        ("a: b: c\n", 1, "not valid YAML"),
        ("a: 1\nb: *nowhere\n", 2, "nowhere"),
        ("a: 1\n---\nb: 1\n", 2, "document"),
        ("a: 1\nb: \x07\n", 2, "control character"),
        (b"a: 1\nb: \xff\n", 2, "UTF-8"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", 2, "tag"),
        ("a: 1\nb: !mine 3\n", 2, "tag"),
        ("a: !!binary aGk=\n", 1, "tag"),
        ("a: !!int three\n", 1, "'three' cannot be read as int"),
        ("a: 1\nb: &b [1, *b]\n", 2, "alias"),
        ("a: &a\n  b: *a\n", 1, "alias"),
        ("a: &a {<<: *a}\n", 1, "alias"),
        ("a: {<<: 3}\n", 1, "'<<' must name a mapping"),
        ("a: 1\n? [1, 2]\n: 3\n", 2, "a key must be plain text"),
        (f"a: {'9' * 5000}\n", 1, "too many digits"),
        ('a: "\\UFFFFFFFF"\n', 1, "not valid YAML"),
        ("a: " + "[" * 3000, 1, "too deeply"),
        (BOMB, 6, "more than 100000 values"),
        (MERGE_BOMB, 6, "more than 100000 values"),
        ("- 1\n- 2\n", 1, "keys and values"),
        ("# only\njust text\n", 2, "keys and values"),
    ],
)
def test_a_bad_file_names_itself_and_the_line(tmp_path: Path, text: str | bytes, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line ")
    assert words in message
    if "values, counting" not in message:
        assert message.startswith(f"{path}, line {line}:")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "---\n...\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    assert "keys and values" in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    near = write(tmp_path, "seed: 1")
    with pytest.raises(UserError, match="does not exist") as caught:
        read_yaml(tmp_path / "Runn.yaml")
    assert f"did you mean {near}?" in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        read_yaml(tmp_path / "no" / "folder.yaml")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        read_yaml(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(Path("a\0b"))
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path / ("x" * 5000))
    with pytest.raises(UserError, match="larger than 4 MiB"):
        read_yaml(write(tmp_path, b"#" * (5 << 20)))


# --- parse_sets -----------------------------------------------------------------------------------------------------------------


def test_sets_follow_the_rules_of_the_file() -> None:
    items = ["a.b.c=3e-4", "a.b.d=[1,2]", "e=null", "f={kind: fsq}", "f.levels=[4]", "g=x=y", "h=a red circle", "i=", "j = 1"]
    layer = parse_sets(items)
    assert layer.values == {
        "a": {"b": {"c": 3e-4, "d": [1, 2]}},
        "e": None,
        "f": {"kind": "fsq", "levels": [4]},
        "g": "x=y",
        "h": "a red circle",
        "i": None,
        "j": 1,
    }
    assert set(layer.origins.values()) == {"--set"}
    assert parse_sets([]).values == {}


@pytest.mark.parametrize(
    ("items", "offending"),
    [
        (["seed"], "seed"),
        (["=3"], "=3"),
        (["a..b=3"], "a..b=3"),
        ([".a=3"], ".a=3"),
        (["a. =3"], "a. =3"),
        (["a=1", "a.b=2"], "a.b=2"),
        (["a.b=2", "a=1"], "a=1"),
        (["a=null", "a.b=2"], "a.b=2"),
        (["a=1", "a=1"], "a=1"),
        (["a={b: 1}", "a.b=2"], "a.b=2"),
        (["a=@x"], "a=@x"),
        (["a=[1, 2"], "a=[1, 2"),
        (["a={b: 1, b: 2}"], "a={b: 1, b: 2}"),
        (["a=!!python/name:os.system x"], "a=!!python/name:os.system x"),
    ],
)
def test_a_bad_set_is_named_with_an_example(items: Sequence[str], offending: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_sets(items)
    assert str(caught.value).startswith(f"--set {offending!r}")
    assert str(caught.value).count("--set") >= 2


# --- build ----------------------------------------------------------------------------------------------------------------------


def merged(*layers: dict[str, Any]) -> Root:
    return build(Root, [Layer.of(values, f"layer {index}") for index, values in enumerate(layers)])


def test_later_layers_override_key_by_key() -> None:
    config = merged({"seed": 1, "optim": {"lr": 1.0, "betas": [0, 0.5]}}, {"optim": {"lr": 2.0}}, {"seed": 3})
    assert config == Root(seed=3, optim=Optim(lr=2.0, betas=(0.0, 0.5)))
    assert build(Root, []) == Root()


def test_another_kind_replaces_the_section() -> None:
    vq = {"quantizer": {"kind": "vq", "codes": 7, "decay": 0.5}}
    assert merged(vq, {"quantizer": {"codes": 8}}).quantizer == Vq(codes=8, decay=0.5)
    assert merged(vq, {"quantizer": {"kind": "vq", "codes": 8}}).quantizer == Vq(codes=8, decay=0.5)
    assert merged(vq, {"quantizer": {"kind": "fsq"}}).quantizer == Fsq()
    assert merged(vq, {"quantizer": {"kind": "fsq"}}, {"quantizer": {"levels": [2]}}).quantizer == Fsq(levels=(2,))
    assert merged({"quantizer": {"codes": 7}}, {"quantizer": {"kind": "vq"}}).quantizer == Vq(codes=7)


def test_null_replaces_and_a_mapping_over_null_starts_fresh() -> None:
    given = {"critic": {"lr": 5.0}}
    assert merged(given, {"critic": None}).critic is None
    assert merged(given, {"critic": None}, {"critic": {"betas": [0, 0]}}).critic == Optim(betas=(0.0, 0.0))
    assert merged({}, given).critic == Optim(lr=5.0)


def test_lists_are_replaced_whole() -> None:
    config = merged({"blocks": [{"levels": [1]}, {"levels": [2]}]}, {"blocks": [{"levels": [3]}]})
    assert config.blocks == (Fsq(levels=(3,)),)


def test_layers_are_left_alone() -> None:
    base = Layer.of({"optim": {"lr": 1.0}}, "a")
    build(Root, [base, Layer.of({"optim": {"lr": 2.0}}, "b")])
    assert base == Layer.of({"optim": {"lr": 1.0}}, "a")


def test_a_preset_is_a_layer_under_the_file(tmp_path: Path) -> None:
    preset = Root(seed=5, quantizer=Fsq(levels=(2, 2)), path=Path("a"), critic=Optim())
    layer = layer_of(preset, "preset small")
    assert build(Root, [layer]) == preset
    assert layer.origins["quantizer.levels"] == "preset small"
    file = read_yaml(write(tmp_path, "quantizer: {levels: [3]}\ncritic: null\n"))
    config = build(Root, [layer, file, parse_sets(["optim.lr=1"])])
    assert config == Root(seed=5, quantizer=Fsq(levels=(3,)), path=Path("a"), optim=Optim(lr=1.0))


# --- dump_yaml and difference ---------------------------------------------------------------------------------------------------


def test_a_dump_is_complete_ordered_and_readable() -> None:
    text = dump_yaml(Root(blocks=(Fsq(),), weights={"b": 1.0, "a": 2e-5}))
    assert text == (
        "seed: 0\npath: photos\nnote: null\nquantizer:\n  kind: vq\n  codes: 512\n  decay: 0.99\n"
        "optim:\n  lr: 3.0e-4\n  betas: [0.9, 0.99]\ncritic: null\nblocks:\n- kind: fsq\n  levels: [8, 8]\n"
        "weights:\n  b: 1.0\n  a: 2.0e-5\nanything: null\n"
    )


@pytest.mark.parametrize(
    "note",
    ["3", "3e-4", "1e5", "null", "no", "on", "16:9", "2024-01-01", "007", "", " ", "a: b", "# x", "- x", "é\n\tü", "'", '"', "<<",
     "=", "x" * 300, "word " * 60, "\ufeff", "\x85", "a\u2028b", "a\r\nb", "\U0001f600",
     "[1, 2]", "\udcff", "true", "~", "%", "@", "a #b", "\x07",
     "0x1f", "1_0"],
)  # fmt: skip
def test_text_survives_writing(tmp_path: Path, note: str) -> None:
    config = Root(note=note, weights={note: 1.0})
    text = dump_yaml(config)
    assert build(Root, [read_yaml(write(tmp_path, text))]) == config
    assert yaml.safe_load(text)["note"] == note  # a YAML 1.1 reader agrees


@pytest.mark.parametrize(
    "value", [3e-4, 2.5e-4, 1e-3, 0.1, 0.0, -0.0, 1.0, 1e15, 1e16, 1.5e22, -1e-300, 5e-324, 1.7976931348623157e308]
)
def test_floats_stay_floats_for_every_reader(tmp_path: Path, value: float) -> None:
    text = dump_yaml(Root(weights={"w": value}))
    for read in (yaml.safe_load(text)["weights"]["w"], values_of(tmp_path, text)["weights"]["w"]):
        assert isinstance(read, float)
        assert repr(read) == repr(value)


def test_repeated_values_are_written_out(tmp_path: Path) -> None:
    shared = Optim(lr=1.0)
    text = dump_yaml(Root(optim=shared, critic=shared))
    assert "&" not in text
    assert build(Root, [read_yaml(write(tmp_path, text))]) == Root(optim=shared, critic=shared)


def test_difference_lists_dotted_keys() -> None:
    old = Root(seed=1, optim=Optim(lr=1.0), weights={"a": 1.0})
    assert difference(old, old) == []
    new = Root(seed=2, optim=Optim(lr=2.0), weights={"b": 1.0}, critic=Optim(), path=Path("b"))
    assert difference(old, new) == [
        ("seed", 1, 2),
        ("path", Path("photos"), Path("b")),
        ("optim.lr", 1.0, 2.0),
        ("critic", None, {"lr": 3e-4, "betas": (0.9, 0.99)}),
        ("weights.a", 1.0, None),
        ("weights.b", None, 1.0),
    ]
    changed = {key: (before, after) for key, before, after in difference(Root(), Root(quantizer=Fsq()))}
    assert changed["quantizer.kind"] == ("vq", "fsq")
    assert changed["quantizer.levels"] == (None, (8, 8))


# --- roots of several kinds -----------------------------------------------------------------------------------------------------


class ByVq(Config):
    net: Vq = Vq()
    speed: int = 1


class ByFsq(Config):
    net: Fsq = Fsq()
    depth: int = 1


ROOTS: Kinds[Any] = Kinds("net.kind", {"vq": ByVq, "fsq": ByFsq})


def test_one_value_chooses_the_root() -> None:
    assert build(ROOTS, []) == ByVq()
    assert build(ROOTS, [parse_sets(["speed=3"])]) == ByVq(speed=3)
    assert build(ROOTS, [parse_sets(["net={kind: fsq}", "depth=2"])]) == ByFsq(depth=2)
    assert build(ROOTS, [Layer.of({"net": {"kind": "vq"}}, "a"), Layer.of({"net": {"kind": "fsq"}}, "b")]) == ByFsq()
    for config in (ByVq(speed=2), ByFsq(depth=5)):
        assert build(ROOTS, [layer_of(config, "file")]) == config


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["depth=2"], r"^depth \(--set\): unknown key where net.kind is 'vq'; it belongs to 'fsq'$"),
        (["net={kind: fsq, codes: 2}"], r"^net.codes \(--set\): unknown key where net.kind is 'fsq'; it belongs to 'vq'$"),
        (["net.kind=fsk"], r"^net.kind \(--set\): found 'fsk'; expected 'vq' or 'fsq'; did you mean 'fsq'\?$"),
        (["sped=2"], "unknown key; did you mean"),
        (["net=3"], "found 3; expected a section"),
        (["net.kind=3"], "net.kind .*found 3; expected 'vq'"),
    ],
)
def test_keys_of_another_root_are_told(sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(ROOTS, [parse_sets(sets)])
