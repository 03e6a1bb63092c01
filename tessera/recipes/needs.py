"""What a stage reads of other runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.config import Config, ImageDataConfig, UserError


class NeedsConfig(Config):
    """What a stage reads of other stages."""

    tokenizer: str | None = None
    """RUN/tokenizer of another run or export, to use instead of training one in this run."""


def found_at(read: Callable[[str], Any], place: str) -> tuple[str, Any]:
    """Where a stage lies, which is elsewhere again if the run that is named took it over, and the config of its training."""
    stage = read(str(Path(place).absolute()))
    return str(stage.home), stage.config


def refuse_other_channels(data: ImageDataConfig, other: Any, origin: str) -> None:
    """Grey pictures cannot go through a tokenizer of coloured ones."""
    if other.data.channels != data.channels:
        raise UserError(
            f"{origin} was trained on pictures of {other.data.channels} channels, data.channels is {data.channels}; "
            f"set data.channels={other.data.channels}, or name another tokenizer"
        )
