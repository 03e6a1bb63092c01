"""`small_shards.py N ARGUMENTS`: the program with caches of many small shards. As it is about to put the Nth file of a cache into
its place, it is killed; 0: never."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from typing import Any

from tessera.cli import main
from tessera.data import prepare, text_cache

prepare.SHARD_SAMPLES, text_cache.SHARD_CAPTIONS = 4, 4
replace, number = os.replace, count(1)


def die_or_replace(source: Any, target: Any) -> None:
    if "cache" in str(target) and next(number) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


if __name__ == "__main__":
    os.replace = die_or_replace
    main(sys.argv[2:])
