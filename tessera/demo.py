"""`tessera demo`: captioned shapes, a whole text-to-image model trained on them on the CPU, and what it draws from captions whose
combinations it never saw, checked by an oracle."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tessera.config import Layer
from tessera.data.sources import ImageFolder
from tessera.data.synth.shapes import write_shapes
from tessera.data.synth.shapes_oracle import oracle_accuracy, score
from tessera.files import free_folder
from tessera.media.images import Pixels, write_png
from tessera.media.pages import Figure, page
from tessera.media.sheets import sheet
from tessera.pipeline import resolve, train
from tessera.sampling.request import make_request
from tessera.sampling.session import load

NUM_PICTURES, SEED = 4000, 0
NUM_DRAWN, NUM_SHOWN = 192, 48
CHUNK = 64  # pictures drawn at once: on a CPU more at a time is faster


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Where things are and how good they are."""

    data: Path
    run: Path
    sheet: Path
    page: Path
    oracle: dict[str, dict[str, float]]  # what held-out pictures, their reconstructions and the drawn ones show of their captions
    seconds: float


def run_demo(out: Path, steps: int | None = None) -> DemoResult:
    """Makes the data once; every call trains a new run."""
    started = time.monotonic()
    data = out / "shapes"
    if not data.exists():
        write_shapes(
            data, NUM_PICTURES, SEED, image_size=32, max_shapes=1, num_shapes=3, num_colours=4, num_places=4, sizes=False
        )
    run = free_folder(out, "run-")
    train(resolve("muse", preset="tiny", data=str(data), steps=steps), run=run)
    return show(data, run, started)


def show(data: Path, run: Path, started: float) -> DemoResult:
    """Draws the captions of held-out combinations with the averaged weights of the last step, and has them read back."""
    session = load(run)
    source = ImageFolder.open(data / "heldout")
    real = np.stack([source.read(index) for index in range(min(NUM_DRAWN, len(source)))])
    captions = [source.caption(index) or "" for index in range(len(real))]
    request = make_request(session.config.sample, captions, changes=[Layer.of({"sample": {"chunk": CHUNK}}, "the demo")])
    drawn = np.stack(
        [np.asarray(made) for made in session.draw_rows([(caption, seed) for seed, caption in enumerate(captions)], request)]
    )
    rows = {"real": real, "reconstruction": session.through_tokens(real), "drawn": drawn}
    oracle = {name: oracle_accuracy(pictures, captions) for name, pictures in rows.items()}
    sheet_path, page_path = run / "drawn.png", run / "drawn.html"
    columns = [list(pictures[:10]) for pictures in rows.values()]
    write_png(sheet_path, sheet(columns, row_names=list(rows), captions=captions[:10], scale=3))
    page_path.write_text(make_page(drawn, captions, oracle), encoding="utf8")
    return DemoResult(data, run, sheet_path, page_path, oracle, time.monotonic() - started)


def make_page(drawn: Pixels, captions: list[str], oracle: dict[str, dict[str, float]]) -> str:
    """The drawn pictures with their captions, wrong ones marked, and the oracle's table."""
    table = {row: {name: f"{100 * share:.1f} %" for name, share in shares.items()} for row, shares in oracle.items()}
    told = [
        "Every caption below names a combination of shape, colour and place that training never showed.",
        "An oracle reads each picture back from its pixels: the table says how many agree with their caption. "
        "Reconstructions show what the tokenizer keeps, so they bound what can be drawn. Red frames: the oracle disagrees.",
    ]
    figures = [
        Figure(picture, caption, wrong=not score(picture, caption)["joint"])
        for picture, caption in zip(drawn[:NUM_SHOWN], captions, strict=False)
    ]
    return page("Drawn from captions", told, table, figures)
