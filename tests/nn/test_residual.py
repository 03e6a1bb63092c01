"""Residual chains: one link is the quantizer alone, each link sees what is left, and peers agree where they can be compared."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from vector_quantize_pytorch import ResidualLFQ, ResidualVQ  # type: ignore[import-untyped]

from tessera.nn.quantizers import (
    FSQConfig,
    LFQConfig,
    Quantizer,
    QuantizerConfig,
    Residual,
    ResidualConfig,
    VQConfig,
    code_use,
)
from tessera.nn.quantizers.codes import to_sphere

KINDS = [FSQConfig(levels=(8, 5, 5)), LFQConfig(bits=6), VQConfig(codes=32, width=4)]
IDS = [config.kind for config in KINDS]


def build(config: FSQConfig | LFQConfig | VQConfig, num: int = 3) -> Residual:
    torch.manual_seed(0)
    made = ResidualConfig(quantizer=config, num_quantizers=num).build()
    for depth, link in enumerate(made.chain):
        if isinstance(config, VQConfig) and depth:  # they start at 0 and follow the data
            link.get_buffer("codebook").normal_(std=0.5**depth)
    return made


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_a_chain_of_one_is_the_quantizer_alone(config: FSQConfig | LFQConfig | VQConfig) -> None:
    z, chain = vectors(3, 5, config.width), build(config, 1)
    torch.manual_seed(0)
    alone: Quantizer = config.build()
    one, plain = chain(z), alone(z)
    assert torch.equal(one.ids[..., 0], plain.ids)
    assert torch.equal(one.codes, plain.codes)
    assert all(torch.equal(one.terms[name], plain.terms[name]) for name in plain.terms)
    assert torch.equal(chain.counts(one.ids)[0], alone.counts(plain.ids))
    assert (chain.vocab_size, chain.width) == (alone.vocab_size, alone.width) == (config.vocab_size, config.width)


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_links_quantize_what_is_left(config: FSQConfig | LFQConfig | VQConfig) -> None:
    chain, z = build(config), vectors(4, 6, config.width)
    made = chain(z)
    assert made.ids.shape == (4, 6, 3)
    left, codes = made.prepared.detach(), torch.zeros_like(made.codes)
    for index, link in enumerate(chain.chain):
        assert torch.equal(link.nearest(left), made.ids[..., index])
        codes, left = codes + link.decode(made.ids[..., index]), left - link.decode(made.ids[..., index])
        torch.testing.assert_close(chain.decode(made.ids[..., : index + 1]), codes)
    torch.testing.assert_close(made.codes, codes)
    assert made.ids.max() < chain.vocab_size
    assert made.ids.min() >= 0


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_gradients_nan_and_half_precision(config: FSQConfig | LFQConfig | VQConfig) -> None:
    chain, z = build(config), vectors(4, 6, config.width).requires_grad_(True)
    made, pull = chain(z), vectors(4, 6, config.width, seed=1)
    (straight,) = torch.autograd.grad((made.codes * pull).sum(), z, retain_graph=True)
    (bound_alone,) = torch.autograd.grad((made.prepared * pull).sum(), z)
    assert torch.equal(straight, bound_alone)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(chain(z.bfloat16()).ids, chain(z.bfloat16().float()).ids)
    broken = z.detach().clone()
    broken[0, 0, 0] = math.nan
    assert 0 <= chain(broken).ids.min() <= chain(broken).ids.max() < chain.vocab_size
    assert bool(chain(broken).codes[0, 0].isnan().any())


@pytest.mark.parametrize("levels", [(5,), (8,), (2,), (3, 4, 7)])
def test_fsq_is_a_number_with_more_digits(levels: tuple[int, ...]) -> None:
    """After q links the error is at most half of a cell that is levels^q times smaller. Only the two cells at the ends, which are
    half as wide, leave some of the next digits unused."""
    z, sizes = 0.5 * vectors(2000, len(levels)), torch.tensor(levels)
    for num in (1, 2, 3):
        chain = build(FSQConfig(levels=levels), num)
        made = chain(z)
        cell = 1 / ((sizes // 2) * sizes.float() ** (num - 1))
        assert bool(((made.codes - made.prepared).abs() <= cell * (0.5 + 2e-3 * sizes**num)).all())
    if len(levels) == 1:
        fine = build(FSQConfig(levels=levels), 2)
        inside = torch.linspace(-12, 6, 400_000)[:, None]
        assert len(fine(inside).ids.unique(dim=0)) >= levels[0] * (levels[0] - 1)


def test_lfq_ids_are_those_of_the_peer() -> None:
    chain, z = build(LFQConfig(bits=6), 4), vectors(3, 20, 6)
    peer = ResidualLFQ(dim=6, codebook_size=64, num_quantizers=4).eval()
    codes, ids, _ = peer(chain.prepare(z))
    flipped = sum(((ids >> place) & 1) << (5 - place) for place in range(6))
    made = chain(z)
    assert torch.equal(made.ids, flipped.long())
    torch.testing.assert_close(made.codes, codes)


def test_vq_ids_are_those_of_the_peer() -> None:
    chain, z = build(VQConfig(codes=32, width=4), 3), vectors(3, 20, 4)
    peer = ResidualVQ(dim=4, codebook_size=32, num_quantizers=3, rotation_trick=False).eval()
    for layer, link in zip(peer.layers, chain.chain, strict=True):
        layer._codebook.embed.copy_(link.get_buffer("codebook")[None])
        layer._codebook.initted.fill_(True)
    codes, ids, _ = peer(chain.prepare(z))
    made = chain(z)
    assert torch.equal(made.ids, ids)
    torch.testing.assert_close(made.codes, codes)


def test_terms_are_means_and_facts_sums_over_the_links() -> None:
    chain, z = build(VQConfig(codes=32, width=4)), vectors(3, 20, 4)
    made = chain(z)
    left, each = made.prepared.detach(), []
    for index, link in enumerate(chain.chain):
        left = left - link.decode(made.ids[..., index])
        each.append(0.25 * left.square().mean((1, 2)))
    torch.testing.assert_close(made.terms["commitment"], torch.stack(each).mean(0))
    for link in chain.chain:
        link.get_buffer("restarted").fill_(2)
    assert chain.facts()["codes_restarted"] == 6


def test_all_codebooks_follow_and_the_error_falls() -> None:
    torch.manual_seed(0)
    chain = ResidualConfig(quantizer=VQConfig(codes=32, width=4, decay=0.9), num_quantizers=3).build()
    used: Tensor
    errors = []
    for step in range(60):
        z = vectors(4, 200, 4, seed=step)
        made = chain(z)
        errors.append([(chain.decode(made.ids[..., :num]) - made.prepared).square().mean().item() for num in (1, 2, 3)])
        chain.follow(chain.sums(made.prepared, made.ids, torch.ones(4)), step)
        used = chain.counts(made.ids)
    assert errors[-1][2] < errors[-1][1] / 2 < errors[-1][0] / 4
    assert used.shape == (3, 32)
    assert (used > 0).float().mean() > 0.95
    assert code_use(used)["perplexity"] > 20


def test_use_of_codes_is_a_mean_over_links() -> None:
    counts = torch.tensor([[1.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    assert code_use(counts) == {"codes_used": pytest.approx(3 / 8), "perplexity": pytest.approx(1.5)}


def test_the_union_reads_every_kind() -> None:
    read = TypeAdapter[QuantizerConfig](QuantizerConfig).validate_python
    assert read({"kind": "fsq", "levels": [4, 4]}) == FSQConfig(levels=(4, 4))
    assert read({"kind": "lfq", "bits": 8}).vocab_size == 256
    assert read({"kind": "vq", "codes": 512, "width": 6}).width == 6
    chain = read({"kind": "residual", "num_quantizers": 4, "quantizer": {"kind": "lfq"}})
    assert chain == ResidualConfig(quantizer=LFQConfig(), num_quantizers=4)
    assert (chain.vocab_size, chain.width) == (1024, 10)


def test_the_sphere_keeps_directions_and_has_a_bounded_slope_at_zero() -> None:
    z = vectors(5, 8).requires_grad_(True)
    torch.testing.assert_close(to_sphere(z), z / z.norm(dim=-1, keepdim=True) * math.sqrt(8), rtol=1e-4, atol=1e-5)
    zero = torch.zeros(1, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(to_sphere(zero).sum(), zero)
    assert slope.abs().max() <= 1001
