"""Where the embeddings of pictures lie that were computed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tessera.config.base import Config


class TarEmbeddingsConfig(Config):
    """Arrays in the tars themselves, beside the pictures: `0001.img_emb.npy` beside `0001.jpg`."""

    kind: Literal["tars"] = "tars"
    """Where they lie."""
    suffix: str | None = Field(None, pattern=r"^\..*\.npy$|^\.npy$")
    """What follows a sample's name, such as `.img_emb.npy`; left empty, the only such ending that the tars have."""


class ShardEmbeddingsConfig(Config):
    """A folder with one array for each tar, `<prefix>_<number of the tar>.npy`, rows x channels."""

    kind: Literal["shards"] = "shards"
    """Where they lie."""
    path: Path
    """The folder."""
    prefix: str | None = None
    """What stands before the number, such as `img_emb`; left empty, the only such name that the folder has."""
    rows: Literal["name", "place"] = "name"
    """Which row belongs to a sample: the number that ends its name, or its place among the pictures of its tar."""
    digits: int | None = Field(None, ge=1, le=18)
    """With rows: name, how many digits at the name's end are the row; left empty, all of them. img2dataset: 4."""


class ListedEmbeddingsConfig(Config):
    """`NAME.npy`, rows x channels, with the sample keys beside it in the same order: a line each in `NAME.txt`, or a JSON list in
    `NAME.json`; or a folder of such pairs."""

    kind: Literal["list"] = "list"
    """Where they lie."""
    path: Path
    """The .npy file, or the folder."""


EmbeddingFilesConfig = Annotated[
    TarEmbeddingsConfig | ShardEmbeddingsConfig | ListedEmbeddingsConfig, Field(discriminator="kind")
]
