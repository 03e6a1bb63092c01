"""Cases of meshes, counted in faces: both trainings at the size of meshgpt-pytorch's, sampling, long meshes, and the loader."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tessera.batches import MeshBatch, TextStates
from tessera.bench.images import reduced, trainer
from tessera.bench.timing import alone, device, tell, time_call, time_steps
from tessera.config import MeshDataConfig
from tessera.contracts import Stage
from tessera.data.loader import Feed
from tessera.data.mesh_cache import MeshCache, write_meshes
from tessera.data.meshes import MeshLoader
from tessera.data.opening import open_source
from tessera.data.order import Cut
from tessera.data.synth.furniture import write_furniture
from tessera.generators.autoregressive.model import Autoregressive, AutoregressiveConfig
from tessera.generators.autoregressive.sample import AutoregressiveSampleConfig, Sampler, Writer
from tessera.generators.autoregressive.stage import AutoregressiveStageConfig, build_nets
from tessera.generators.autoregressive.stage import build_stage as build_autoregressive
from tessera.recipes.meshgpt.config import MeshGPTConfig
from tessera.recipes.meshgpt.tokens import sequences, tokens_of
from tessera.recording import Lean
from tessera.text.encoders import NoTextReader
from tessera.tokenizers.mesh.coordinates import Coordinates
from tessera.tokenizers.mesh.graph_stage import GraphTokenizerStageConfig
from tessera.tokenizers.mesh.graph_stage import build_stage as build_graph

BINS, TEXT_WIDTH = 128, 8
PEER = AutoregressiveStageConfig(model=AutoregressiveConfig(width=512, depth=12, heads=8))
"""Width and depth of the peer as it is timed, without text. It spends six tokens a face on 12 + 2 layers, ours one place."""


def generator(config: AutoregressiveStageConfig) -> Autoregressive:
    """A fresh one on the device; thin on a CPU."""
    torch.manual_seed(0)
    if reduced():
        small = AutoregressiveConfig(width=64, depth=2, heads=2, inner_width=32)
        config = config.model_copy(update={"model": small})
    exact = Coordinates(BINS)
    net = build_nets(config, vocab_size=exact.vocab_size, group=exact.group, text_width=TEXT_WIDTH)["generator"]
    assert isinstance(net, Autoregressive)
    return net.to(device())


def corners(num: int, faces: int) -> torch.Tensor:
    """b f 3 3 at random: what is timed does not hang on their order."""
    return torch.randint(0, BINS, (num, faces, 3, 3), generator=torch.Generator().manual_seed(0))


def facts(num: int, faces: int, parameters: int) -> dict[str, Any]:
    """What belongs to every row of this file."""
    return {"batch": num, "faces": faces, "parameters_m": round(parameters / 1e6, 1), "items": "faces", "reduced": reduced()}


def count(module: torch.nn.Module) -> int:
    """Its parameters."""
    return sum(p.numel() for p in module.parameters())


def meshes(num: int, faces: int) -> MeshBatch:
    """Random ones on the device, without captions."""
    return MeshBatch(
        corners=corners(num, faces),
        num_faces=torch.full((num,), faces),
        text=TextStates.none(num, TEXT_WIDTH),
        valid=torch.ones(num, dtype=torch.bool),
        positions=torch.arange(num),
        keys=tuple(str(i) for i in range(num)),
        captions=(None,) * num,
    ).to(device())


def timed_training(stage: Stage, num: int, faces: int) -> dict[str, Any]:
    """A whole step of the engine, compiled and recorded as preset small trains."""
    step, batch = trainer(stage, 0, graphs=True), meshes(num, faces)
    repeats, warm = (2, 1) if reduced() else (20, 5)
    row = time_steps(lambda: step(batch), num * faces, repeats=repeats, warm=warm)
    return row | facts(num, faces, sum(map(count, stage.nets.values())))


def generator_stage() -> Stage:
    """The generator's, on exact coordinates."""
    return build_autoregressive(PEER, {"generator": generator(PEER)}, sequences(tokens_of(MeshGPTConfig())))


def train_case(data: Path | None) -> dict[str, Any]:
    """512 faces, width 512, depth 12, batch 4."""
    return timed_training(generator_stage(), *((2, 16) if reduced() else (4, 512)))


def lengths_case(data: Path | None) -> dict[str, Any]:
    """The same for one mesh of more and more faces, compiled once for all lengths; null where memory was not enough."""
    step = trainer(generator_stage(), 0)
    repeats, warm = (2, 1) if reduced() else (15, 2)
    rows: dict[int, dict[str, Any] | None] = {}
    for faces in (16, 32) if reduced() else (512, 1024, 2048, 4096, 8192, 16384, 32768):
        batch = meshes(1, faces)
        try:
            rows[faces] = time_steps(functools.partial(step, batch), faces, repeats=repeats, warm=warm, count=False)
        except torch.OutOfMemoryError:
            rows[faces] = None
        tell({"faces": faces, "row": rows[faces]})
    longest, row = max((faces, row) for faces, row in rows.items() if row is not None)
    return {"lengths": rows, "most_faces": longest, "items_per_s": row["items_per_s"], "items": "faces", "reduced": reduced()}


def tokenizer_case(data: Path | None) -> dict[str, Any]:
    """The graph autoencoder at its defaults, 512 faces, batch 16."""
    torch.manual_seed(0)
    return timed_training(build_graph(GraphTokenizerStageConfig(), BINS), *((2, 16) if reduced() else (16, 512)))


@torch.no_grad()
def timed_sampling(num: int, faces: int) -> dict[str, Any]:
    """Meshes of exactly so many faces, without text and guidance, as the peer's are timed. Operations are not counted: what is
    timed are launches and small products."""
    net = generator(PEER).eval()
    net.head.weight.mul_(0.01)
    net.head.bias.copy_(-torch.arange(len(net.head.bias)))  # low tokens: no mesh climbs to the top and ends before its last face
    sampler = Sampler(
        Writer(Lean(net, device().type == "cuda"), AutoregressiveSampleConfig(guidance=1.0), Coordinates(BINS).constraint)
    )
    text, seeds = TextStates.none(num, TEXT_WIDTH).to(device()), torch.arange(num, device=device())
    made: list[int] = []

    def call() -> None:
        made.append(int(sampler(text, seeds, faces)[1].sum()))

    repeats, warm = (1, 1) if reduced() else (5, 2)
    row = time_call(call, num * faces, repeats=repeats, warm=warm, count=False)
    return row | facts(num, faces, count(net)) | {"faces_made": made[-1]}


def sample_case(data: Path | None) -> dict[str, Any]:
    """64 faces, one mesh."""
    return timed_sampling(1, 4 if reduced() else 64)


def sample_many_case(data: Path | None) -> dict[str, Any]:
    """64 faces, 64 meshes at once."""
    return timed_sampling(*((4, 4) if reduced() else (64, 64)))


def loader_case(data: Path | None) -> dict[str, Any]:
    """Batches of 64 from the user's meshes or from furniture, with all augmentation, as training reads them: no device."""
    with TemporaryDirectory() as folder:
        if data is None:
            data = Path(folder) / "furniture"
            write_furniture(data, 200 if reduced() else 2000, 0)
        config = MeshDataConfig(path=str(data), scale=1.25, yaw="quarters", shift=0.05, workers=0 if reduced() else 8)
        feed = Feed(
            source=open_source(str(data), config), config=config, cut=Cut(64, None, 0, 1), seed=0, device=torch.device("cpu"),
            validation_samples=0, preview_samples=0, caches=Path(folder), say=_quiet, show=_quiet,
        )  # fmt: skip
        batches = MeshLoader(feed, MeshCache(write_meshes(feed)), NoTextReader()).batches(0)
        for _ in range(2):
            next(batches)
        with alone():
            started, faces, meshes = time.perf_counter(), 0, 0
            while (seconds := time.perf_counter() - started) < (1 if reduced() else 5):
                for batch in next(batches):
                    faces, meshes = faces + int(batch.num_faces.sum()), meshes + len(batch.keys)
        batches.close()
    return {
        "items_per_s": round(faces / seconds, 1), "meshes_per_s": round(meshes / seconds, 1), "items": "faces",
        "workers": config.workers,
    }  # fmt: skip


def _quiet(line: str) -> None: ...


CASES: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "mesh.tokenizer.train": tokenizer_case,
    "mesh.ar.train": train_case,
    "mesh.ar.lengths": lengths_case,
    "mesh.ar.sample": sample_case,
    "mesh.ar.sample64": sample_many_case,
    "mesh.loader": loader_case,
}
