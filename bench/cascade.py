"""How fast, and how often right, does a trained dalle2 draw? Held-out captions of shapes through samplers and numbers of steps, a
line each: seconds a picture of each stage, and the oracle's joint accuracy of what the decoder draws and of the whole cascade,
once with the embeddings of the real pictures and once through the prior. Where there are upsamplers, `upsampler of small` is what
they make of the real pictures themselves, shrunk to the decoder's size as in their training: what is lost there is theirs alone.

    python bench/cascade.py RUN [--n 256] [--samplers euler heun dpm ddim] [--steps 4 8 16 32 64] [--stages base] [--compile]
        [--side train] [--each]

Sampler and steps are those of the stages named, by default of all; other stages draw as the run's config says. heun makes two
passes a step; ddim draws fresh noise (eta 1), because without it is euler. The oracle reads pictures at the size that they have.

--each adds a line for each column: the share right of each attribute, of the captions that ask for it. --side train asks for what
training has shown: what is wrong there, too, has not been learned; what is wrong of held-out captions alone does not carry over.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

import tessera
from tessera.bench.timing import alone, settle
from tessera.config import UserError
from tessera.contracts import Chunk
from tessera.evals.material import Side, load_material
from tessera.evals.oracle import Tally, tally, wilson
from tessera.generators.diffusion.degrade import resize
from tessera.generators.diffusion.samplers import Sampler
from tessera.recipes.dalle2.config import Dalle2SampleConfig
from tessera.recipes.dalle2.drawing import Painter
from tessera.recipes.pictures import pictures
from tessera.sampling.session import Session

STAGES = ("prior", "base", "upsampler")
SIDES = {"heldout": "held-out", "train": "training"}  # by what they are called
ROUTES = ("small", "real", "prior")  # upsamplers alone, of real pictures made small; else where embeddings come from

T = TypeVar("T")


@dataclass(slots=True)
class Row:
    """One way to draw, and what came of it."""

    sampler: str
    steps: int
    seconds: dict[str, float] = field(default_factory=dict)  # a picture, by stage
    right: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by route and stage

    @property
    def whole(self) -> float:
        """Seconds a picture from text on."""
        return sum(self.seconds.values())

    @property
    def end(self) -> Tally:
        """Of the last stage, through the prior where there is one."""
        return self.right[max(self.right, key=lambda key: (ROUTES.index(key[0]), STAGES.index(key[1])))]

    def line(self, columns: Sequence[tuple[str, str]]) -> str:
        """As it is printed."""
        seconds = [self.seconds.get(stage) for stage in STAGES]
        times = "".join(f"{'-':>10}" if spent is None else f"{spent:>10.5f}" for spent in [*seconds, self.whole])
        return f"{self.sampler:<10}{self.steps:>4}{times}" + "".join(f"{share(self.right[key]):>19.1%}" for key in columns)

    def each(self, columns: Sequence[tuple[str, str]]) -> list[str]:
        """A line a column: its attributes, of those captions that ask for them."""
        found = {f"{stage} of {route}": self.right[route, stage] for route, stage in columns}
        words = {
            name: [f"{key} {row.right.get(key, 0) / count:.1%} of {count}" for key, count in row.asked.items()]
            for name, row in found.items()
        }
        return [f"    {name}: {', '.join(shares)}" for name, shares in words.items()]


def share(found: Tally) -> float:
    """How many were right in everything."""
    return found.right.get("joint", 0) / max(found.num, 1)


def main() -> None:
    """One line for each sampler and number of steps, then which is the fastest of the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--n", type=int, default=256, help="captions")
    parser.add_argument("--samplers", nargs="+", choices=get_args(Sampler), default=["euler", "heun", "dpm", "ddim"])
    parser.add_argument("--steps", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="whose sampler and steps are varied")
    parser.add_argument("--compile", action="store_true", help="as sample.compile")
    parser.add_argument("--side", choices=SIDES, default="heldout", help="whose captions")
    parser.add_argument("--each", action="store_true", help="the share right of each attribute")
    asked = parser.parse_args()
    session = tessera.load(asked.run)
    painter, real = painter_of(session), side_of(session, asked.n, session.resolution, asked.side)
    columns, given = columns_of(painter), given_by(session, painter, real, asked.n, asked.side)
    if asked.compile or session.config.sample.compile:
        painter.compile()
    print(f"{len(real)} {SIDES[asked.side]} captions in chunks of {session.config.sample.chunk}; {ceiling(painter, real)}")
    times = "".join(f"{name:>10}" for name in (*STAGES, "all, s"))
    print(f"{'sampler':<10}{'':>4}{times}" + "".join(f"{f'{stage} of {route}':>19}" for route, stage in columns), flush=True)
    rows = []
    for sampler, steps in product(asked.samplers, asked.steps):
        options = varied(session.config.sample, sampler, steps, asked.stages)
        rows.append(drawn(painter, given, real.captions, options, Row(sampler, steps)))
        print(rows[-1].line(columns), flush=True)
        if asked.each:
            print("\n".join(rows[-1].each(columns)), flush=True)
    print(verdict(rows))


def painter_of(session: Session) -> Painter:
    """What draws, of a run of this recipe with a decoder."""
    painter = session.draw
    if not isinstance(painter, Painter) or "base" not in painter.stages:
        raise UserError(f"{session.path} has no trained decoder of recipe dalle2; expected a run of it with stage base")
    if not {"real", "prior"} & set(routes_of(painter)):
        raise UserError(f"{session.path} has neither a prior nor anything that embeds pictures; train the stage prior")
    return painter


def side_of(session: Session, num: int, resolution: int, side: str = "heldout") -> Side:
    """Pictures of that height, with captions that the oracle knows; the same ones at every height."""
    data = session.config.data.at(resolution)
    most_train, most_held_out = (num, 1) if side == "train" else (1, num)
    material = load_material(data, most_train=most_train, most_held_out=most_held_out, seed=0)
    if material.oracle != "shapes":
        raise UserError(f"{data.path} has no oracle; expected a run on data of `tessera data synth shapes`")
    return material.train if side == "train" else material.held_out


def given_by(session: Session, painter: Painter, real: Side, num: int, side: str = "heldout") -> dict[str, Tensor]:
    """The pictures that each route is given."""
    whole = painter.real(real.pictures)
    return {route: shrunk(session, painter, num, side) if route == "small" else whole for route in routes_of(painter)}


def shrunk(session: Session, painter: Painter, num: int, side: str = "heldout") -> Tensor:
    """The real pictures as the first upsampler sees them in training (`read_upsampler`): read at the size that it draws, then
    made small. Noise or blur comes upon them as upon drawn ones."""
    whole = side_of(session, num, painter.config.upsamplers["upsampler1"].resolution, side)
    return resize(painter.real(whole.pictures), painter.size_at(painter.config.seen_by("upsampler1")), 1.0)


def routes_of(painter: Painter) -> list[str]:
    """The ways to draw that the run has."""
    there = {"small": bool(painter.path("prior")), "real": painter.sphere.known, "prior": "prior" in painter.stages}
    return [route for route in ROUTES if there[route]]


def columns_of(painter: Painter) -> list[tuple[str, str]]:
    """What is judged, by route and stage."""
    stages = ["base", "upsampler"] if painter.path("prior") else ["base"]
    return [(route, stage) for route, stage in product(routes_of(painter), stages) if (route, stage) != ("small", "base")]


def ceiling(painter: Painter, real: Side) -> str:
    """What the oracle says of the real pictures, at the sizes that are drawn."""
    images, captions = painter.real(real.pictures), [caption or "" for caption in real.captions]
    sizes = sorted({painter.config.data.resolution, painter.resolution})
    judged = {size: share(tally(pictures(resize(images, (size, size), 1.0)), captions)) for size in sizes}
    return "real pictures " + ", ".join(f"{right:.1%} at {size} px" for size, right in judged.items())


def varied(options: Dalle2SampleConfig, sampler: str, steps: int, stages: Sequence[str]) -> Dalle2SampleConfig:
    """The run's, with that sampler in some stages."""
    how = {"sampler": sampler, "steps": steps, "eta": float(sampler == "ddim")}
    inner = {name: getattr(options, name).model_copy(update=how) for name in ("prior", "upsampler") if name in stages}
    return options.model_copy(update={**(how if "base" in stages else {}), **inner})


@torch.no_grad()
def drawn(
    painter: Painter, given: Mapping[str, Tensor], told: Sequence[str | None], options: Dalle2SampleConfig, row: Row
) -> Row:
    """All captions, by all routes. The first chunk is drawn twice: on a GPU the first time is spent on recording."""
    captions, made = [caption or "" for caption in told], dict[tuple[str, str], list[Any]]()
    watch = Watch()
    for route, whole in given.items():
        for number, chunk in enumerate(chunks(whole, told, options)):
            if not number:
                through(painter, chunk, route, Watch())
            for stage, images in through(painter, chunk, route, watch).items():
                made.setdefault((route, stage), []).extend(pictures(images))
    row.seconds = {stage: watch.seconds[stage] / watch.pictures[stage] for stage in STAGES if stage in watch.seconds}
    row.right = {key: tally(found[: len(captions)], captions) for key, found in made.items()}
    return row


@dataclass(slots=True)
class Watch:
    """Seconds of each stage, and of how many pictures."""

    seconds: dict[str, float] = field(default_factory=dict)
    pictures: dict[str, int] = field(default_factory=dict)

    def __call__(self, stage: str, num: int, call: Callable[[], T]) -> T:
        settle()
        with alone():
            start = time.perf_counter()
            result = call()
            settle()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        self.pictures[stage] = self.pictures.get(stage, 0) + num
        return result


def chunks(images: Tensor, captions: Sequence[str | None], options: Dalle2SampleConfig) -> Iterator[Chunk]:
    """All of one size, the last one padded."""
    for first in range(0, len(images), options.chunk):
        rows = [row if row < len(images) else first for row in range(first, first + options.chunk)]
        seeds = torch.tensor(rows, device=images.device)
        yield Chunk([captions[row] for row in rows], seeds, options, pictures=images[seeds])


def through(painter: Painter, chunk: Chunk, route: str, watch: Watch) -> dict[str, Tensor]:
    """Pictures of the decoder, and of the last upsampler where there is one; by the route `small` of that alone."""
    num, options = len(chunk.captions), chunk.options
    if route == "small":
        return {"upsampler": enlarged(painter, chunk, watch)}
    if route == "prior":
        embeddings = watch("prior", num, lambda: painter.imagine(chunk, options.prior))
    else:
        embeddings = painter.embeddings(chunk, options)
    small = watch("base", num, lambda: painter.decode(chunk, embeddings, options))
    if not painter.path("prior"):
        return {"base": small}
    return {"base": small, "upsampler": enlarged(painter, replace(chunk, pictures=small), watch)}


def enlarged(painter: Painter, chunk: Chunk, watch: Watch) -> Tensor:
    """A chunk's small pictures through all upsamplers."""
    alone = painter.config.sample.model_copy(update={"start": "upsampler1", "upsampler": chunk.options.upsampler})
    return watch("upsampler", len(chunk.captions), lambda: painter.pixels(replace(chunk, options=alone)))


def verdict(rows: Sequence[Row]) -> str:
    """The fastest of those that are as often right as the best, as far as so many pictures can tell (95 %)."""
    best = max(rows, key=lambda row: (share(row.end), -row.whole))
    least = wilson(best.end.right.get("joint", 0), best.end.num)[0]
    fastest = min((row for row in rows if share(row.end) >= least), key=lambda row: row.whole)
    told = [f"{row.sampler} {row.steps}, {share(row.end):.1%} in {row.whole:.5f} s a picture" for row in (best, fastest)]
    return f"best: {told[0]}; fastest within its interval (from {least:.1%}): {told[1]}"


if __name__ == "__main__":
    main()
