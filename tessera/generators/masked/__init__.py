"""The masked generator: all hidden tokens of a grid are guessed at once, from those that are visible and the text.

Chang et al. 2022 (MaskGIT), Chang et al. 2023 (Muse). In: token grids of any number of axes. Out: a loss, or new grids.
"""
