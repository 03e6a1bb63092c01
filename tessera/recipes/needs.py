"""What a stage reads of other runs."""

from __future__ import annotations

from typing import Any

from tessera.config import Config, ImageDataConfig, UserError


class NeedsConfig(Config):
    """What a stage reads of other stages."""

    tokenizer: str | None = None
    """RUN/tokenizer of another run or export, to use instead of training one in this run."""


def refuse_other_channels(data: ImageDataConfig, other: Any, origin: str) -> None:
    """Grey pictures cannot go through a tokenizer of coloured ones."""
    if other.data.channels != data.channels:
        raise UserError(
            f"{origin} was trained on pictures of {other.data.channels} channels, data.channels is {data.channels}; "
            f"set data.channels={other.data.channels}, or name another tokenizer"
        )
