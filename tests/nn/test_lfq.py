"""LFQ against an independent implementation, against the sum over all codes, and by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vector_quantize_pytorch import lookup_free_quantization as peers  # type: ignore[import-untyped]

from tessera.nn.quantizers import LFQ, LFQConfig, code_counts
from tessera.nn.quantizers.lfq import batch_entropy, bit_entropy, mean_choice

ONES = torch.ones


def lfq(bits: int = 6, **options: Any) -> LFQ:
    return LFQ(LFQConfig(bits=bits, **options))


def vectors(*shape: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def enumerated(z: Tensor, weights: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Entropies of the tokens and of their weighted mean by a softmax over all 2^bits codes, in fp64."""
    codes = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=z.shape[-1])), dtype=torch.float64)
    probs = (-(z.double()[:, None] - codes).square().sum(-1) / temperature).softmax(-1)
    mean = (probs * weights.double()[:, None]).sum(0) / weights.sum()
    entropy = lambda p: -(p * p.clamp(min=1e-300).log()).sum(-1)  # noqa: E731
    return entropy(probs), entropy(mean)


# ---- codes


@pytest.mark.parametrize("bits", [2, 5, 10, 18])
def test_ids_codes_and_gradients_are_those_of_the_peer(bits: int) -> None:
    """The peer numbers from the other end, and takes vectors as they are."""
    ours, quantizer = vectors(3, 7, bits).requires_grad_(True), lfq(bits)
    made = quantizer(ours)
    peer = peers.LFQ(dim=bits, codebook_size=2**bits, entropy_loss_weight=0, commitment_loss_weight=0).eval()
    codes, ids, _ = peer(made.prepared.detach())
    assert torch.equal(made.codes, codes)
    flipped = sum(((ids >> place) & 1) << (bits - 1 - place) for place in range(bits))
    assert torch.equal(made.ids, flipped.long())
    pull = vectors(3, 7, bits, seed=1)
    (straight,) = torch.autograd.grad((made.codes * pull).sum(), ours, retain_graph=True)
    (norm_alone,) = torch.autograd.grad((made.prepared * pull).sum(), ours)
    assert torch.equal(straight, norm_alone)
    assert straight.abs().max() > 0


@pytest.mark.parametrize("bits", [2, 5, 12])
def test_every_id_survives_the_way_to_its_code_and_back(bits: int) -> None:
    quantizer, ids = lfq(bits), torch.arange(2**bits)
    codes = quantizer.decode(ids)
    assert torch.equal(quantizer(codes * 3).ids, ids)  # all of them, the two of equal signs too
    assert torch.equal(codes.abs(), torch.ones_like(codes))
    assert torch.equal(quantizer.ids_of(codes), ids)


def test_half_precision_changes_no_id() -> None:
    z, quantizer = vectors(40, 16, 10).bfloat16(), lfq(10)
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantizer(z)
    outside = quantizer(z.float())
    assert torch.equal(inside.ids, outside.ids)
    assert torch.equal(inside.terms["entropy"], outside.terms["entropy"])
    assert inside.codes.dtype == inside.terms["entropy"].dtype == torch.float32


def test_not_a_number_stays_one_and_its_id_is_in_range() -> None:
    z = vectors(3, 4, 6)
    z[1, 2, 3] = math.nan
    made = lfq()(z)
    assert bool(made.codes[1, 2].isnan().any())
    assert not bool(made.codes[0].isnan().any())
    assert 0 <= made.ids.min() <= made.ids.max() < 64
    assert code_counts(made.ids, 64).sum() == 12


# ---- entropy


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("bits", [2, 3, 6, 9])
def test_entropies_are_those_over_all_codes(bits: int, temperature: float) -> None:
    z, weights = vectors(30, bits), torch.rand(30, generator=torch.Generator().manual_seed(1))
    own, mean = enumerated(z, weights, temperature)
    logits = 4 * z / temperature
    torch.testing.assert_close(bit_entropy(logits.double()).sum(-1), own, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(batch_entropy(logits.sigmoid(), weights, 10).double(), mean, rtol=1e-5, atol=1e-6)


def test_entropies_are_those_of_the_peer() -> None:
    z = lfq(8).prepare(vectors(5, 12, 8))
    peer = peers.LFQ(dim=8, codebook_size=256, entropy_loss_weight=1, commitment_loss_weight=1, diversity_gamma=3).train()
    _, parts = peer(z, inv_temperature=2.0, return_loss_breakdown=True)
    ours = lfq(8, temperature=0.5, entropy=1, diversity=3, commitment=1)(z)
    expected = parts.per_sample_entropy - 3 * parts.batch_entropy
    assert ours.terms["entropy"].mean().item() == pytest.approx(expected.item(), rel=1e-4)
    assert ours.terms["commitment"].mean().item() == pytest.approx(parts.commitment.item(), rel=1e-5)


def test_groups_add_up_and_bound_the_joint_entropy_from_above() -> None:
    shared = vectors(50, 1)  # strongly dependent bits
    probs = (3 * (shared + 0.3 * vectors(50, 8))).sigmoid()
    joint, grouped = batch_entropy(probs, ONES(50), 8), batch_entropy(probs, ONES(50), 4)
    by_hand = batch_entropy(probs[:, :4], ONES(50), 4) + batch_entropy(probs[:, 4:], ONES(50), 4)
    assert grouped.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert joint < grouped - 0.4
    independent = torch.full((50, 8), 0.5)
    assert batch_entropy(independent, ONES(50), 3).item() == pytest.approx(8 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 7])
def test_the_mean_choice_is_a_distribution(bits: int) -> None:
    mixed = mean_choice(vectors(20, bits).sigmoid(), torch.full((20,), 0.05))
    assert mixed.numel() == 2**bits
    assert mixed.sum().item() == pytest.approx(1)


def test_entropy_gradients_against_all_codes() -> None:
    z = vectors(2, 9, 5).requires_grad_(True)
    quantizer = lfq(5, commitment=0, diversity=2, entropy=0.3, temperature=1.0)
    (ours,) = torch.autograd.grad(quantizer(z).terms["entropy"].sum(), z)
    prepared = quantizer.prepare(z)
    own, mean = enumerated(prepared.flatten(0, 1), ONES(18), 1.0)
    (theirs,) = torch.autograd.grad(0.3 * (own.view(2, 9).mean(1) - 2 * mean).sum(), z)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_growing_vectors_do_not_change_the_terms() -> None:
    small, large = lfq()(vectors(4, 9, 6)), lfq()(vectors(4, 9, 6, spread=100.0))
    for name, value in small.terms.items():
        torch.testing.assert_close(large.terms[name], value, rtol=1e-4, atol=1e-5)


def test_padded_samples_do_not_count() -> None:
    z, valid = vectors(4, 9, 6), torch.tensor([True, False, True, False])
    padded, alone = lfq()(z, valid), lfq()(z[valid])
    for name, value in alone.terms.items():
        torch.testing.assert_close(padded.terms[name][valid], value)
    none = lfq()(z, torch.zeros(4, dtype=torch.bool))
    assert bool(torch.isfinite(none.terms["entropy"]).all())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("group_bits", [10, 18])
def test_eighteen_bits_stay_small(group_bits: int) -> None:
    """32 pictures of 256 tokens: a softmax over all codes would have 2 billion numbers."""
    z = vectors(32, 256, 18).requires_grad_(True)
    with Largest() as largest:
        made = lfq(18, group_bits=group_bits)(z)
        torch.autograd.grad(made.terms["entropy"].sum(), z)
    assert largest.numel <= 32 * 256 * (32 if group_bits == 10 else 512)
