"""`small_shards.py N ARGUMENTS`: the program with caches of many small shards. As it is about to put the Nth file of a cache into
its place, it is killed; 0: never. The disk of rank 1 takes SHARD_SECONDS more for each shard of tokens."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from typing import Any

from tessera.cli import main
from tessera.data import prepare, text_cache

prepare.SHARD_SAMPLES, text_cache.SHARD_CAPTIONS = 4, 4
replace, number = os.replace, count(1)
write_shard, slow = prepare.write_shard, float(os.environ.get("SHARD_SECONDS", 0))


def die_or_replace(source: Any, target: Any) -> None:
    if "cache" in str(target) and next(number) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


def write_slowly(*arguments: Any) -> None:
    time.sleep(slow if os.environ.get("RANK") == "1" else 0)
    write_shard(*arguments)


if __name__ == "__main__":
    prepare.write_shard = write_slowly
    os.replace = die_or_replace
    main(sys.argv[2:])
