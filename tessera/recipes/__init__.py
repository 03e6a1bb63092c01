"""Recipes: a root config with presets, the stages in order, and how a sample is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.config import Layer, UserError, build, nearest
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


def build_unnamed(recipe: Recipe, layers: Sequence[Layer], file: str) -> Any:
    """The config of a file that names no recipe, which an error says: its keys may be those of another one."""
    try:
        return build(recipe.config_type, layers)
    except UserError as error:
        told = f"({file} names no recipe, so it is read as one for {recipe.name}; write recipe: NAME in it)"
        raise UserError(f"{error}\n{told}") from None
