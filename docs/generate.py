"""Writes docs/config.md from the config classes: `make docs`. A test fails when the file is out of date."""

from __future__ import annotations

from pathlib import Path

from tessera.config import document
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
        parts.append(f"# Recipe `{recipe.name}`\n\n{document(recipe.config_type).rstrip()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "config.md").write_text(render(), encoding="utf8")
