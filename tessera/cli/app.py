"""The commands. Heavy rooms are imported inside them, so that --help and bad arguments answer at once."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera.cli.exits import guarded
from tessera.cli.synth import synth_app

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Trains text-to-image, text-to-video and text-to-mesh generators from a folder of your own files.",
)  # fmt: skip
data_app = typer.Typer(no_args_is_help=True, help="Look at data, or make some.")
app.add_typer(data_app, name="data")
data_app.add_typer(synth_app, name="synth")

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the config; may repeat.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the data and the runs.")] = Path("demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each stage; the default takes four minutes.")] = None,
) -> None:
    """The main job on data it makes itself, end to end, on a CPU, in minutes."""
    from tessera.demo import run_demo

    result = run_demo(out, steps)
    print(f"\ndrawn from captions of combinations that training never showed: {result.sheet}, {result.page}")
    for row, shares in result.oracle.items():
        print(f"  {row:<15} " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    print(f"read back by the oracle; all of it took {result.seconds:.0f} s")
    run = shlex.quote(str(result.run))
    print(f'next: tessera sample {run} "a blue circle in the top left"   or   tessera train muse --data YOUR_FOLDER')


@app.command()
def train(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE.yaml", help="A recipe's name (`tessera list`), or a config file.")
    ],
    data: Annotated[str | None, typer.Option("--data", metavar="PATH", help="Folder of your files.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="New folder for the run; default runs/RECIPE-NNN.")] = None,
    preset: Annotated[str | None, typer.Option(help="tiny, small, base or large.")] = None,
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="Train this stage only.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every stage that runs.")] = None,
    sets: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="One real step of each stage: memory, speed, time, disk.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete config and stop.")] = False,
) -> None:
    """Train a recipe on a folder of your files, in a new run folder."""
    from tessera import pipeline
    from tessera.config import dump_yaml

    config = pipeline.resolve(target, preset=preset, data=data, steps=steps, sets=sets or (), stage=stage)
    if print_config:
        print(dump_yaml(config), end="")
    elif dry_run:
        from tessera.rehearsal import dry_run as rehearse

        rehearse(config, stage=stage, say=lambda line: print(line, flush=True), show=print_estimate)
        options = {"data": data, "run": run, "preset": preset, "stage": stage, "steps": steps}
        flags = [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
        print(f"next: {shlex.join(['tessera', 'train', target, *flags, *(['--set', *sets] if sets else [])])}")
    else:
        finish(pipeline.train(config, run=run, stage=stage))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with this stage only.")] = None,
    sets: Sets = None,
) -> None:
    """Go on exactly where a run stopped; needs nothing else."""
    from tessera import pipeline

    finish(pipeline.resume(run, sets=sets or (), stage=stage))


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, also while it trains, or an export.")],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT ...]", help="What to draw.")] = None,
    prompts_file: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="One prompt a line.")] = None,
    request: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A request as YAML or JSON, such as the .json beside a sample.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", help="Samples of each prompt; default 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Sample k of a prompt has the seed S + k; default 0.")] = None,
    frames: Annotated[int | None, typer.Option(help="Length of a clip; default that of a training clip.")] = None,
    steps: Annotated[int | None, typer.Option(help="Passes through the generator; not where it draws token by token.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Pull towards the prompt; 1 is none.")] = None,
    negative: Annotated[str | None, typer.Option(metavar="TEXT", help="What samples should not be.")] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A variation of this picture, or of an embedding (.npy); a clip goes on from it, or from a clip."
        ),
    ] = None,
    mask: Annotated[Path | None, typer.Option(metavar="FILE", help="With --image: draw anew only where this is white.")] = None,
    towards: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --image and -n: pictures on the way from that one to this.")
    ] = None,
    sketch: Annotated[Path | None, typer.Option(metavar="FILE", help="A clip, or a picture, of strokes to follow.")] = None,
    mesh: Annotated[Path | None, typer.Option(metavar="FILE", help="A part of a mesh, of which a whole one is made.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where files go; default RUN/drawn/NNN, of an export ./drawn/NNN.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="NAME", help="latest, best or step-N of the last stage.")] = None,
    sets: Sets = None,
) -> None:
    """Draw pictures, clips or meshes from prompts, each with a .json beside it that draws it again."""
    from tessera.sampling.serve import draw_to_files

    flags = {"frames": frames, "steps": steps, "guidance": guidance}
    files = {"image": image, "mask": mask, "towards": towards, "sketch": sketch, "mesh": mesh}
    named = {"n": n, "seed": seed, "negative": negative, **files}
    drawn = draw_to_files(
        run, prompts or [], prompts_file=prompts_file, request_file=request, sets=sets or (), out=out, checkpoint=checkpoint,
        named={key: value for key, value in named.items() if value is not None},
        flags={key: value for key, value in flags.items() if value is not None},
    )  # fmt: skip
    for sample in drawn.samples[:20]:
        place = "" if sample.at is None else f"  at {sample.at:.3g}"
        print(f"{sample.path}  seed {sample.seed}{place}  {sample.prompt}")
    if len(drawn.samples) > 20:
        print(f"... {len(drawn.samples):,} samples in {drawn.folder}")
    print(drawn.by)
    name, again = shlex.quote(str(run)), shlex.quote(str(drawn.samples[0].path.with_suffix(".json")))
    data = "" if (run / "config.yaml").is_file() else " --set data.path=FOLDER"  # an export does not know where its data lie
    judge = f"   or   tessera evaluate {name}{data}" if drawn.judged else ""
    print(f"next: tessera sample {name} --request {again}   draws the first again{judge}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, also while it trains, or an export.")],
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Held-out pictures and captions to judge by.")] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="NAME", help="latest, best or step-N of the last stage.")] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Judge a trained model by held-out data, every number beside the reference rows that give it a meaning."""
    from tessera.engine.track import Journal
    from tessera.evals.lines import lines
    from tessera.evals.run import evaluate_run

    speaks = os.environ.get("RANK", "0") == "0"  # of several ranks only the first
    say = Journal(None, speaks=speaks).say
    evaluation, folder = evaluate_run(run, n=n, sets=sets or (), checkpoint=checkpoint, say=say)
    if not speaks:
        return
    if as_json:
        print(json.dumps(evaluation.report, indent=1, ensure_ascii=False))
        return
    print("\n".join(lines(evaluation.report)))
    print(f"written: {folder}")
    then = f"; then tessera export {shlex.quote(str(run))} --out DIR" if (run / "config.yaml").is_file() else ""
    print(f"next: look at {folder / 'evaluation.png'}{then}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; it may still be training.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the export.")],
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="latest, best or step-N.")] = "latest",
) -> None:
    """Write what use needs of a run into a folder that travels: weights, config, model card."""
    from tessera.sampling.package import export_run
    from tessera.sampling.uses import after_export

    export_run(run, out, checkpoint)
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        print(f"{file}  {file.stat().st_size:,} bytes")
    print(f"the licence in {out / 'README.md'} is yours to write")
    print(f"next: {after_export(run, out)}")


@app.command()
def doctor(
    resume_test: Annotated[
        bool,
        typer.Option(
            "--resume-test", help="Prove that a killed and resumed run equals an unbroken one; exit 1 if not. Half a minute."
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """What this machine has, as one block to paste into a report, with warnings and what to do."""
    if resume_test:
        return run_resume_test(as_json)
    from tessera.doctor.report import examine

    report = examine(Path())
    if as_json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        print("\n".join(report.lines()))
        print("next: tessera doctor --resume-test   or   tessera train muse --data FOLDER --dry-run")
    return 0


@data_app.command("check")
def data_check(
    path: Annotated[
        Path, typer.Argument(help="A folder of images, clips, tars, arrays or meshes (docs/data.md); or one .tar or .npy.")
    ],
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="images, clips or meshes; otherwise what most files are.")
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Open every file and say what is there: counts, sizes, lengths or faces, captions, near-duplicates, rejects with reasons."""
    from tessera.config import UserError
    from tessera.data.check import check_folder

    report = check_folder(path, kind=kind, sets=sets or (), progress=show_count if sys.stderr.isatty() else None)
    print(json.dumps(report.to_json(), indent=1, ensure_ascii=False) if as_json else "\n".join(report.lines()))
    if not report.num_samples:
        things = {"images": "pictures"}.get(report.kind, report.kind)
        raise UserError(f"none of the {things} in {path} can be used; repair or replace the files that are named as rejects")
    if as_json:
        return
    first = ["repair or remove the rejected files, then "] * bool(report.num_rejected)
    first += ["add captions (docs/data.md), then "] * report.short_of_captions
    recipe = {"meshes": "meshgpt", "clips": "phenaki"}.get(report.kind, "muse")
    train = f"tessera train {recipe} --data {shlex.quote(str(path))}"
    without = f"   or   {train} --set text.kind=none" if report.short_of_captions else ""
    print(f"next: {''.join(first)}{train}{without}")


@data_app.command("prepare")
def data_prepare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="The caches of this stage only.")] = None,
) -> None:
    """Make the caches of a run by themselves: tokens and text states, which its generators read. Also by torchrun."""
    from tessera.pipeline import prepare

    made = prepare(run, stage)
    if os.environ.get("RANK", "0") != "0":
        return
    for name, folders in made.items():
        for folder in folders:
            print(f"{name} reads {folder}")
    print(f"next: tessera resume {shlex.quote(str(run))}   or read them yourself: docs/data.md")


@app.command("list")
def list_all() -> None:
    """Recipes with their presets and stages, bench cases, and the runs in ./runs."""
    from tessera.bench import CASES
    from tessera.engine.checkpoint import read_pointer
    from tessera.recipes import RECIPES
    from tessera.sampling.places import taken_by

    for recipe in RECIPES.values():
        stages = dict.fromkeys(train.name for preset in recipe.presets.values() for train in recipe.steps(preset()))
        print(f"{recipe.name}: {recipe.summary}")
        print(f"  presets {', '.join(recipe.presets)}; stages {', '.join(stages)}")
    print(f"bench cases: {', '.join(CASES)}")
    for run in sorted(Path("runs").glob("*/config.yaml")):
        latest = [
            f"{path.parent.parent.name} {read_pointer(path) or '?'}" for path in sorted(run.parent.glob("*/checkpoints/latest"))
        ]
        print(f"run {run.parent}: {', '.join([*latest, *taken_by(run.parent)]) or 'no checkpoint yet'}")
    print("next: tessera train RECIPE --data FOLDER")


@app.command()
def bench(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE ...]", help="Names from `tessera list`; default all.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder for the loader's case; default: shapes made for it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the named cases on this machine."""
    from tessera.bench import run_cases

    rows = []
    for row in run_cases(cases or (), data):
        rows.append(row)
        if not as_json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print("next: tessera train muse --data FOLDER --dry-run")


def show_count(done: int, total: int) -> None:
    """One live line on a terminal."""
    if done % 100 == 0 or done == total:
        print(f"\r{done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def print_estimate(estimate: Any) -> None:
    """One stage of a dry run."""
    from tessera.engine.clock import duration

    nets = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in estimate.parameters.items())
    losses = ", ".join(f"{name} {value:.4f}" for name, value in estimate.losses.items())
    print(f"stage {estimate.stage}: parameters {nets}; losses {losses}")
    print(
        f"  peak memory {estimate.peak_bytes / 2**30:.2f} GiB, {estimate.items_per_s:.1f} items/s, "
        f"ETA {duration(estimate.seconds)}, disk {estimate.disk_bytes / 2**30:.2f} GiB",
        flush=True,
    )
    for fault in estimate.faults:
        print(f"  cannot be read: {fault}; `tessera data check` lists every such file")


def run_resume_test(as_json: bool) -> int:
    """0 if resume is exact, 1 if not."""
    from dataclasses import asdict

    from tessera.doctor.resume_test import prove_resume

    proof = prove_resume(lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({**asdict(proof), "exact": proof.exact}, indent=1))
        return 0 if proof.exact else 1
    print("\n".join([f"device: {proof.device}", *(f"done: {event}" for event in proof.events)]))
    print("\n".join([*(f"compared: {what}" for what in proof.compared), *(f"DIFFERS: {wrong}" for wrong in proof.differences)]))
    verdict = "exact: the resumed run equals the unbroken one, bit for bit" if proof.exact else "NOT exact; please report this"
    print(f"{verdict} ({proof.seconds:.0f} s)")
    print("next: tessera train muse --data FOLDER --dry-run" if proof.exact else "next: tessera doctor   for the report")
    return 0 if proof.exact else 1


def finish(run: Path) -> None:
    """The last lines of train and resume: what is where, and what to do next. Of several ranks only the first says it."""
    if os.environ.get("RANK", "0") != "0":
        return
    stages = sorted(run.glob("*/checkpoints/latest"), key=lambda path: path.stat().st_mtime)
    for latest in stages:
        print(f"{latest.parent.parent.name}: {latest.parent / latest.read_text().strip()}")
    samples = list(stages[-1].parent.parent.glob("samples/step-*.*")) if stages else []
    pictures = [path for path in samples if path.suffix in (".png", ".gif")]
    if pictures:
        print(f"pictures: {max(pictures, key=lambda path: (path.stem, path.suffix == '.gif'))}")
    from tessera.sampling.uses import after_training

    name, last = shlex.quote(str(run)), stages[-1].parent.parent.name if stages else None  # None: all come from elsewhere
    first = after_training(run, last)
    print(f"next: {first}" + (f"   or   tessera resume {name} --set {last}.steps=N   to train longer" if last else ""))


def spread_sets(arguments: Sequence[str]) -> list[str]:
    """`--set a=1 b=2` means `--set a=1 --set b=2`."""
    spread: list[str] = []
    inside = False
    for argument in arguments:
        if inside and spread[-1] != "--set" and re.match(r"[A-Za-z_][\w.]*=", argument):
            spread.append("--set")
        inside = argument == "--set" or (inside and bool(re.match(r"[A-Za-z_][\w.]*=", argument)))
        spread.append(argument)
    return spread


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names need not be Unicode; in JSON the escape is valid, too
            stream.reconfigure(errors="backslashreplace")
    sys.exit(guarded(lambda: app(spread_sets(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)))
