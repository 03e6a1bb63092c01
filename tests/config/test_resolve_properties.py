"""Properties of the real config: whatever a file or --set holds, the answer is a config, or a message and exit code 2."""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.cli import main
from tessera.config import Config, UserError, dump_yaml
from tessera.pipeline import resolve
from tessera.recipes import RECIPES

MUSE = RECIPES["muse"].presets["tiny"]()


def paths(config: Config, before: str = "") -> list[str]:
    """Every dotted key of a config."""
    found = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        found.append(before + name)
        found += paths(value, f"{before}{name}.") if isinstance(value, Config) else []
    return found


PATHS = paths(MUSE)
KEYS = sorted({part for path in PATHS for part in path.split(".")} | {"kind", "learning_rate", "0", "", "a.b", "<<"})


WORDS = ["muse", "tiny", "fsq", "vq", "fp32", "auto", "center", "3e-4", "null", "no", "1:30", "", "~", ".inf", "0x1F"]
BREAKS = ["", "\n", "  ", "\t", ": ", "- ", "[", "}", "&a ", "*a", "!!python/object:os.system ", "'", '"', "|", "\x00"]


def leaves() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.integers(0, 8) | st.floats() | st.sampled_from([10**400, -1, 2**63, 1e308])
    other = st.text(max_size=6) | st.binary(max_size=4) | st.dates()
    return st.none() | st.booleans() | numbers | st.sampled_from(WORDS) | other


def values() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(KEYS) | st.text(max_size=4) | st.integers() | st.none() | st.booleans()
    return st.recursive(
        leaves(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=6
    )


def answer(target: str, *sets: str) -> Any:
    """A config, or None for a message of one kind; anything else fails the test."""
    try:
        return resolve(target, sets=sets)
    except UserError as error:
        return None if str(error).strip() else pytest.fail("an empty message")


def in_file(text: str | bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf8", "surrogatepass"))
        return answer(str(path))


def nested(path: str, value: Any) -> Any:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), values())
def test_any_value_in_the_place_of_one(path: str, value: Any) -> None:
    config = in_file(yaml.safe_dump(nested(path, value), allow_unicode=True))
    if config is not None:
        assert in_file(dump_yaml(config)) == config, "what was accepted is written and read back equal"


@settings(max_examples=80, deadline=None)
@given(values())
def test_any_yaml(value: Any) -> None:
    in_file(yaml.safe_dump(value, allow_unicode=True))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_config_with_a_piece_cut_out_or_put_in(data: st.DataObject) -> None:
    """Broken the way files break: half written, joined, indented by hand."""
    text = dump_yaml(MUSE)
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, min(len(text), first + 40)))
    in_file(text[:first] + data.draw(st.sampled_from(BREAKS)) + text[last:])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS) | st.text(max_size=12), st.sampled_from(["=", "", "==", ":", "+="]), leaves().map(str))
def test_any_set(path: str, sign: str, value: str) -> None:
    answer("muse", f"{path}{sign}{value}")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), values()), max_size=3))
def test_the_command_line_ends_with_a_code_and_no_traceback(pairs: list[tuple[str, Any]]) -> None:
    """Values as YAML writes them on one line, which the shell hands over as they are."""
    flow = {"default_flow_style": True, "allow_unicode": True, "width": 10**9}
    items = [f"{path}={yaml.safe_dump(value, **flow).strip()}" for path, value in pairs]
    arguments = ["train", "muse", *(part for item in items for part in ("--set", item)), "--print-config"]
    out, err = io.StringIO(), io.StringIO()
    code = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    assert code in (0, 2), (arguments, err.getvalue())
    assert "Traceback" not in err.getvalue()
    assert bool(err.getvalue().strip()) == (code == 2)
