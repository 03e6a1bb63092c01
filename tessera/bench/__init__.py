"""The named cases of `tessera bench`: what is timed, at which size, and how many operations it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tessera.bench.diffusion import CASES as DIFFUSION_CASES
from tessera.bench.grids import CASES as GRID_CASES
from tessera.bench.images import encode_case, loader_case, train_case, train_default_case
from tessera.bench.masked import large_case, sample_case
from tessera.bench.masked import train_case as train_masked_case
from tessera.bench.meshes import CASES as MESH_CASES
from tessera.bench.timing import device_facts
from tessera.bench.videos import CASES as VIDEO_CASES
from tessera.config import UserError, nearest

CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "image.tokenizer.train": train_case,
    "image.tokenizer.encode": encode_case,
    "image.tokenizer.default": train_default_case,
    "image.loader": loader_case,
    "image.maskgit.train": train_masked_case,
    "image.maskgit.sample": sample_case,
    "image.maskgit.400m": large_case,
    **DIFFUSION_CASES,
    **MESH_CASES,
    **VIDEO_CASES,
    **GRID_CASES,
}


def run_cases(names: Sequence[str], data: Path | None = None) -> Iterator[dict[str, Any]]:
    """One row a case."""
    for name in names:
        if name not in CASES:
            hint = nearest(name, CASES)
            raise UserError(
                f"no bench case is called {name!r}{f'; did you mean {hint!r}?' if hint else ''}; there are {', '.join(CASES)}"
            )
    facts = device_facts()
    for name in names or CASES:
        torch.compiler.reset()  # another case's shapes would make this one's dynamic
        yield {"case": name, **CASES[name](data), **facts}
