"""Tokens one after another: an outer transformer over groups of them, and inside a group a small decoder for each level."""
