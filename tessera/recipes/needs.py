"""What a stage reads of other runs."""

from __future__ import annotations

from tessera.config import Config


class NeedsConfig(Config):
    """What a stage reads of other stages."""

    tokenizer: str | None = None
    """RUN/tokenizer of another run or export, to use instead of training one in this run."""
