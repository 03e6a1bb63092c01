"""`tessera demo`: captioned shapes, a tokenizer trained on them on the CPU, and what it makes of shapes it never saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tessera.data.sources import ImageFolder
from tessera.data.synth.shapes import write_shapes
from tessera.data.synth.shapes_oracle import oracle_accuracy
from tessera.engine.track import read_metrics
from tessera.media.images import write_png
from tessera.media.sheets import sheet
from tessera.nn.similarity import psnr
from tessera.pipeline import resolve, train
from tessera.sampling.session import load

NUM_PICTURES, SEED = 4000, 0


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Where things are and how good they are."""

    data: Path
    run: Path
    reconstructions: Path
    psnr: float  # held-out combinations, dB
    codes_used: float  # share of the codebook over the validation split
    oracle: dict[str, float]  # attributes that survive the way through the tokens


def run_demo(out: Path, steps: int | None = None) -> DemoResult:
    """Makes the data once; every call trains a new run."""
    data = out / "shapes"
    if not data.exists():
        write_shapes(
            data, NUM_PICTURES, SEED, image_size=32, max_shapes=1, num_shapes=3, num_colours=4, num_places=4, sizes=False
        )
    number = 1
    while (run := out / f"run-{number:03d}").exists():
        number += 1
    train(resolve("muse", preset="tiny", data=str(data), steps=steps), run=run)
    return judge(data, run)


def judge(data: Path, run: Path) -> DemoResult:
    """Reconstructs held-out combinations with the averaged weights of the last step, from ids alone."""
    session = load(run)
    source = ImageFolder.open(data / "heldout")
    real = np.stack([source.read(index) for index in range(len(source))])
    captions = [source.caption(index) or "" for index in range(len(source))]
    made = np.stack([np.asarray(picture) for picture in session.reconstruct(*real)])
    path = run / "reconstructions.png"
    write_png(path, sheet([list(real[:10]), list(made[:10])], row_names=["real", "made"], captions=captions[:10], scale=3))
    valid = [line for line in read_metrics(run / "tokenizer" / "metrics.jsonl") if line["kind"] == "valid"][-1]
    closeness = psnr(*(torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1 for pictures in (made, real)))
    return DemoResult(data, run, path, float(closeness.mean()), valid["codes_used"], oracle_accuracy(made, captions))
