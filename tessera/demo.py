"""`tessera demo`: captioned shapes, a tokenizer trained on them on the CPU, and what it makes of shapes it never saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tessera.batches import to_uint8
from tessera.data.sources import ImageFolder
from tessera.data.synth.shapes import write_shapes
from tessera.data.synth.shapes_oracle import oracle_accuracy
from tessera.engine.track import read_metrics
from tessera.media.images import write_png
from tessera.media.sheets import sheet
from tessera.nn.similarity import psnr
from tessera.pipeline import load_nets, resolve, train
from tessera.tokenizers.image.model import ImageTokenizer

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


@torch.no_grad()
def judge(data: Path, run: Path) -> DemoResult:
    """Reconstructs held-out combinations with the averaged weights of the last step, from ids alone."""
    tokenizer = load_nets(run, "tokenizer")["tokenizer"]
    assert isinstance(tokenizer, ImageTokenizer)
    source = ImageFolder.open(data / "heldout")
    real = (
        torch.from_numpy(np.stack([source.read(index) for index in range(len(source))])).permute(0, 3, 1, 2).float() / 127.5 - 1
    )
    captions = [source.caption(index) or "" for index in range(len(source))]
    made = torch.cat([tokenizer.decode(tokenizer.encode(chunk)) for chunk in real.split(64)])
    pictures = [to_uint8(images).permute(0, 2, 3, 1).numpy() for images in (real, made)]
    path = run / "reconstructions.png"
    write_png(path, sheet([list(row[:10]) for row in pictures], row_names=["real", "made"], captions=captions[:10], scale=3))
    valid = [line for line in read_metrics(run / "tokenizer" / "metrics.jsonl") if line["kind"] == "valid"][-1]
    accuracy = oracle_accuracy(pictures[1], captions)
    return DemoResult(data, run, path, float(psnr(made, real).mean()), valid["codes_used"], accuracy)
