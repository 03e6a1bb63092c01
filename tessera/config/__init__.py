"""Config: frozen, typed sections, read from YAML and `--set`, with errors that name the key, the line and the nearest right name.

In: files, flags and presets. Out: a validated config or a `UserError`. This room imports nothing else of tessera.
"""

from tessera.config.base import Config
from tessera.config.document import document
from tessera.config.embeddings import (
    EmbeddingFilesConfig,
    ListedEmbeddingsConfig,
    ShardEmbeddingsConfig,
    TarEmbeddingsConfig,
)
from tessera.config.errors import UserError, nearest
from tessera.config.loading import Kinds, Layer, build, difference, dump_yaml, layer_of, parse_sets, read_yaml
from tessera.config.sections import (
    MAX_FPS,
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    ImageDataConfig,
    JudgingConfig,
    LpipsConfig,
    MeshDataConfig,
    MeshEvaluateConfig,
    OptimConfig,
    VideoDataConfig,
    VideoEvaluateConfig,
)  # fmt: skip

__all__ = [
    "MAX_FPS",
    "Config",
    "DataConfig",
    "EmbeddingFilesConfig",
    "EngineConfig",
    "EvaluateConfig",
    "ImageDataConfig",
    "JudgingConfig",
    "Kinds",
    "Layer",
    "ListedEmbeddingsConfig",
    "LpipsConfig",
    "MeshDataConfig",
    "MeshEvaluateConfig",
    "OptimConfig",
    "ShardEmbeddingsConfig",
    "TarEmbeddingsConfig",
    "UserError",
    "VideoDataConfig",
    "VideoEvaluateConfig",
    "build",
    "difference",
    "document",
    "dump_yaml",
    "layer_of",
    "nearest",
    "parse_sets",
    "read_yaml",
]
