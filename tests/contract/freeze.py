"""`python tests/contract/freeze.py`: writes a small run of each recipe and its losses to tests/contract/frozen, to be kept.

A checkpoint that was once written must load for ever, and the same command must give the same losses: `test_frozen.py` holds us
to both. Run it for a new recipe, or when the checkpoint format gets a new number; the old folders stay.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tessera import pipeline
from tessera.data.synth.shapes import write_shapes
from tessera.engine.checkpoint import FORMAT
from tessera.engine.track import read_metrics

FROZEN = Path(__file__).parent / "frozen"
STEPS, SAVED = 8, 5
SETS = {
    "muse": (
        "data.resolution=16",
        "data.validation_fraction=0.2",
        "data.crop=random",
        "tokenizer.batch_size=4",
        "tokenizer.model={widths: [4, 4], blocks: [1, 1], quantizer: {levels: [4, 4]}}",
        "tokenizer.critic={widths: [4, 4], start_step: 3, warmup_steps: 2, adaptive: true, penalty: {every: 2}}",
        "engine.device=cpu",
        "engine.log_every_steps=1",
        f"engine.save_every_steps={SAVED}",
        "engine.validate_every_steps=4",
    )
}


def write_data(recipe: str, folder: Path) -> None:
    """What the run was trained on; synthetic, so that it need not be kept."""
    write_shapes(folder, 24, 0, image_size=32)


def losses(run: Path, stage: str) -> list[dict[str, float]]:
    """Every logged number of a stage but those that measure time and memory."""
    lines = read_metrics(run / stage / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def freeze(recipe: str) -> None:
    """The folder of the run as it was at the step that is kept, and the losses of all steps."""
    with tempfile.TemporaryDirectory() as scratch:
        data, run = Path(scratch) / "data", Path(scratch) / "run"
        write_data(recipe, data)
        config = pipeline.resolve(recipe, preset="tiny", data=str(data), steps=STEPS, sets=SETS[recipe])
        pipeline.train(config, run=run)
        home = FROZEN / f"{recipe}-format-{FORMAT}"
        home.mkdir(parents=True)
        shutil.copy(run / "config.yaml", home)
        for stage in sorted(path.parent.name for path in run.glob("*/checkpoints")):
            name = f"step-{SAVED:06d}"
            shutil.copytree(run / stage / "checkpoints" / name, home / stage / "checkpoints" / name)
            (home / stage / "losses.json").write_text(json.dumps(losses(run, stage), indent=1) + "\n")


if __name__ == "__main__":
    for name in SETS:
        if not (FROZEN / f"{name}-format-{FORMAT}").exists():
            freeze(name)
