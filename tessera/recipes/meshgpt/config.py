"""The root config of the recipe, and its presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from tessera.config import Config, EngineConfig, Kinds, MeshDataConfig, MeshEvaluateConfig, OptimConfig
from tessera.generators.autoregressive.model import AutoregressiveConfig
from tessera.generators.autoregressive.sample import AutoregressiveSampleConfig
from tessera.generators.autoregressive.stage import AutoregressiveStageConfig
from tessera.recipes.needs import NeedsConfig
from tessera.text.encoders import ByteTextConfig, TextConfig
from tessera.tokenizers.mesh.autoencoder import GraphTokenizerConfig
from tessera.tokenizers.mesh.coordinates import CoordinateConfig
from tessera.tokenizers.mesh.graph_stage import GraphTokenizerStageConfig


class GraphConfig(GraphTokenizerStageConfig):
    """Training of a graph autoencoder, whose codes are the tokens."""

    kind: Literal["graph"] = "graph"
    """The kind of tokenizer."""


class BaseConfig(AutoregressiveStageConfig):
    """Training of the generator."""

    needs: NeedsConfig = NeedsConfig()
    """Where its tokens come from, with `tokenizer.kind=graph`."""


class MeshSampleConfig(AutoregressiveSampleConfig):
    """How meshes are drawn; each value can be changed per call."""

    guidance: float = Field(1.5, ge=0, le=1000)
    """Pull towards the text: logits of the unconditional branch plus this times the difference. 1 is none, at half the cost."""
    temperature: float = Field(0.5, ge=0, le=1000)
    """Of the choice of tokens; 0 takes the most probable. One wrong corner spoils a mesh, so well below 1."""
    faces: int = Field(0, ge=0, le=100_000)
    """Faces to ask for, about so many: triangles, or quads where the tokenizer has these; 0 leaves it to the caption."""
    max_faces: int | None = Field(None, ge=1, le=100_000)
    """A mesh is cut off there; left empty, at `data.max_faces`."""
    chunk: int = Field(16, ge=1, le=1024)
    """Meshes drawn at once. With `leave` no more than are asked for, up to a power of two; without it always so many."""


class MeshGPTConfig(Config):
    """Root config of the recipe."""

    recipe: Literal["meshgpt"] = "meshgpt"
    """The recipe's name."""
    preset: Literal["tiny", "small", "base", "large"] = "small"
    """Where the values come from that neither the file nor --set names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Everything random is a function of it: initial weights, order, augmentation, dropout."""
    data: MeshDataConfig = MeshDataConfig()
    """The user's files."""
    text: TextConfig = ByteTextConfig()
    """How captions are read."""
    tokenizer: Annotated[CoordinateConfig | GraphConfig, Field(discriminator="kind")] = CoordinateConfig()
    """Meshes to tokens: exact coordinates, or stage 1, a graph autoencoder."""
    base: BaseConfig = BaseConfig()
    """Captions to tokens."""
    engine: EngineConfig = EngineConfig()
    """How training runs."""
    sample: MeshSampleConfig = MeshSampleConfig()
    """How meshes are drawn."""
    evaluate: MeshEvaluateConfig = MeshEvaluateConfig()
    """How the trained model is judged."""

    @property
    def quads(self) -> bool:
        """Whether faces have four corners, where that can be; triangles otherwise."""
        return isinstance(self.tokenizer, GraphConfig) and self.tokenizer.model.corners == 4


def tiny() -> MeshGPTConfig:
    """For a CPU: 64 bins, meshes of up to 200 faces, 1 million parameters, minutes on two cores."""
    return MeshGPTConfig(
        preset="tiny",
        data=MeshDataConfig(bins=64, max_faces=200, workers=0),
        text=ByteTextConfig(length=96, width=64, depth=1, heads=4),
        base=BaseConfig(
            model=AutoregressiveConfig(width=128, depth=4, heads=4, inner_width=64, inner_depth=1),
            optim=OptimConfig(lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=50),
            ema_decay=0.99,
            batch_size=8,
            steps=1700,
        ),
        engine=EngineConfig(
            log_every_steps=50, validate_every_steps=425, preview_every_steps=850, save_every_steps=425,
            validation_samples=64, preview_samples=4,
        ),
        sample=MeshSampleConfig(guidance=1.0),
    )  # fmt: skip


def small() -> MeshGPTConfig:
    """128 bins, meshes of up to 800 faces, 54 million parameters, one GPU. 20,000 pieces of furniture, `base.steps=2500
    base.model.dropout=0.1`, on an H200: 92 % of held-out captions are drawn right (bench/RESULTS.md)."""
    return MeshGPTConfig(
        preset="small",
        data=MeshDataConfig(workers=8),
        engine=EngineConfig(precision="bf16", compile=True, cuda_graphs=True, preview_samples=4),
    )


def base() -> MeshGPTConfig:
    """128 bins, up to 1,600 faces, 350 million parameters, one large GPU and tens of thousands of meshes. Not yet trained to the
    end."""
    return MeshGPTConfig(
        preset="base",
        data=MeshDataConfig(max_faces=1600, scale=1.25, yaw="quarters", workers=16),
        text=ByteTextConfig(length=256, width=512, depth=6, heads=8),
        base=BaseConfig(
            model=AutoregressiveConfig(width=1024, depth=20, heads=8, inner_width=512, inner_depth=3, dropout=0.1),
            optim=OptimConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=2000),
            ema_decay=0.9999,
            batch_size=256,
            steps=100_000,
        ),
        engine=EngineConfig(
            precision="bf16", compile=True, cuda_graphs=True, micro_batch_size=32, validate_every_steps=2000,
            save_every_steps=5000, preview_samples=4,
        ),
    )  # fmt: skip


def large() -> MeshGPTConfig:
    """1,024 bins, up to 4,000 faces, 890 million parameters, for several GPUs. Not yet trained to the end."""
    start = base()
    return start.model_copy(
        update={
            "preset": "large",
            "data": start.data.model_copy(update={"bins": 1024, "max_faces": 4000}),
            "base": start.base.model_copy(
                update={
                    "model": AutoregressiveConfig(width=1536, depth=24, heads=12, inner_width=768, inner_depth=3),
                    "steps": 300_000,
                }
            ),
            "engine": start.engine.model_copy(update={"micro_batch_size": 8, "activation_checkpointing": True}),
        }
    )


def tiny_graph() -> GraphConfig:
    """The graph tokenizer beside `tiny`: 0.5 million parameters, three minutes on two cores."""
    return GraphConfig(
        model=GraphTokenizerConfig(encoder_width=96, encoder_layers=3, decoder_width=96, decoder_blocks=6, heads=4),
        optim=OptimConfig(lr=3e-3, warmup_steps=50),
        ema_decay=0.99,
        batch_size=16,
        steps=3000,
    )


SIZES: Mapping[str, Callable[[], MeshGPTConfig]] = {"tiny": tiny, "small": small, "base": base, "large": large}
KINDS = Kinds("tokenizer.kind", {"coordinates": MeshGPTConfig, "graph": MeshGPTConfig})


def preset_of(size: str, kind: str | None = None) -> MeshGPTConfig:
    """With exact coordinates, or the graph tokenizer of that size."""
    made = SIZES[size]()
    if kind != "graph":
        return made
    return made.model_copy(update={"tokenizer": tiny_graph() if size == "tiny" else GraphConfig()})


PRESETS: Mapping[str, Callable[..., MeshGPTConfig]] = {size: partial(preset_of, size) for size in SIZES}
