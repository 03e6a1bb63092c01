"""The one interface: configs of every kind, what they settle to, and what reads and encodes without a pretrained model."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.batches import Text, TextStates
from tessera.config import Config, UserError, build, document, dump_yaml, read_yaml
from tessera.text.bytes import ByteEncoder, read_bytes
from tessera.text.classes import MOST_CLASSES, ClassEncoder
from tessera.text.encoders import (
    ByteTextConfig,
    ClassTextConfig,
    MiniLMTextConfig,
    NoTextConfig,
    PrecomputedTextConfig,
    TextConfig,
    TransformersTextConfig,
    build_encoder,
    is_frozen,
    reader,
    settle,
    text_width,
)

CAPTIONS = ["a red cat", None, "", "猫", "x" * 1000]
KEYS = ["a", "b", "c", "d", "e"]


class Root(Config):
    """A config with a text section."""

    text: TextConfig = ByteTextConfig()
    """The text encoder."""


ALL = [
    ByteTextConfig(),
    MiniLMTextConfig(),
    TransformersTextConfig(kind="t5", path="google/t5-v1_1-base", width=768),
    TransformersTextConfig(kind="clip", path="/models/clip", width=512),
    PrecomputedTextConfig(path=Path("states"), length=4, width=32),
    ClassTextConfig(names=("cat", "dog")),
    NoTextConfig(),
]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_a_config_comes_back_from_its_own_file(config: TextConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(Root(text=config)))
    assert build(Root, [read_yaml(tmp_path / "config.yaml")]).text == config
    assert text_width(config) > 0
    assert repr(config.kind) in document(Root)


def test_which_need_a_pretrained_model() -> None:
    assert [is_frozen(config) for config in ALL] == [False, True, True, True, False, False, False]
    nets = [build_encoder(config) for config in ALL]
    assert [type(net) for net in nets] == [ByteEncoder, *[type(None)] * 4, ClassEncoder, type(None)]


@pytest.mark.parametrize(
    "config", [ByteTextConfig(length=16), ClassTextConfig(names=("a red cat", "猫", "x" * 1000)), NoTextConfig()]
)
def test_readers_travel_to_a_worker_and_give_equal_batches(config: TextConfig) -> None:
    read = reader(config)
    batch, again = read(CAPTIONS, KEYS), pickle.loads(pickle.dumps(read))(CAPTIONS, KEYS)
    net = build_encoder(config)
    for found in (batch, again):
        states = net(found) if net is not None else found
        assert isinstance(states, TextStates)
        assert states.states.shape == (5, states.mask.shape[1], text_width(config))
        assert states.pooled.shape == (5, text_width(config))
        assert not states.mask[1:3].any()
        assert states.pooled[1:3].eq(0).all()
        assert states.states.isfinite().all()
    torch.testing.assert_close(batch.mask, again.mask)


def test_the_byte_reader_is_read_bytes() -> None:
    found = reader(ByteTextConfig(length=16))(CAPTIONS, KEYS)
    assert isinstance(found, Text)
    assert found.ids.equal(read_bytes(CAPTIONS, 16).ids)


def test_no_text_shows_nothing_whatever_the_caption() -> None:
    found = reader(NoTextConfig())(CAPTIONS, KEYS)
    assert isinstance(found, TextStates)
    assert found.states.shape == (5, 1, text_width(NoTextConfig()))
    assert not found.mask.any()
    assert found.states.eq(0).all()
    assert found.pooled.eq(0).all()


def test_states_on_the_disk_have_no_plain_reader() -> None:
    with pytest.raises(TypeError, match="CachedText"):
        reader(MiniLMTextConfig())


# ---- classes


def test_classes_are_the_sorted_distinct_captions() -> None:
    config = settle(ClassTextConfig(width=8), iter(["dog", "cat", None, "", "dog", "bird", " "]))
    assert isinstance(config, ClassTextConfig)
    assert config.names == ("bird", "cat", "dog")
    assert settle(config, ["dog"]) == config
    found = reader(config)(["dog", None, "bird", ""], KEYS[:4])
    assert isinstance(found, Text)
    assert found.ids.tolist() == [[3], [0], [1], [0]]
    net = build_encoder(config)
    assert net is not None
    states = net(found)
    assert states.states.shape == (4, 1, 8)
    assert states.mask.tolist() == [[True], [False], [True], [False]]
    torch.testing.assert_close(states.pooled[0], net.embed.weight[3])
    assert states.pooled[1].eq(0).all()
    states.pooled.sum().backward()
    assert net.embed.weight.grad.abs().sum(1).gt(0).tolist() == [False, True, False, True]


def test_an_unknown_class_names_the_nearest() -> None:
    config = ClassTextConfig(names=("bird", "cat", "dog"))
    with pytest.raises(UserError, match=r"'cats' is not a class.*'bird', 'cat', 'dog'.*did you mean 'cat'\?"):
        reader(config)(["cats"], ["a"])
    with pytest.raises(UserError, match="is not a class"):
        settle(config, ["dog", "fish"])
    many = ClassTextConfig(names=tuple(f"class {index}" for index in range(40)))
    with pytest.raises(UserError, match="and 28 more"):
        reader(many)(["zebra"], ["a"])


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ([f"caption {index}" for index in range(101)], "101 distinct captions among 101; expected classes of two samples"),
        ([f"caption {index}" for index in range(MOST_CLASSES + 1)] * 2, "at most 10000 classes"),
        ([None, ""], "no caption to take classes from"),
    ],
)
def test_captions_that_are_no_classes(captions: list[str | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settle(ClassTextConfig(), captions)


def test_a_handful_of_pictures_may_each_be_a_class() -> None:
    config = settle(ClassTextConfig(), ["one", "two", "three"])
    assert isinstance(config, ClassTextConfig)
    assert len(config.names) == 3


def test_names_given_by_hand_are_checked() -> None:
    with pytest.raises(ValidationError, match="'cat' 2 times"):
        ClassTextConfig(names=("cat", "dog", "cat"))
    with pytest.raises(ValidationError, match="empty name"):
        ClassTextConfig(names=("cat", ""))
    with pytest.raises(UserError, match=r"text\.names is empty"):
        build_encoder(ClassTextConfig())


# ---- precomputed


def test_precomputed_takes_length_and_width_from_the_files(tmp_path: Path) -> None:
    (tmp_path / "dogs").mkdir()
    np.save(tmp_path / "a.npy", np.zeros((3, 8), np.float32))
    np.save(tmp_path / "dogs" / "b.npy", np.zeros((5, 8), np.float16))
    np.save(tmp_path / "c.npy", np.zeros(8))
    config = settle(PrecomputedTextConfig(path=tmp_path), [])
    assert config == PrecomputedTextConfig(path=tmp_path, length=5, width=8)
    assert settle(PrecomputedTextConfig(path=tmp_path, length=2), []) == config.model_copy(update={"length": 2})
    with pytest.raises(UserError, match=r"text\.width is 4"):
        settle(PrecomputedTextConfig(path=tmp_path, width=4), [])
    np.save(tmp_path / "d.npy", np.zeros((2, 9), np.float32))
    with pytest.raises(UserError, match=r"d\.npy has 9 channels, .*a\.npy has 8"):
        settle(PrecomputedTextConfig(path=tmp_path), [])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 8), np.int64), "int64 of shape"),
        (np.zeros((1, 2, 8)), r"shape \(1, 2, 8\)"),
        (np.array({"a": 1}), "cannot be read"),
        (np.array(1.0), "expected floats"),
    ],
)
def test_precomputed_files_of_another_form(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(UserError, match=message):
        settle(PrecomputedTextConfig(path=tmp_path), [])


def test_precomputed_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        settle(PrecomputedTextConfig(path=tmp_path / "nowhere"), [])
    with pytest.raises(UserError, match=r"holds no \.npy"):
        settle(PrecomputedTextConfig(path=tmp_path), [])


# ---- what is imported, and when


def test_a_width_that_is_not_known_yet() -> None:
    with pytest.raises(UserError, match="settle the config"):
        text_width(TransformersTextConfig(kind="t5", path="google/t5-v1_1-base"))


def test_transformers_is_not_imported_until_it_is_used() -> None:
    code = "import sys, tessera.text.encoders; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("config", [MiniLMTextConfig(), TransformersTextConfig(kind="t5", path="google/t5-v1_1-base")])
def test_a_missing_package_names_the_extra(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.text.frozen.importlib.util.find_spec", lambda name: None)
    from tessera.text.encoders import load_frozen

    with pytest.raises(UserError, match=r"pip install 'tessera-gen\[text\]'"):
        load_frozen(config, torch.device("cpu"))
