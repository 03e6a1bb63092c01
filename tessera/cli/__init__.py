"""The command line: arguments in, one call, a message out. No logic."""

from tessera.cli.app import main

__all__ = ["main"]
