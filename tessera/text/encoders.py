"""The one interface to all text encoders: a tagged config, what it settles to, and what is built from it.

Three ways lead from captions to states. A `reader` turns them into ids, in the loader's processes, for a net that the stage
trains (`bytes`, `classes`) or for none at all (`none`). A frozen model (`minilm`, `t5`, `clip`) encodes each caption once, ahead
of time, into a cache. Or the user brings the states, a file for each sample (`precomputed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeGuard

from pydantic import Field
from torch import nn

from tessera.batches import ReadText, Text, TextStates
from tessera.config import Config, UserError
from tessera.text.bytes import ByteEncoder, ByteTextConfig, read_bytes
from tessera.text.classes import ClassEncoder, ClassReader, ClassTextConfig, settle_classes
from tessera.text.frozen import (
    MINILM_WIDTH,
    FrozenEncoder,
    FrozenTextConfig,
    MiniLMTextConfig,
    TransformersTextConfig,
    load_frozen,
    settle_model,
)
from tessera.text.precomputed import PrecomputedTextConfig, settle_precomputed

__all__ = [
    "ByteReader", "ByteTextConfig", "ClassReader", "ClassTextConfig", "FrozenEncoder", "FrozenTextConfig", "MiniLMTextConfig",
    "NoTextConfig", "NoTextReader", "PrecomputedTextConfig", "TextConfig", "TransformersTextConfig",
    "build_encoder", "encode_text", "is_frozen", "load_frozen", "reader", "settle", "text_width",
]  # fmt: skip

NO_TEXT_WIDTH = 8  # of states that nobody sees


class NoTextConfig(Config):
    """No text: the generator is unconditional, and captions are not read."""

    kind: Literal["none"] = "none"
    """The kind of encoder."""


TextConfig = Annotated[
    ByteTextConfig | MiniLMTextConfig | TransformersTextConfig | PrecomputedTextConfig | ClassTextConfig | NoTextConfig,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class ByteReader:
    """Captions -> ids b m. Picklable."""

    length: int

    def __call__(self, captions: Sequence[str | None], keys: Sequence[str]) -> Text:
        return read_bytes(captions, self.length)


@dataclass(frozen=True, slots=True)
class NoTextReader:
    """Captions -> one state that is masked out. Picklable."""

    def __call__(self, captions: Sequence[str | None], keys: Sequence[str]) -> TextStates:
        return TextStates.none(len(captions), NO_TEXT_WIDTH)


def is_frozen(config: TextConfig) -> TypeGuard[FrozenTextConfig]:
    """Whether a pretrained model encodes the captions, ahead of training, so that `load_frozen` is asked for it."""
    return isinstance(config, (MiniLMTextConfig, TransformersTextConfig))


def text_width(config: TextConfig) -> int:
    """Channels of the states, from a settled config alone."""
    if isinstance(config, MiniLMTextConfig):
        return MINILM_WIDTH
    if isinstance(config, NoTextConfig):
        return NO_TEXT_WIDTH
    if config.width is None:
        raise UserError(f"text.width is not known; settle the config, or set text.width to the channels of {config.path}")
    return config.width


def settle(config: TextConfig, captions: Iterable[str | None]) -> TextConfig:
    """The same config, completed with what only the data or the model knows: class names, widths, absolute paths.

    `captions` are those of all samples; they are read only where classes are made of them.
    """
    if isinstance(config, ClassTextConfig):
        return settle_classes(config, captions)
    if isinstance(config, TransformersTextConfig):
        return settle_model(config)
    if isinstance(config, PrecomputedTextConfig):
        return settle_precomputed(config)
    return config


def build_encoder(config: TextConfig) -> nn.Module | None:
    """The net that the stage trains with its generator; None where the states come from elsewhere, or there are none."""
    if isinstance(config, ByteTextConfig):
        return ByteEncoder(config)
    if isinstance(config, ClassTextConfig):
        if not config.names:
            raise UserError("text.names is empty; settle the config with the captions, or name the classes")
        return ClassEncoder(config)
    return None


def encode_text(nets: Mapping[str, nn.Module], text: Text | TextStates) -> TextStates:
    """Captions of a batch by the stage's own encoder, the net `text`; those of a frozen one come encoded."""
    if isinstance(text, TextStates):
        return text
    states = nets["text"](text)
    assert isinstance(states, TextStates)
    return states


def reader(config: TextConfig) -> ReadText:
    """What reads captions where no model is needed. Frozen and precomputed states have their own, in `data.text_cache`."""
    if isinstance(config, ByteTextConfig):
        return ByteReader(config.length)
    if isinstance(config, ClassTextConfig):
        return ClassReader(config.names)
    if isinstance(config, NoTextConfig):
        return NoTextReader()
    raise TypeError(f"text of kind {config.kind!r} is read from states on the disk: CachedText or PrecomputedText")
