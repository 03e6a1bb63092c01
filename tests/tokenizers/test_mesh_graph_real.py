"""Real and made meshes through a graph tokenizer of fixed random weights: what must hold of its ids whatever it has learned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera import pipeline
from tessera.data.canonical import quantise, standardise
from tessera.data.synth.furniture import plan_furniture, sample_furniture
from tessera.media.meshes import Mesh, read_mesh
from tessera.recipes.meshgpt.drawing import padded
from tessera.recipes.meshgpt.tokens import MeshTokens, module_of, tokens_of
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer
from tessera.tokenizers.mesh.graph import face_mask
from tests.tokenizers.graph_meshes import are_names, told_together

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")
BINS, DIGITS, BATCH = 128, (128, 160), 25
MODEL = (
    "{coordinate_width: 8, encoder_width: 24, encoder_layers: 2, decoder_width: 24, decoder_blocks: 1, heads: 2, "
    "quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [8, 8, 8, 8, 5]}}}"
)


def tokenizer() -> tuple[MeshTokens, GraphTokenizer]:
    """No weight is 0. The encoder is in fp64, so that ids do not hang on rounding, which differs with the size of a batch."""
    config = pipeline.resolve(
        "meshgpt", preset="tiny", sets=[f"data.bins={BINS}", "tokenizer.kind=graph", f"tokenizer.model={MODEL}"]
    )
    torch.manual_seed(0)
    net = module_of(config)
    assert isinstance(net, GraphTokenizer)
    for parameter in net.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    net.encoder.double()
    return tokens_of(config), net.eval()


def allowed(tokens: MeshTokens, ids: Tensor) -> bool:
    """f t: every face as the first one and as a later one, where the sequence may end, too."""
    state, mask = tokens.constraint.init(len(ids), ids.device)
    for later in (False, True):
        assert mask[:, -1].all() == later
        for token in ids.unbind(1):
            if not mask.gather(1, token[:, None]).all():
                return False
            state, mask = tokens.constraint.step(state, token)
    return True


@torch.no_grad()
def check(meshes: list[Mesh]) -> int:
    """Different ids that were seen."""
    (tokens, net), seen = tokenizer(), set[tuple[int, ...]]()
    all_bins = [quantise(standardise(mesh)[0], BINS) for mesh in meshes]
    for start in range(0, len(meshes), BATCH):
        corners, faces = padded(all_bins[start : start + BATCH])
        behind = torch.arange(corners.shape[1]) >= faces[:, None]
        corners = torch.where(behind[..., None, None], corners[:, :1], corners)  # padding that looks like the mesh
        codes = net.encode(corners, faces)
        digits = tokens.encode({"tokenizer": net}, corners, faces)
        parts = digits.unflatten(-1, (3, 2, 2))
        assert torch.equal(parts[..., 0] * DIGITS[1] + parts[..., 1], codes)
        back = tokens.decode({"tokenizer": net}, digits, faces)
        logits = net.decoder(net.quantizer.decode(codes), face_mask(faces, codes.shape[1]))
        for row, count in enumerate(faces.tolist()):
            mesh, ids = corners[row, :count], codes[row, :count].flatten(0, 1)
            assert are_names(mesh, codes[row, :count]), "one vertex, one code, and no other vertex has it"
            assert torch.equal(net.encode(mesh[None], faces[row : row + 1])[0], codes[row, :count]), "alone or beside others"
            assert not digits[row, count:].any()
            assert not back[row, count:].any()
            told = told_together(logits[row, :count], codes[row, :count])
            chosen = told.gather(-1, back[row, :count, ..., None])[..., 0]
            assert (chosen >= told.amax(-1) - 1e-3).all(), "the likeliest bins by all corners of a vertex, up to rounding"
            assert allowed(tokens, digits[row, :count])
            seen.update(map(tuple, ids.tolist()))
    return len(seen)


def test_furniture_there_and_back() -> None:
    plan = plan_furniture(0)
    assert check([sample_furniture(plan, "train", index)[1] for index in range(100)]) > 1000


def test_a_digit_too_large_is_not_allowed() -> None:
    """The check above can fail."""
    tokens, _ = tokenizer()
    ids = torch.zeros(1, 12, dtype=torch.long)
    assert allowed(tokens, ids)
    ids[0, 2] = DIGITS[0]
    assert not allowed(tokens, ids)


@pytest.mark.skipif(REAL_DATA is None, reason="set TESSERA_REAL_DATA")
def test_every_real_mesh_there_and_back() -> None:
    paths = sorted(Path(str(REAL_DATA), "lowpoly").rglob("*.obj"))
    assert len(paths) > 400
    assert check([read_mesh(path).mesh for path in paths]) > 10_000
