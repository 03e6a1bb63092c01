"""The video tokenizer: clips <-> latent frames, strictly causal in time; a picture is a clip of one frame.

`conv` and `cvivit` the networks, `model` the tokenizer around either, `critic` its opponent, `losses` the two turns, `stage` what
the engine trains.
"""
