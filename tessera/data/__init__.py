"""Data: the user's files in, numbered captioned samples out, and a check that names whatever could not be used."""
