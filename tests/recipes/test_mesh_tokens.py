"""Meshes to tokens and back: learned codes of a large vocabulary are written as two digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera import pipeline
from tessera.config import Layer, UserError
from tessera.recipes.meshgpt.config import KINDS
from tessera.recipes.meshgpt.tokens import MeshTokens, meshes_of, module_of, tokens_of

QUANTIZERS = {
    "one": ("{kind: fsq, levels: [5, 5, 4]}", (100,)),
    "two": ("{kind: fsq, levels: [8, 8, 8, 8, 4]}", (128, 128)),
    "unequal": ("{kind: fsq, levels: [8, 8, 8, 8, 5]}", (128, 160)),
}


@pytest.fixture(params=QUANTIZERS)
def made(request: pytest.FixtureRequest) -> tuple[MeshTokens, Any, tuple[int, ...]]:
    """Tokens, the tokenizer's net, and the sizes of digits."""
    kind, digits = QUANTIZERS[request.param]
    model = "encoder_width: 24, encoder_layers: 1, decoder_width: 24, decoder_blocks: 1, heads: 2"
    tokenizer = f"tokenizer={{kind: graph, model: {{{model}, quantizer: {{num_quantizers: 2, quantizer: {kind}}}}}}}"
    config = pipeline.resolve("meshgpt", preset="tiny", sets=[tokenizer])
    torch.manual_seed(0)
    net = module_of(config)
    assert net is not None
    return tokens_of(config), net.eval(), digits


def test_codes_come_back_from_their_digits(made: tuple[MeshTokens, Any, tuple[int, ...]]) -> None:
    tokens, net, digits = made
    corners, faces = torch.randint(0, 64, (2, 5, 3, 3)), torch.tensor([5, 3])
    codes = net.encode(corners, faces)
    ids = tokens.encode({"tokenizer": net}, corners, faces)
    assert tokens.vocab_size == max(digits)
    assert tokens.group == ((3, 2) if len(digits) == 1 else (3, 2, 2))
    assert ids.shape == (2, 5, 6 * len(digits))
    parts = ids.unflatten(-1, (3, 2, len(digits)))
    assert torch.equal(parts[..., 0] if len(digits) == 1 else parts[..., 0] * digits[1] + parts[..., 1], codes)
    assert torch.equal(tokens.decode({"tokenizer": net}, ids, faces), net.decode(codes, faces))


def test_whatever_may_be_drawn_is_a_code(made: tuple[MeshTokens, Any, tuple[int, ...]]) -> None:
    tokens, _, digits = made
    state, allowed = tokens.constraint.init(2, torch.device("cpu"))
    each = 2 * len(digits)  # tokens of a corner
    for place in range(3 * 3 * each):
        corner, token = divmod(place % (3 * each), each)
        wanted = torch.zeros(tokens.vocab_size + 1, dtype=torch.bool)
        wanted[: digits[place % len(digits)]] = True
        wanted[-1] = place > 0 and corner == token == 0
        last = token == each - 1
        wanted[: corner * last] = False  # would make it an earlier corner
        assert torch.equal(allowed, wanted.expand(2, -1)), place
        state, allowed = tokens.constraint.step(state, torch.full((2,), corner * last))


def test_a_drawn_mesh_remembers_the_faces_that_were_removed() -> None:
    tokens = tokens_of(pipeline.resolve("meshgpt", preset="tiny"))
    a, b, c, d = [1, 0, 0], [1, 0, 2], [1, 2, 0], [3, 0, 0]
    ids = torch.tensor([[a, b, c], [b, c, a], [a, b, b], [a, b, d], [a, a, a]]).flatten(1)[None]
    (whole,) = meshes_of(tokens, {}, ids, torch.tensor([5]), bins=64)
    (none,) = meshes_of(tokens, {}, ids, torch.tensor([0]), bins=64)
    assert (len(whole.faces), whole.cleaning.num_degenerate, whole.cleaning.num_duplicate) == (2, 2, 1)
    assert (len(none.faces), none.cleaning.num_faces_before) == (0, 0)


def test_a_preset_knows_the_size_of_either_tokenizer(tmp_path: Path) -> None:
    def millions(preset: str) -> float:
        with torch.device("meta"):
            net = module_of(pipeline.resolve("meshgpt", preset=preset, sets=["tokenizer.kind=graph"]))
        assert net is not None
        return sum(parameter.numel() for parameter in net.parameters()) / 1e6

    assert millions("tiny") < 1 < 16 < millions("small") < 17
    changed = pipeline.resolve("meshgpt", preset="tiny", sets=["tokenizer.kind=graph", "tokenizer.steps=7"])
    assert (changed.tokenizer.steps, changed.tokenizer.batch_size) == (7, 16)
    (tmp_path / "my.yaml").write_text("recipe: meshgpt\npreset: tiny\ntokenizer: {kind: graph, steps: 7}\n")
    assert pipeline.resolve(str(tmp_path / "my.yaml")) == changed
    assert pipeline.resolve("meshgpt", preset="tiny").tokenizer.kind == "coordinates"


def test_kinds_of_one_type_have_no_keys_of_their_own() -> None:
    with pytest.raises(UserError, match=r"text\.depth") as told:
        pipeline.resolve("meshgpt", preset="tiny", sets=["tokenizer.kind=graph", "text.kind=minilm", "text.depth=2"])
    assert "tokenizer.kind" not in str(told.value)


def test_a_run_keeps_its_kind_of_tokenizer() -> None:
    saved, same, other = (Layer.of({"tokenizer": {"kind": kind}}, "") for kind in ("graph", "graph", "coordinates"))
    pipeline.refuse_other_kind(KINDS, saved, same)
    with pytest.raises(UserError, match=r"coordinates: a run keeps its tokenizer\.kind, here graph; start a new run"):
        pipeline.refuse_other_kind(KINDS, saved, other)
