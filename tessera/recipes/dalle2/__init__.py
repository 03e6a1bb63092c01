"""DALL-E 2 (Ramesh et al. 2022): text to the embedding of a picture, from there to a small picture, and to larger ones."""

from tessera.contracts import Recipe
from tessera.recipes.dalle2.config import Dalle2Config
from tessera.recipes.dalle2.drawing import Painter, way_to_draw
from tessera.recipes.dalle2.elsewhere import adopt
from tessera.recipes.dalle2.presets import PRESETS
from tessera.recipes.dalle2.stages import settle, steps

DALLE2 = Recipe(
    name="dalle2",
    medium="picture",
    summary="text to image: diffusion of an embedding, then of a small picture, then of larger ones",
    config_type=Dalle2Config,
    presets=PRESETS,
    steps=steps,
    adopt=adopt,
    settle=settle,
    opens=Painter,
    enters=Painter.stages_for,
    way=way_to_draw,
)
