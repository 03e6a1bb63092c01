"""For all tests: one thread a process, so that two of them fit on two cores and results repeat."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
