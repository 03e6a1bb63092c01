"""`tessera data synth`: a command for each data set that the program makes itself."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

synth_app = typer.Typer(no_args_is_help=True, help="Make a captioned data set that an oracle can read back.")

Out = Annotated[Path, typer.Option(metavar="DIR", help="A new folder: train/, heldout/ and synth.json.")]
Seed = Annotated[int, typer.Option(help="The same seed makes the same files.")]


@synth_app.command("shapes")
def shapes(
    out: Out,
    n: Annotated[int, typer.Option(help="Training pictures; an eighth as many are held out.")] = 1000,
    seed: Seed = 0,
    size: Annotated[int, typer.Option(help="Pixels of a side.")] = 64,
    max_shapes: Annotated[int, typer.Option(help="Shapes in a picture: 1, 2 or 3.")] = 3,
    num_shapes: Annotated[int, typer.Option(help="Kinds of shape, 2 to 5.")] = 5,
    num_colours: Annotated[int, typer.Option(help="Colours, 2 to 8.")] = 8,
    num_places: Annotated[int, typer.Option(help="Places, 2 to 5.")] = 5,
    sizes: Annotated[bool, typer.Option(help="Small and large shapes, or one size.")] = True,
) -> None:
    """Pictures of flat shapes: "a large red circle in the top left"."""
    from tessera.data.synth.shapes import write_shapes

    write_shapes(
        out, n, seed, image_size=size, max_shapes=max_shapes, num_shapes=num_shapes, num_colours=num_colours,
        num_places=num_places, sizes=sizes,
    )  # fmt: skip
    _print_made(out, n, "pictures", "muse")


@synth_app.command("furniture")
def furniture(
    out: Out,
    n: Annotated[int, typer.Option(help="Training meshes; an eighth as many are held out.")] = 1000,
    seed: Seed = 0,
) -> None:
    """Meshes of chairs, tables, lamps, shelves and beds: "a narrow chair with three legs, a high back and armrests"."""
    from tessera.data.synth.furniture import write_furniture

    write_furniture(out, n, seed)
    _print_made(out, n, "meshes", "meshgpt")


@synth_app.command("digits")
def digits(
    out: Out,
    n: Annotated[int, typer.Option(help="Training clips; an eighth as many are held out.")] = 1000,
    seed: Seed = 0,
    size: Annotated[int, typer.Option(help="Pixels of a side.")] = 64,
    frames: Annotated[int, typer.Option(help="Frames of a clip, 5 to 129.")] = 17,
    max_digits: Annotated[int, typer.Option(help="Digits in a clip: 1 or 2.")] = 2,
    num_kinds: Annotated[int, typer.Option(help="Kinds of digit, 2 to 10: 0, 1, ...")] = 10,
    num_directions: Annotated[int, typer.Option(help="Directions, 2 to 8: left, right, up, down, then the diagonals.")] = 4,
    num_colours: Annotated[int, typer.Option(help="Colours, 2 to 6.")] = 6,
) -> None:
    """Clips of moving handwritten digits: "a red 7 moves left slowly and a green 3 moves up fast"."""
    from tessera.data.synth.digits import write_digits

    write_digits(
        out, n, seed, image_size=size, frames=frames, max_digits=max_digits, num_kinds=num_kinds,
        num_directions=num_directions, num_colours=num_colours,
    )  # fmt: skip
    _print_made(out, n, "clips", "phenaki")


def _print_made(out: Path, n: int, what: str, recipe: str) -> None:
    print(f"{n:,} {what} in {out / 'train'}, {max(1, n // 8):,} of held-out combinations in {out / 'heldout'}")
    print(f"next: tessera train {recipe} --data {shlex.quote(str(out))}")
