"""What a sample's draw decides besides its crop: which caption it gets, whether it is mirrored; and the draws of its views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tessera.data.captions import names_side
from tessera.randomness import mix, mix_text

_VIEW = mix_text("view")


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


def view_draws(key: str, views: int, seed: int) -> list[int | None]:
    """Of the views of a sample that go into a token cache: the first is none, as in validation."""
    return [None, *(mix(seed, _VIEW, view, mix_text(key)) for view in range(1, views))]
