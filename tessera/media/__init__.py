"""Media at the doors: files in, uint8 arrays out, and back. Nothing in this room knows a model, a batch or a config."""
