"""Recipes: a root config with presets, the stages in order, and how a sample is made from them."""

from __future__ import annotations

from tessera.contracts import Recipe
from tessera.recipes.muse import MUSE

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (MUSE,)}
