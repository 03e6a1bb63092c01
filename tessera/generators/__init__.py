"""Generators: tokens, pictures or vectors, given a condition."""
