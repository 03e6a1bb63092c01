"""Does super-resolution look at its condition, and where? PSNR of fine pictures drawn from the coarse tokens of real ones: as
they are, with their cells shuffled, and with those of another picture.

    python bench/superres.py RUN [--n 256]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.batches import from_uint8, to_uint8
from tessera.config import UserError
from tessera.data.synth.shapes_oracle import oracle_accuracy
from tessera.evals.material import Material, load_material
from tessera.generators.masked.sample import sample
from tessera.nn.similarity import psnr
from tessera.recipes.captions import Prompts
from tessera.sampling.session import Session

CHUNK = 64


def main() -> None:
    """One row for each condition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--n", type=int, default=256)
    arguments = parser.parse_args()
    session = tessera.load(arguments.run)
    if "superres" not in session.nets:
        raise UserError(f"{arguments.run} has no trained stage superres")
    data = session.config.data.at(session.resolution)
    material = load_material(data, most_train=1, most_held_out=arguments.n, seed=0)
    captions = [caption or "" for caption in material.held_out.captions]
    real = from_uint8(torch.from_numpy(material.held_out.pictures).permute(0, 3, 1, 2))
    for name, drawn in rows(session, real, captions).items():
        print(f"{name:<28} PSNR {psnr(drawn, real).mean():.2f} dB{told(material, drawn, captions)}", flush=True)


def told(material: Material, drawn: Tensor, captions: list[str]) -> str:
    """The oracle's word, where there is one."""
    if material.oracle is None:
        return ""
    pictures = to_uint8(drawn).permute(0, 2, 3, 1).numpy()
    return f", oracle joint {oracle_accuracy(pictures, captions)['joint']:.1%}"


@torch.no_grad()
def rows(session: Session, real: Tensor, captions: list[str]) -> dict[str, Tensor]:
    """Pictures on the CPU, by condition."""
    coarse: Any = session.nets["tokenizer"]["tokenizer"]
    fine: Any = session.nets.get("fine_tokenizer", session.nets["tokenizer"])["tokenizer"]
    nets, prompts = session.nets["superres"], Prompts(session.config.text, session.device)
    generator: Any = nets["generator"]
    side = session.config.data.resolution
    found: dict[str, list[Tensor]] = {}
    for first in range(0, len(real), CHUNK):
        part = real[first : first + CHUNK].to(session.device)
        small = F.interpolate(part, size=(side, side), mode="bilinear", antialias=True)
        grid = coarse.encode(small)
        low = grid.flatten(1)
        cells = torch.from_numpy(np.random.default_rng(first).permuted(np.tile(np.arange(low.shape[1]), (len(low), 1)), axis=1))
        conditions = {"true": low, "cells shuffled": low.gather(1, cells.to(low.device)), "of another picture": low.roll(1, 0)}
        text = prompts(nets, captions[first : first + CHUNK])
        seeds = torch.arange(first, first + len(part), device=session.device)
        for name, condition in conditions.items():
            ids = sample(generator, text, seeds, session.config.sample.superres, low=condition).unflatten(1, generator.grid)
            found.setdefault(f"coarse tokens: {name}", []).append(fine.decode(ids).clamp(-1, 1).cpu())
        found.setdefault("fine tokenizer", []).append(fine.decode(fine.encode(part)).clamp(-1, 1).cpu())
        enlarged = F.interpolate(coarse.decode(grid), size=part.shape[-2:], mode="bilinear")
        found.setdefault("coarse tokenizer, enlarged", []).append(enlarged.clamp(-1, 1).cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


if __name__ == "__main__":
    main()
