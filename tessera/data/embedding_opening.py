"""Embeddings that lie in files: which reader a config means."""

from __future__ import annotations

from tessera.config import EmbeddingFilesConfig, ListedEmbeddingsConfig, TarEmbeddingsConfig, UserError
from tessera.data.embedding_files import FileEmbeddings
from tessera.data.embedding_tars import TarEmbeddings
from tessera.data.embeddings import Embeddings
from tessera.data.shards import TarShards
from tessera.data.sources import Source


def open_embeddings(config: EmbeddingFilesConfig, source: Source) -> Embeddings:
    """What the config names, for the samples of a source. Reads headers only; `Missing.among` reads all."""
    if isinstance(config, ListedEmbeddingsConfig):
        return FileEmbeddings.listed(config.path)
    if not isinstance(source, TarShards):
        raise UserError(
            f"embeddings of kind {config.kind} belong to webdataset tars, and the data is {type(source).__name__}; "
            "bring one .npy with the list of its keys: kind list, or have them computed"
        )
    return (
        TarEmbeddings.open(config, source)
        if isinstance(config, TarEmbeddingsConfig)
        else FileEmbeddings.of_shards(config, source)
    )
