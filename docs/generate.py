"""Writes docs/config.md from the config classes: `make docs`. A test fails when the file is out of date."""

from __future__ import annotations

from pathlib import Path

from tessera.config import Config, Kinds, document
from tessera.contracts import Recipe
from tessera.recipes import RECIPES

HEADER = """# Configuration

Generated from the config classes by `make docs`; do not edit. A file needs only the keys that differ from its preset:
`tessera train muse --print-config` prints all of them, `--set KEY=VALUE` changes one. Defaults here are those of the classes;
presets change many.
"""


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for recipe in RECIPES.values():
        parts.append(f"# Recipe `{recipe.name}`\n\n{others_of(recipe)}{document(own_type(recipe)).rstrip()}\n")
    return "\n".join(parts)


def own_type(recipe: Recipe) -> type[Config]:
    """The root config of a recipe; of several, the one of its presets."""
    return type(next(iter(recipe.presets.values()))())


def others_of(recipe: Recipe) -> str:
    """Where the keys of its other kinds stand."""
    if not isinstance(recipe.config_type, Kinds):
        return ""
    homes = {own_type(other): other.name for other in RECIPES.values()}
    others = {kind: homes[found] for kind, found in recipe.config_type.types.items() if found is not own_type(recipe)}
    return "".join(
        f"With `{recipe.config_type.key}: {kind}` the keys are those of recipe `{name}`.\n\n" for kind, name in others.items()
    )


if __name__ == "__main__":
    (Path(__file__).parent / "config.md").write_text(render(), encoding="utf8")
