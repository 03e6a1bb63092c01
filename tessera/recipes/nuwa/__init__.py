"""NUWA (Wu et al. 2021): text or sketch to video, one token after another, each seeing what is near it in the last frames."""

from tessera.recipes.clips import clip_recipe

NUWA = clip_recipe("nuwa", "autoregressive", "text or sketch to video: a video tokenizer, then one token after another")
