"""`python -m tessera` is the same program as `tessera`."""

from tessera.cli import main

main()
