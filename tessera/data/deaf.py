"""Imported by the process from which workers are forked, and by nothing else: it makes that process deaf to signals.

A signal goes to the whole process group. Training catches it, saves and then ends its workers; were their parent gone by then,
that would end in an error message.
"""

from __future__ import annotations

import signal

import tessera.data.prepare
import tessera.data.tokens  # noqa: F401  (here once, so that no worker has to import torch)

for _number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_number, signal.SIG_IGN)
