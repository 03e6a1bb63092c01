"""Captions on their two ways to a generator: in training from the user's files, in use from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tessera.batches import ReadText, Text, TextStates
from tessera.contracts import Nets
from tessera.data.loader import Feed
from tessera.data.sources import Source, captions_of
from tessera.data.text_cache import CachedText, write_text_states
from tessera.data.text_files import PrecomputedText
from tessera.text.encoders import (
    FrozenEncoder,
    PrecomputedTextConfig,
    TextConfig,
    encode_text,
    is_frozen,
    load_frozen,
    reader,
    settle,
    text_width,
)


def training_text(config: TextConfig, feed: Feed) -> ReadText:
    """What reads the captions of a batch. A frozen encoder runs here, once, over all of them."""
    if isinstance(config, PrecomputedTextConfig):
        keys = [feed.source.key(index) for index in range(len(feed.source))]
        return PrecomputedText.open(Path(config.path), config.length or 1, text_width(config), keys)
    if not is_frozen(config):
        return reader(config)
    encoder = load_frozen(config, feed.device)
    captions = [caption for index in range(len(feed.source)) for caption in captions_of(feed.source, index)]
    feed.say(f"cache: {len(set(captions)):,} captions through {config.kind}, in {feed.caches}")
    states = write_text_states(
        feed.caches, captions, encoder.encode, encoder.fingerprint, rank=feed.cut.rank, world_size=feed.cut.world_size,
        wait=feed.wait, check=feed.check,
    )  # fmt: skip
    feed.uses(states)
    return CachedText(states)


class Prompts:
    """Prompts -> states on the device, by the encoder that a stage trained or by a frozen one, which is loaded once."""

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self._frozen: FrozenEncoder | None = None

    def __call__(self, nets: Nets, captions: Sequence[str | None]) -> TextStates:
        """An absent prompt is an empty one. Of precomputed states a prompt is the key."""
        return encode_text(nets, self.read(captions))

    def read(self, captions: Sequence[str | None]) -> Text | TextStates:
        """As a batch of training has them: for an encoder that was trained here, or the states of another."""
        config = self.config
        if is_frozen(config):
            self._frozen = self._frozen or load_frozen(config, self.device)
            return self._frozen.encode(captions).to(self.device)
        if isinstance(config, PrecomputedTextConfig):
            keys = [caption or "" for caption in captions]
            known = PrecomputedText.open(Path(config.path), config.length or 1, text_width(config), filter(None, keys))
            return known(captions, keys).to(self.device)
        return reader(config)(captions, [""] * len(captions)).to(self.device)


def settle_captions(config: TextConfig, source: Source) -> TextConfig:
    """The text section with what only the captions know: all of them, so that a class of validation alone is one, too."""
    return settle(config, (caption for index in range(len(source)) for caption in captions_of(source, index)))
