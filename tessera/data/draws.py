"""What a sample's draw decides besides its crop: which caption it gets, and whether it is mirrored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tessera.data.captions import names_side
from tessera.randomness import mix


def drawn_caption(captions: Sequence[str], draw: int | None) -> str | None:
    """One of several, another one each epoch; the first where nothing is drawn."""
    if not captions:
        return None
    return captions[0 if draw is None else mix(draw, 5) % len(captions)]


def mirrors(flip: bool | Literal["always"], captions: Sequence[str], draw: int | None) -> bool:
    """Half of the draws; never a sample whose captions say left or right, unless that is asked for."""
    if draw is None or not flip or mix(draw, 4) % 2 == 0:
        return False
    return flip == "always" or not names_side(captions)
