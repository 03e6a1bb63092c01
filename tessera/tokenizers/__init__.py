"""Tokenizers: data <-> tokens, one folder a modality."""
