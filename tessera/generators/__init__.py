"""Generators: tokens given a condition."""
