"""Data sets made by the program itself, each with an oracle that reads a sample back: numbers in, folders out."""
