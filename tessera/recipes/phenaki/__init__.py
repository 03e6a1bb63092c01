"""Phenaki (Villegas et al. 2022): text to video of any length by masked tokens: a causal video tokenizer, and a generator."""

from tessera.recipes.clips import clip_recipe

PHENAKI = clip_recipe("phenaki", "masked", "text to video of any length: causal video tokenizer, then masked tokens")
