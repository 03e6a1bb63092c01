"""How fast does a trained model draw? So many held-out captions at once, over and over where there are fewer, from text to
pixels; the first time is spent on recording, the second is timed.

    python bench/draw.py RUN [--n 64] [--checkpoint best] [--compile]

Prints a JSON row: samples and, of clips, tokens a second. For runs of pictures and clips.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from typing import Any

import tessera
from tessera.bench.timing import alone, device_facts, settle
from tessera.config import UserError
from tessera.evals.clip_material import load_clips
from tessera.evals.material import load_material
from tessera.evals.mesh_material import load_meshes
from tessera.sampling.session import Session

LOADERS: dict[str, Any] = {"picture": load_material, "clip": load_clips, "mesh": load_meshes}
"""By medium: what reads that which `tessera evaluate` judges."""


def main() -> None:
    """Two times, the second counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--n", type=int, default=64, help="captions, all in one chunk")
    parser.add_argument("--checkpoint", help="latest, best or step-N")
    parser.add_argument("--compile", action="store_true", help="as sample.compile")
    asked = parser.parse_args()
    session = tessera.load(asked.run, checkpoint=asked.checkpoint)
    print(json.dumps({"run": asked.run, **timed(session, asked.n, asked.compile), **device_facts()}))


def timed(session: Session, num: int, compiled: bool) -> dict[str, Any]:
    """Of one chunk."""
    options = {"chunk": num, **({"compile": True} if compiled else {})}
    found = held_out(session.recipe.medium, session.config.data.at(session.resolution), num)
    prompts = [found[index % len(found)] for index in range(num)]
    seconds = []
    for quiet in (nullcontext, alone):
        settle()
        with quiet():
            start = time.perf_counter()
            made = session.sample(prompts, seed=0, options=options)
            settle()
            seconds.append(time.perf_counter() - start)
    row = {"n": len(prompts), "s": round(seconds[1], 4), "samples_per_s": round(len(prompts) / seconds[1], 2)}
    if session.recipe.medium == "clip":
        tokens = session.encode(made[0]).numel()
        row |= {"tokens": tokens, "tokens_per_s": round(tokens * len(prompts) / seconds[1], 1)}
    return row | {"first_s": round(seconds[0], 2)}


def held_out(medium: str, data: Any, most: int) -> list[str]:
    """Captions that training has not seen."""
    found = LOADERS[medium](data, most_train=1, most_held_out=most, seed=0).held_out.captions
    captions = [caption for caption in found if caption]
    if not captions:
        raise UserError(f"{data.path} holds out nothing with a caption; set data.validation_fraction")
    return captions


if __name__ == "__main__":
    main()
