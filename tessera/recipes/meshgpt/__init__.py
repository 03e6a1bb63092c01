"""Text to mesh: exact coordinates or learned codes, then an autoregressive generator, face by face."""

from tessera.contracts import Recipe
from tessera.recipes.meshgpt.config import KINDS, PRESETS
from tessera.recipes.meshgpt.drawing import Sculptor
from tessera.recipes.meshgpt.stages import adopt, settle, steps

MESHGPT = Recipe(
    name="meshgpt",
    summary="text to mesh: exact coordinates (or a graph autoencoder), then faces one after another",
    medium="mesh",
    config_type=KINDS,
    presets=PRESETS,
    steps=steps,
    adopt=adopt,
    settle=settle,
    opens=Sculptor,
)
