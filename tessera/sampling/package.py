"""An export: what use needs of a run, in a folder of its own that travels.

    README.md                      the model card, yours to edit
    config.json                    format, recipe, stages and the complete config, without the path of the data
    manifest.json                  bytes and sha256 of config.json and of all weights, so that damage is found
    STAGE/model.safetensors        one folder a trained stage; averaged weights where there are any
    STAGE/sample.png               the last preview of the stage; of clips sample.gif

No optimizer, no code, and only the nets that `contracts.Train.serves` names: a token critic, which `sample.order=critic` asks, is
in; the tokenizer's critic, which training alone asks, is not.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from tessera.config import UserError
from tessera.engine.checkpoint import write_tensors
from tessera.files import digest, in_the_way, sync_folder, write_json, write_text
from tessera.sampling.card import Evidence, describe_model, gather_evidence, write_card
from tessera.sampling.places import read_run
from tessera.sampling.stored import EXPORT_FORMAT, Stored, build_nets, open_run, our_version


def export_run(run: Path | str, out: Path | str, checkpoint: str = "latest") -> Path:
    """Writes an export of a run, also of one in progress, beside its place and then renames it. Never over anything."""
    out = Path(out)
    if os.path.lexists(out):
        raise UserError(f"{out} exists; an export needs a new folder: name another one with --out")
    if blocked := in_the_way(out):
        raise UserError(f"{blocked}; name another --out, a new folder")
    stored = open_run(Path(run), checkpoint)
    evidence = {name: gather_evidence(stage) for name, stage in stored.stages.items()}
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write(temporary, out.name, stored, evidence)
        sync_folder(temporary)
        os.rename(temporary, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(out.parent)
    return out


def next_command(run: Path, out: Path) -> str:
    """What to do with an export, as one types it: draw; where no generator is in it, look at what its tokenizer keeps."""
    if (out / "base").is_dir():
        return f'tessera sample {shlex.quote(str(out))} "PROMPT"'
    medium, model = read_run(run)[0].medium, f"tessera.load({json.dumps(str(out))})"
    codes = {
        "picture": f'import tessera; {model}.reconstruct("PICTURE")[0].save("reconstruction.png")',
        "clip": "import tessera; from tessera.media.clip_files import encode_gif; "
        f'open("reconstruction.gif", "wb").write(encode_gif({model}.reconstruct("CLIP")[0]))',
    }
    return f"python -c {shlex.quote(codes[medium])}" if medium in codes else f"tessera resume {shlex.quote(str(run))}"


def without_places(value: Any) -> Any:
    """A config whose absolute paths are names: where they lay is of no use elsewhere, and nobody else's business."""
    if isinstance(value, dict):
        places = ("path", "tokenizer", "extractor", "inception", "heads")  # the second under needs, the last of LPIPS
        found = {key: isinstance(item, str) and key in places and Path(item).is_absolute() for key, item in value.items()}
        return {key: Path(item).name if found[key] else without_places(item) for key, item in value.items()}
    return [without_places(item) for item in value] if isinstance(value, list) else value


def travelling(config: Any) -> dict[str, Any]:
    """A config as an export holds it."""
    whole = config.model_dump(mode="json")
    values: dict[str, Any] = without_places(whole)
    values["text"] = whole["text"]  # a text model would not be found without its place
    if whole.get("embeddings", {}).get("kind") == "clip":
        values["embeddings"] = whole["embeddings"]  # nor a CLIP model
    values["data"]["path"] = None
    return values


def _write(folder: Path, name: str, stored: Stored, evidence: dict[str, Evidence]) -> None:
    facts: dict[str, Any] = {}
    models: dict[str, str] = {}
    taken = {train.name for train in stored.recipe.steps(stored.config) if train.origin is not None}
    for stage_name, stage in stored.stages.items():
        nets = build_nets(stage)  # also the proof that it can be opened
        models[stage_name] = describe_model(stage, nets)
        (folder / stage_name).mkdir()
        tensors = {f"{net}/{key}": tensor for net, module in nets.items() for key, tensor in module.state_dict().items()}
        write_tensors(folder / stage_name / "model.safetensors", tensors)
        facts[stage_name] = {"step": stage.step, "nets": sorted(nets), "averaged": sorted(stage.averaged & set(nets))}
        # trained before a `resume --set`, its nets may be built otherwise; of one from elsewhere the run's config knows all
        if stage.config != stored.config and stage_name not in taken:
            facts[stage_name]["config"] = travelling(stage.config)
        if sample := evidence[stage_name].sample:
            shutil.copyfile(sample, folder / stage_name / f"sample{sample.suffix}")
    write_json(
        folder / "config.json",
        {
            "format": EXPORT_FORMAT,
            "tessera": our_version(),
            "recipe": stored.recipe.name,
            "stages": facts,
            "config": travelling(stored.config),
        },
    )
    parts = ["config.json", *(f"{stage}/model.safetensors" for stage in facts)]
    files = {part: {"bytes": (folder / part).stat().st_size, "sha256": digest(folder / part)} for part in parts}
    write_json(folder / "manifest.json", {"format": EXPORT_FORMAT, "files": files})
    write_text(folder / "README.md", write_card(name, stored, facts, evidence, models))
