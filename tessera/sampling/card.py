"""The model card: what it is, from which data, how good, how it was made, how to use it. All read from the run's files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.batches import num_latent
from tessera.config import ImageDataConfig, UserError, VideoDataConfig
from tessera.contracts import Nets, Way
from tessera.engine.checkpoint import read_json
from tessera.sampling.stored import Stored, StoredStage, our_version

NAMED = ("tessera", "torch", "numpy", "python", "platform", "device", "ranks")  # of env.json


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run says about one of its stages, as far as it is there."""

    environment: Mapping[str, Any]  # env.json
    manifest: Mapping[str, Any]  # of the checkpoint
    last: Mapping[str, Any]  # the last validation up to the checkpoint: step and numbers
    best: Mapping[str, Any]  # the validation of the best checkpoint so far
    sample: Path | None  # the last preview up to the checkpoint


def gather_evidence(stage: StoredStage) -> Evidence:
    """A file that is missing or damaged leaves a gap in the card, not an error: the weights are what matters."""
    home = stage.home
    validations = {line["step"]: line for line in _validations(home / "metrics.jsonl") if line["step"] <= stage.step}
    best_step = _json(stage.folder / "state.json").get("best_step")
    return Evidence(
        environment=_json(home.parent / "env.json"),
        manifest=_json(stage.folder / "manifest.json"),
        last=validations[max(validations)] if validations else {},
        best=validations.get(best_step, {}) if isinstance(best_step, int) else {},
        sample=_last_sample(home / "samples", stage.step),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}


def _validations(path: Path) -> list[dict[str, Any]]:
    """The lines of averaged weights on the validation split; a line that is none is left out."""
    found = []
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
            if line["kind"] == "valid" and isinstance(line["step"], int):
                found.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def _last_sample(folder: Path, step: int) -> Path | None:
    steps = {path: path.stem.removeprefix("step-") for path in folder.glob("step-*") if path.suffix != ".json"}
    known = [path for path, number in steps.items() if number.isdigit() and int(number) <= step]
    return max(known, key=lambda path: (int(steps[path]), path.suffix == ".gif"), default=None)  # rather moving than still


def describe_model(stage: StoredStage, nets: Nets) -> str:
    """One line: what is made, how it becomes tokens, where the stage does that, and how large its nets are."""
    data, pictures = stage.config.data, isinstance(stage.config.data, ImageDataConfig)
    said = [f"{_medium(data)} with {data.channels} channel{'s'[: data.channels > 1]}" if pictures else _medium(data)]
    if stage.train.name == "tokenizer":
        model = stage.config.tokenizer.model
        quantizer = model.quantizer
        links = quantizer.num_quantizers if quantizer.kind == "residual" else 1
        kind = f"{quantizer.kind} of {links} {quantizer.quantizer.kind}" if quantizer.kind == "residual" else quantizer.kind
        said.append(f"quantizer {kind} with {quantizer.vocab_size:,} codes{' each' if links > 1 else ''}")
        if pictures:
            rows, columns = (side // model.stride for side in data.size)
            moving = isinstance(data, VideoDataConfig)
            steps = num_latent(data.frames, model.time_stride) if moving else 1
            shape = f"{f'{steps} x ' if moving else ''}{rows} x {columns}{f', {links} codes each' if links > 1 else ''}"
            said.append(f"{steps * rows * columns:,} tokens a {'clip' if moving else 'picture'} ({shape})")
    sizes = {name: sum(parameter.numel() for parameter in net.parameters()) for name, net in nets.items()}
    return "; ".join([*said, *(f"{name}: {_millions(size)} million parameters" for name, size in sizes.items())])


def _medium(data: Any) -> str:
    if isinstance(data, VideoDataConfig):
        return f"clips of {data.frames} frames{_rate(data)} of {data.size[0]} x {data.size[1]} pixels"
    if isinstance(data, ImageDataConfig):
        return f"pictures of {data.size[0]} x {data.size[1]} pixels"
    return f"meshes of up to {data.max_faces:,} triangles, {data.bins} steps of each coordinate"


def _rate(data: VideoDataConfig) -> str:
    if data.fps is not None:
        return f" ({data.fps:g} a second)"
    return f" (stride {data.stride})" if data.stride > 1 else ""


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g}" if count < 999_500_000 else f"{count / 1e6:,.0f}"


PICTURE_USE = """ids = model.encode("picture.png")    # any size: cut and scaled as in training
model.decode(ids)[0].save("reconstruction.png")
"""
CLIP_DRAW = """clip = model.sample("PROMPT", seed=0)[0]    # frames: t h w c; frames=60 for a longer one
from tessera.media.clip_files import encode_gif
open("drawn.gif", "wb").write(encode_gif(clip))
"""
CLIP_USE = """ids = model.encode("clip.gif")    # any size and length: cut and scaled as in training
model.decode(ids)[0].frames
"""
MESH_USE = """mesh = model.sample("PROMPT", seed=0)[0]    # vertices and faces
from tessera.media.mesh_files import encode_glb
open("drawn.glb", "wb").write(encode_glb(mesh))
"""


PICTURE_DRAW = 'model.sample("PROMPT", n=4, seed=0)[0].save("drawn.png")\n'
USES = {"picture": (PICTURE_DRAW, PICTURE_USE), "clip": (CLIP_DRAW, CLIP_USE), "mesh": (MESH_USE, "")}  # to draw, to read


def write_card(
    name: str,
    stored: Stored,
    stages: Mapping[str, Mapping[str, Any]],
    evidence: Mapping[str, Evidence],
    models: Mapping[str, str],
) -> str:
    """README.md of an export. The front matter is what model hubs read; the licence is the user's to name."""
    trained = ", ".join(f"{stage} (step {facts['step']:,})" for stage, facts in stages.items())
    first = next(iter(evidence.values()))
    draws, reads = USES[stored.recipe.medium]
    parts = [
        f"---\nlibrary_name: tessera\ntags: [tessera, {stored.recipe.name}]\n---\n\n# {name}",
        f"A `{stored.recipe.name}` model made with Tessera: {stored.recipe.summary}.\nTrained stages: {trained}.",
        f'## Use\n\n    pip install tessera-gen\n\n```python\nimport tessera\n\nmodel = tessera.load("{name}")\n'
        f"{drawing_line(stored.recipe.way(stored.config, stages), draws)}"
        f"{reads if 'tokenizer' in stages or stored.recipe.medium == 'mesh' else ''}```",
        _data_section(stored, first),
        *(_stage_section(stage, stages[stage], evidence[stage], models[stage]) for stage in stages),
        _making_section(first, {stage: facts["step"] for stage, facts in stages.items()}),
        "## Licence\n\nNot stated yet. Whoever publishes this model writes it here; the weights are made from the data above.",
    ]
    return "\n\n".join(parts) + "\n"


def drawing_line(way: Way | None, draws: str) -> str:
    """As `draws` says it from a prompt; from a picture, or its embedding, where that is the way."""
    if way is None or way.given == "prompt":
        return "" if way is None else draws
    file = "picture.png" if way.given == "image" else "embedding.npy"
    options = "" if way.start is None else f', options={{"start": "{way.start}"}}'
    return f'model.sample("", image="{file}", seed=0{options})[0].save("drawn.png")\n'


def _data_section(stored: Stored, evidence: Evidence) -> str:
    known, data = evidence.manifest.get("data"), stored.config.data
    known = known if isinstance(known, dict) else {}
    size = _medium(data)
    if isinstance(data, ImageDataConfig):
        colours = {1: "grey", 3: "RGB", 4: "RGBA"}[data.channels]
        moving = f"{data.frames} frames{_rate(data)} of " if isinstance(data, VideoDataConfig) else ""
        size = f"{moving}{data.size[0]} x {data.size[1]} pixels, {colours}"
    rows = {
        "samples": _count(known.get("num_samples")),
        "of them for training": _count(known.get("num_train")),
        "with a caption": _count(evidence.manifest.get("num_captioned")),
        "resolution": size,
    }
    return "## Data\n\n| | |\n|---|---|\n" + "\n".join(f"| {what} | {value} |" for what, value in rows.items())


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"


def _stage_section(stage: str, facts: Mapping[str, Any], evidence: Evidence, model: str) -> str:
    kinds = [f"{net} ({'averaged weights' if net in facts['averaged'] else 'raw weights'})" for net in facts["nets"]]
    lines = [f"## Stage `{stage}`\n\nNets: {', '.join(kinds)}, of step {facts['step']:,}.\n\nModel: {model}."]
    if evidence.last:
        numbers = {
            name: value
            for name, value in evidence.last.items()
            if (value is None or isinstance(value, float | int)) and name != "step"
        }
        rows = [f"| {name} | {_number(value)} | {_best_number(evidence.best, name)} |" for name, value in numbers.items()]
        best = f"best, step {evidence.best['step']:,}" if evidence.best else "best: unknown"
        lines.append(
            f"On the validation split, which was held back from training:\n\n"
            f"| | last, step {evidence.last['step']:,} | {best} |\n|---|---|---|\n" + "\n".join(rows)
        )
    if evidence.sample is not None:
        lines.append(f"![sample]({stage}/sample{evidence.sample.suffix})\n\nIt shows samples of the validation split.")
    return "\n\n".join(lines)


def _number(value: Any) -> str:
    """metrics.jsonl has null for what is not finite."""
    return f"{value:.4g}" if isinstance(value, float | int) and math.isfinite(value) else "not finite"


def _best_number(best: Mapping[str, Any], name: str) -> str:
    return _number(best[name]) if name in best else "-" if best else "unknown"


def _making_section(evidence: Evidence, steps: Mapping[str, int]) -> str:
    known = evidence.environment
    texts = [f"    {command_text(command)}" for command in commands_until(known, steps)]
    versions = {name: known.get(name, "unknown") for name in NAMED}
    made = "\n".join(f"- {name}: {value}" for name, value in versions.items())
    return (
        "## How it was made\n\n"
        + ("\n".join(texts) if texts else "The command is not known.")
        + f"\n\n{made}\n- exported by tessera {our_version()}"
    )


def commands_until(environment: Mapping[str, Any], steps: Mapping[str, int]) -> list[list[Any]]:
    """The argvs that trained what is exported: those that began before its steps. One that trained two stages comes once."""
    listed = environment.get("commands", [environment.get("command")])
    found: list[list[Any]] = []
    for entry in listed if isinstance(listed, list) else ():
        command = entry
        if isinstance(entry, dict):
            command, begun, until = entry.get("command"), entry.get("from_step"), steps.get(str(entry.get("stage")))
            if until is None or not isinstance(begun, int) or begun >= until:
                continue
        if isinstance(command, list) and command and command not in found[-1:]:
            found.append(command)
    return found


def command_text(command: list[Any]) -> str:
    """An argv as one types it: the program by its name, whatever its place."""
    program, *arguments = (str(part) for part in command)
    path = Path(program)
    if path.name == "tessera" or (path.name == "__main__.py" and path.parent.name == "tessera"):
        return shlex.join(["tessera", *arguments])
    return shlex.join(["python", program, *arguments])
