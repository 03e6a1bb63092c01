"""Which sampling options draw best what was held out? The oracle's verdict of the same captions and seeds under each of them;
each caption has a seed of its own.

    python bench/options.py RUN [--n 256] [--checkpoint best] --tries as-it-is guidance=2 guidance=5,steps=32 ...

One line a try, as-it-is being the run's own options: how many are right in each attribute and in all of them, of clips also in
all of them by direction, and the seconds that it took, recording among them. For runs on data of `tessera data synth`. Who
chooses by it has chosen on these captions, and should say so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import yaml
from draw import LOADERS

import tessera
from tessera.bench.timing import settle
from tessera.config import Layer, UserError
from tessera.data.synth import furniture_oracle
from tessera.evals import clip_oracle, oracle
from tessera.sampling.request import make_request
from tessera.sampling.session import Session

CHUNK = 64
OWN = "as-it-is"
Judge = Callable[[Any, Sequence[Any], Sequence[str]], Any]  # material, what was made, captions -> a tally
JUDGES: dict[str, Judge] = {
    "picture": lambda material, made, captions: oracle.tally(map(np.asarray, made), captions),
    "clip": lambda material, made, captions: clip_oracle.tally([clip.frames for clip in made], captions, material.oracle),
    "mesh": lambda material, made, captions: oracle.tally(made, captions, furniture_oracle.score),
}


def main() -> None:
    """A line for each try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--n", type=int, default=256, help="captions")
    parser.add_argument("--checkpoint", help="latest, best or step-N")
    parser.add_argument("--tries", nargs="+", default=[OWN], metavar="KEY=VALUE,...", help=f"options of each; {OWN}: the run's")
    asked = parser.parse_args()
    session = tessera.load(asked.run, checkpoint=asked.checkpoint)
    material = material_of(session, asked.n)
    print(f"{len(material.held_out)} held-out captions", flush=True)
    for words in asked.tries:
        print(tried(session, material, words), flush=True)


def material_of(session: Session, num: int) -> Any:
    """Captions that training has not seen, and what judges them."""
    medium = session.recipe.medium
    data = session.config.data.at(session.resolution) if medium == "picture" else session.config.data
    material = LOADERS[medium](data, most_train=1, most_held_out=num, seed=0)
    if material.oracle is None:
        raise UserError(f"{data.path} has no oracle; expected a run on data of `tessera data synth`")
    return material


def tried(session: Session, material: Any, words: str) -> str:
    """As it is printed."""
    captions = [caption or "" for caption in material.held_out.captions]
    pairs = [word.partition("=") for word in words.split(",")] if words != OWN else []
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    start = time.perf_counter()
    changes = [Layer.of({"sample": {"chunk": CHUNK, **options}}, words)]
    rows = [(caption, number) for number, caption in enumerate(captions)]  # noise of its own for each, as in an evaluation
    made = session.draw_rows(rows, make_request(session.config.sample, captions, changes=changes))
    settle()
    seconds = time.perf_counter() - start
    found = JUDGES[session.recipe.medium](material, made, captions).as_dict()
    shares = {name: share for name, share in found.items() if isinstance(share, float)}
    shares |= {name: row["joint"] for name, row in found.get("directions", {}).items()}
    return f"{words:<32} {'  '.join(f'{name} {share:.1%}' for name, share in shares.items())}  in {seconds:.1f} s"


if __name__ == "__main__":
    main()
