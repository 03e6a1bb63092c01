"""Mesh tokenizers: exact coordinates, which need no training, and a graph autoencoder with residual codes."""
