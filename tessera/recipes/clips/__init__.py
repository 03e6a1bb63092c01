"""What recipes of clips share: all but the kind of generator that is their own."""

from tessera.contracts import Recipe
from tessera.recipes.clips.drawing import Animator
from tessera.recipes.clips.presets import Name, kinds_of, presets_of
from tessera.recipes.clips.stages import adopt, settle, steps


def clip_recipe(name: Name, kind: str, summary: str) -> Recipe:
    """A recipe whose generator is of this kind unless another one is asked for."""
    return Recipe(
        name=name,
        medium="clip",
        summary=summary,
        config_type=kinds_of(kind),
        presets=presets_of(name, kind),
        steps=steps,
        adopt=adopt,
        settle=settle,
        opens=Animator,
    )
