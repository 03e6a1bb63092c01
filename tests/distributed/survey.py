"""`survey.py OUT DATA`: the scale of latents that a stage measures before its first step, written by every rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tessera import pipeline
from tessera.engine.dist import join, leave
from tessera.engine.step import Setting
from tessera.engine.survey import take_survey

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.prepared import prepared

SETS = [
    "data.resolution=16",
    "data.crop=random",
    "data.zoom=2",
    "text={kind: bytes, length: 32, width: 16, depth: 1, heads: 2}",
    "embedder.model={width: 8, widths: [8, 16]}",
    "base={batch_size: 7, model: {widths: [8, 8], blocks: [1, 1], head_width: 8}, "
    "latent: {path: elsewhere/tokenizer, model: {widths: [8, 8], blocks: [1, 1], quantizer: {kind: fsq, levels: [4, 4]}}}}",
]


def measure(out: Path, data: str) -> None:
    config = pipeline.resolve("dalle2", preset="tiny", data=data, sets=SETS)
    world = join(config.engine)
    (train,) = pipeline.pick(pipeline.RECIPES["dalle2"].steps(config), "base")
    stage, state, loader = prepared(config, train, world, out / "caches")
    assert stage.survey is not None
    take_survey(stage, stage.survey, state, loader, train.batch_size, Setting(world, train.steps))
    nets: dict[str, Any] = {"raw": state.nets["generator"], "averaged": state.averages["generator"]}
    found = {name: [net.latent_scale.mean.tolist(), net.latent_scale.std.tolist()] for name, net in nets.items()}
    (out / f"scale-{world.rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    measure(Path(sys.argv[1]), sys.argv[2])
