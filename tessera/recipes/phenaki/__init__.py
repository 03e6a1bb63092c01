"""Phenaki (Villegas et al. 2022): text to video of any length by masked tokens: a causal video tokenizer, and a generator."""

from tessera.contracts import Recipe
from tessera.recipes.phenaki.config import PhenakiConfig, base, large, small, tiny
from tessera.recipes.phenaki.drawing import Animator
from tessera.recipes.phenaki.stages import adopt, settle, steps

PHENAKI = Recipe(
    name="phenaki",
    medium="clip",
    summary="text to video of any length: causal video tokenizer, then masked tokens",
    config_type=PhenakiConfig,
    presets={"tiny": tiny, "small": small, "base": base, "large": large},
    steps=steps,
    adopt=adopt,
    settle=settle,
    opens=Animator,
)
