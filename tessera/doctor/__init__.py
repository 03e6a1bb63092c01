"""Doctor: what this machine has, as one block to paste into a report, and a proof that resume is exact on it."""
