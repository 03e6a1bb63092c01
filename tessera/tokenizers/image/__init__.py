"""The image tokenizer: a convolutional autoencoder with a quantizer in the middle, trained with a patch critic.

`model` the network, `critic` its opponent, `losses` the two turns, `stage` what the engine trains.
"""
