"""The data that ranks share."""

from tests.processes import shapes, workshop

__all__ = ["shapes", "workshop"]
