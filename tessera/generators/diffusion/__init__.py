"""Denoisers: pictures or vectors out of noise, by whatever a condition says."""
