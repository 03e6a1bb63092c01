"""Layers that two or more models use. They know the config base class and nothing else of the house."""
