"""Real and made meshes through graph tokenizers of fixed random weights: what must hold of ids whatever was learned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera import pipeline
from tessera.data.canonical import quantise, standardise
from tessera.data.quads import join_quads
from tessera.data.synth.furniture import plan_furniture, sample_furniture
from tessera.media.meshes import Mesh, read_mesh
from tessera.recipes.meshgpt.drawing import padded
from tessera.recipes.meshgpt.tokens import MeshTokens, module_of, tokens_of
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer
from tessera.tokenizers.mesh.graph import face_mask
from tests.tokenizers.graph_meshes import are_names, told_together

REAL_DATA = os.environ.get("TESSERA_REAL_DATA")
BINS, BATCH = 128, 25
SIZES = "coordinate_width: 8, encoder_width: 24, encoder_layers: 2, decoder_width: 24, decoder_blocks: 1, heads: 2"
FSQ = "quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [8, 8, 8, 8, 5]}}"
KINDS = {
    "fsq": FSQ,
    "lfq": "quantizer: {num_quantizers: 2, quantizer: {kind: lfq, bits: 12}}",
    "rvq": "quantizer: {num_quantizers: 2, quantizer: {kind: vq, codes: 1024, width: 4}}",
    "quads": f"corners: 4, {FSQ}",
}
DIGITS = {"fsq": (128, 160), "lfq": (4096,), "rvq": (1024,), "quads": (128, 160)}


def tokenizer(kind: str) -> tuple[MeshTokens, GraphTokenizer]:
    """No weight is 0. The encoder is in fp64, so that ids do not hang on rounding, which differs with the size of a batch."""
    sets = [f"data.bins={BINS}", "tokenizer.kind=graph", f"tokenizer.model={{{SIZES}, {KINDS[kind]}}}"]
    config = pipeline.resolve("meshgpt", preset="tiny", sets=sets)
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
def check(kind: str, meshes: list[Mesh]) -> int:
    """Different ids that were seen."""
    (tokens, net), seen, sizes = tokenizer(kind), set[tuple[int, ...]](), DIGITS[kind]
    all_bins = [quantise(standardise(mesh)[0], BINS) for mesh in meshes]
    if net.corners == 4:
        all_bins = [join_quads(corners) for corners in all_bins]
    for start in range(0, len(meshes), BATCH):
        corners, faces = padded(all_bins[start : start + BATCH])
        behind = torch.arange(corners.shape[1]) >= faces[:, None]
        corners = torch.where(behind[..., None, None], corners[:, :1], corners)  # padding that looks like the mesh
        codes = net.encode(corners, faces)
        digits = tokens.encode({"tokenizer": net}, corners, faces)
        parts = digits.unflatten(-1, (net.corners, 2, len(sizes)))
        assert torch.equal(parts[..., 0] * sizes[1] + parts[..., 1] if len(sizes) > 1 else parts[..., 0], codes)
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


@pytest.mark.parametrize("kind", KINDS)
def test_furniture_there_and_back(kind: str) -> None:
    plan = plan_furniture(0)
    assert check(kind, [sample_furniture(plan, "train", index)[1] for index in range(60)]) > 500


def test_a_digit_too_large_and_a_corner_twice_are_not_allowed() -> None:
    """The check above can fail."""
    tokens, _ = tokenizer("fsq")
    ids = torch.zeros(1, 12, dtype=torch.long)
    assert not allowed(tokens, ids)
    ids[0, 3], ids[0, 7] = 1, 2
    assert allowed(tokens, ids)
    ids[0, 2] = DIGITS["fsq"][0]
    assert not allowed(tokens, ids)


@pytest.mark.skipif(REAL_DATA is None, reason="set TESSERA_REAL_DATA")
@pytest.mark.parametrize("kind", KINDS)
def test_every_real_mesh_there_and_back(kind: str) -> None:
    paths = sorted(Path(str(REAL_DATA), "lowpoly").rglob("*.obj"))
    assert len(paths) > 400
    assert check(kind, [read_mesh(path).mesh for path in paths]) > 1000
