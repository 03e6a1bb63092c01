"""Muse (Chang et al. 2023): text to image by masked tokens: a tokenizer, a generator, and a second one for a finer grid."""

from tessera.contracts import Recipe
from tessera.recipes.muse.config import MuseConfig, base, large, small, tiny
from tessera.recipes.muse.drawing import Painter
from tessera.recipes.muse.stages import adopt, settle, steps

MUSE = Recipe(
    name="muse",
    medium="picture",
    summary="text to image: conv tokenizer, then masked tokens, then those of a finer grid",
    config_type=MuseConfig,
    presets={"tiny": tiny, "small": small, "base": base, "large": large},
    steps=steps,
    adopt=adopt,
    settle=settle,
    opens=Painter,
)
