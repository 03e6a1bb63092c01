"""Recipes: a root config with presets, the stages in order, and how a sample is made from them."""

from __future__ import annotations

from tessera.config import UserError, nearest
from tessera.contracts import Recipe
from tessera.recipes.dalle2 import DALLE2
from tessera.recipes.meshgpt import MESHGPT
from tessera.recipes.muse import MUSE
from tessera.recipes.nuwa import NUWA
from tessera.recipes.phenaki import PHENAKI

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (MUSE, DALLE2, PHENAKI, NUWA, MESHGPT)}


def find_recipe(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        hint = nearest(name, RECIPES)
        raise UserError(
            f"no recipe and no file is called {name!r}{f'; did you mean {hint!r}?' if hint else ''}; "
            f"recipes: {', '.join(RECIPES)}; or name a .yaml file"
        )
    return RECIPES[name]
