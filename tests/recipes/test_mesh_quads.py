"""Quads, an option of the graph tokenizer: found in what is read, learned, drawn, and triangles again in what leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import pipeline
from tessera.config import UserError
from tessera.data.canonical import quantise, standardise, to_mesh
from tessera.data.quads import join_quads
from tessera.data.synth.furniture import write_furniture
from tessera.media.meshes import Mesh, read_mesh
from tessera.recipes.meshgpt import drawing, tokens
from tessera.sampling.session import Session, load
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer

BINS = 32
SETS = (
    "data.bins=32",
    "tokenizer={kind: graph, batch_size: 4, model: {corners: 4, coordinate_width: 8, encoder_width: 16, encoder_layers: 1, "
    "decoder_width: 16, decoder_blocks: 1, heads: 2, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [5, 5, 4]}}}}",
    "text={kind: bytes, length: 16, width: 16, depth: 1, heads: 2}",
    "base={batch_size: 4, model: {width: 16, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}}",
    "sample={max_faces: 8, chunk: 2}",
    "engine={device: cpu, validation_samples: 4, preview_samples: 2, preview_every_steps: 2, validate_every_steps: 2}",
)


@pytest.fixture(scope="module")
def seen() -> list[tuple[int, ...]]:
    """Shapes of what the tokenizer was given."""
    return []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, ...]]) -> Path:
    folder = tmp_path_factory.mktemp("quads")
    write_furniture(folder / "data", 24, 0)
    plain = GraphTokenizer.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            GraphTokenizer, "forward", lambda net, corners, *rest: seen.append(tuple(corners.shape)) or plain(net, corners, *rest)
        )
        config = pipeline.resolve("meshgpt", preset="tiny", data=str(folder / "data"), steps=2, sets=SETS)
        pipeline.train(config, run=folder / "run")
    return folder


@pytest.fixture(scope="module")
def session(home: Path) -> Session:
    return load(home / "run", device="cpu")


@pytest.fixture(scope="module")
def meshes(home: Path) -> list[Mesh]:
    paths = sorted(path for path in (home / "data" / "train").iterdir() if path.suffix in (".obj", ".glb", ".ply"))
    return [standardise(read_mesh(path).mesh)[0] for path in paths[:3]]


def test_training_sees_quads_and_draws_triangles(session: Session, seen: list[tuple[int, ...]]) -> None:
    assert seen
    assert all(shape[2:] == (4, 3) for shape in seen)
    draw: Any = session.draw
    assert draw.tokens.group == (4, 2)
    made = session.sample(["a chair", "a lamp"], seed=1)
    assert all(mesh.faces.shape[1:] == (3,) for mesh in made)
    assert max(len(mesh.faces) for mesh in made) <= 2 * 8


def test_a_perfect_tokenizer_keeps_every_triangle(session: Session, meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """Corners that come back as they went in: what is left between reading and the mesh that leaves."""
    draw: Any = session.draw
    kept: list[Any] = []
    whole = tokens.MeshTokens(
        draw.tokens.vocab_size, draw.tokens.group, draw.tokens.constraint,
        encode=lambda nets, corners, faces: kept.append(corners) or corners.flatten(2),
        decode=lambda nets, ids, faces: kept.pop(),
    )  # fmt: skip
    monkeypatch.setattr(drawing, "tokens_of", lambda config: whole)
    for mesh, back in zip(meshes, draw.through_tokens(meshes), strict=True):
        np.testing.assert_array_equal(quantise(back, BINS), quantise(mesh, BINS))
        assert back.quads is not None
        places = np.floor((back.vertices[back.quads][..., ::-1] + 1) * (BINS / 2)).astype(np.int64)
        np.testing.assert_array_equal(places, join_quads(quantise(mesh, BINS)))


def test_a_part_and_the_loss_are_counted_in_quads(session: Session, meshes: list[Mesh]) -> None:
    draw: Any = session.draw
    corners = quantise(meshes[0], BINS)
    part = to_mesh(corners[:4], BINS)
    (made,) = session.sample("a chair", mesh=part, options={"max_faces": 8})
    assert isinstance(made, Mesh)
    most = len(join_quads(quantise(part, BINS)))
    with pytest.raises(UserError, match=f"has {most} faces, more than sample.max_faces={most - 1}"):
        session.sample("a chair", mesh=part, options={"max_faces": most - 1})
    loss = draw.loss(meshes[:2], ["a chair", "a lamp"])
    assert np.isfinite(loss["loss"])
