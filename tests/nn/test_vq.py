"""VQ: the nearest code by brute force, the codebook's moves by NumPy and by a peer, restarts, and any cut of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vector_quantize_pytorch import VectorQuantize  # type: ignore[import-untyped]

from tessera.nn.quantizers import VQ, VQConfig, code_counts
from tessera.nn.quantizers import vq as vq_module
from tessera.nn.quantizers.codes import to_sphere


def vq(codes: int = 16, width: int = 4, depth: int = 0, **options: Any) -> VQ:
    torch.manual_seed(0)
    return VQ(VQConfig(codes=codes, width=width, **options), depth)


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def learn(quantizer: VQ, z: Tensor, step: int, valid: Tensor | None = None) -> None:
    made = quantizer(z, valid)
    quantizer.follow(quantizer.sums(made.prepared, made.ids, torch.ones(len(z)) if valid is None else valid), step)


# ---- codes


def test_the_nearest_code_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, z = vq(50, 8), vectors(6, 5, 7, 8)
    made = quantizer(z)
    distances = (made.prepared[..., None, :].double() - quantizer.codebook.double()).square().sum(-1)
    assert torch.equal(made.ids, distances.argmin(-1))
    assert torch.equal(made.codes, quantizer.codebook[made.ids])
    assert torch.equal(quantizer.decode(made.ids), made.codes)
    monkeypatch.setattr(vq_module, "MOST_DISTANCES", 128)  # two vectors at a time
    assert torch.equal(quantizer(z).ids, made.ids)


def test_ids_are_those_of_the_peer_with_cosine_similarity() -> None:
    quantizer, z = vq(32, 8), vectors(3, 20, 8)
    peer = VectorQuantize(dim=8, codebook_size=32, use_cosine_sim=True, rotation_trick=False).eval()
    peer._codebook.embed.copy_(torch.nn.functional.normalize(quantizer.codebook, dim=-1)[None])
    _, ids, _ = peer(z)
    assert torch.equal(quantizer(z).ids, ids)


def test_every_id_survives_the_way_to_its_code_and_back() -> None:
    quantizer, ids = vq(64, 8), torch.arange(64)
    assert torch.equal(quantizer.ids_of(quantizer.decode(ids) * 5), ids)
    torch.testing.assert_close(quantizer.codebook.square().mean(-1), torch.ones(64))


def test_gradients_pass_straight_through() -> None:
    quantizer, z, pull = vq(), vectors(3, 5, 4).requires_grad_(True), vectors(3, 5, 4, seed=1)
    made = quantizer(z)
    (straight,) = torch.autograd.grad((made.codes * pull).sum(), z, retain_graph=True)
    (norm_alone,) = torch.autograd.grad((made.prepared * pull).sum(), z, retain_graph=True)
    assert torch.equal(straight, norm_alone)
    by_hand = 0.25 * (made.prepared - made.codes.detach()).square().mean((1, 2))
    torch.testing.assert_close(made.terms["commitment"], by_hand)
    (commitment,) = torch.autograd.grad(made.terms["commitment"].sum(), z)
    assert commitment.abs().max() > 0


def test_half_precision_changes_no_id() -> None:
    z, quantizer = vectors(40, 16, 4).bfloat16(), vq()
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantizer(z)
    assert torch.equal(inside.ids, quantizer(z.float()).ids)
    assert inside.codes.dtype == torch.float32


def test_not_a_number_stays_one_and_its_id_is_in_range() -> None:
    z = vectors(3, 5, 4)
    z[1, 2, 3] = math.nan
    made = vq()(z)
    assert bool(made.codes[1, 2].isnan().all())
    assert not bool(made.codes[0].isnan().any())
    assert 0 <= made.ids.min() <= made.ids.max() < 16
    assert code_counts(made.ids, 16).sum() == 15


# ---- the codebook follows


@pytest.mark.parametrize("depth", [0, 1])
def test_moving_averages_by_a_loop(depth: int) -> None:
    quantizer = vq(6, 3, depth, decay=0.6, restart_below=1e-9)
    quantizer.codebook.copy_(to_sphere(vectors(6, 3, seed=5)))  # far apart: every one is used
    z = vectors(4, 50, 3)
    counts, totals = quantizer.count.double().numpy(), quantizer.total.double().numpy()
    for step in (7, 8):
        made = quantizer(z)
        prepared, ids = made.prepared.double().numpy().reshape(-1, 3), made.ids.numpy().reshape(-1)
        new_counts, new_totals = np.zeros(6), np.zeros((6, 3))
        for vector, code in zip(prepared, ids, strict=True):
            new_counts[code] += 1
            new_totals[code] += vector
        counts, totals = 0.6 * counts + 0.4 * new_counts, 0.6 * totals + 0.4 * new_totals
        smooth = (counts + 1e-5) / (counts.sum() + 6e-5) * counts.sum()
        codebook = totals / smooth[:, None]
        if depth == 0:
            codebook /= np.sqrt((codebook**2).mean(-1, keepdims=True) + 1e-6)
        learn(quantizer, z, step)
        np.testing.assert_allclose(quantizer.count.numpy(), counts, rtol=1e-5)
        np.testing.assert_allclose(quantizer.total.numpy(), totals, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(quantizer.codebook.numpy(), codebook, rtol=1e-4, atol=1e-5)


def test_moving_averages_are_those_of_the_peer() -> None:
    quantizer, z = vq(6, 3, decay=0.6, restart_below=1e-9), vectors(1, 300, 3)
    peer = VectorQuantize(
        dim=3, codebook_size=6, use_cosine_sim=True, decay=0.6, threshold_ema_dead_code=0, rotation_trick=False
    ).train()
    unit = torch.nn.functional.normalize(quantizer.codebook, dim=-1)
    for buffer in (peer._codebook.embed, peer._codebook.embed_avg):
        buffer.copy_(unit[None])
    peer._codebook.cluster_size.fill_(1)
    peer(z)
    learn(quantizer, z, 1000)
    torch.testing.assert_close(quantizer.codebook / math.sqrt(3), peer._codebook.embed[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_batch_may_be_cut_anywhere(depth: int) -> None:
    whole, parts = vq(32, 4, depth), vq(32, 4, depth)
    for step in range(5):
        z = vectors(6, 10, 4, seed=step)
        torch.manual_seed(step)
        learn(whole, z, step)
        made = [parts(cut) for cut in z.split([1, 3, 2])]
        every = [parts.sums(one.prepared, one.ids, torch.ones(len(one.ids))) for one in made]
        torch.manual_seed(step)
        parts.follow({name: torch.stack([sums[name] for sums in every]).sum(0) for name in every[0]}, step)
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(parts.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


def test_padded_samples_do_not_count() -> None:
    z, valid = vectors(4, 9, 4), torch.tensor([True, False, True, False])
    padded, alone = vq(), vq()
    torch.manual_seed(1)
    learn(padded, z, 0, valid)
    torch.manual_seed(1)
    learn(alone, z[valid], 0)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(padded.get_buffer(name), buffer)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_first_step_starts_from_data(depth: int) -> None:
    """Four narrow bundles of directions: after one step every code lies at one of them, whatever it was before."""
    ends = to_sphere(vectors(4, 4, seed=3))
    z = (ends[None, :, None] + 0.01 * vectors(5, 4, 20, 4)).flatten(1, 2)
    quantizer = vq(32, 4, depth)
    for step in range(20 if depth else 1):  # where all start at 0, the first step finds the mean, the next ones split it
        learn(quantizer, z, step)
    error = (quantizer(z).prepared - quantizer(z).codes).square().mean()
    assert error < 1e-3
    if depth == 0:
        distances = (quantizer.codebook[:, None] - ends).square().sum(-1)
        assert distances.min(1).values.max() < 0.01


def test_dead_codes_go_beside_those_with_the_largest_error() -> None:
    quantizer = vq(8, 2, decay=0.5, restart_below=0.1)
    quantizer.codebook.copy_(to_sphere(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], *([[1.0, -1.0]] * 5)])))
    quantizer.count.copy_(torch.tensor([10.0, 10, 10, 0, 0, 0, 0, 0]))
    quantizer.total.copy_(quantizer.codebook * quantizer.count[:, None])
    wide = torch.tensor([0.0, 1.0]) + torch.tensor([[0.3, 0.0], [-0.3, 0.0]]).repeat(5, 1)  # about the second code
    z = torch.cat([torch.tensor([[1.0, 0.01], [1.0, -0.01]]).repeat(5, 1), wide, torch.tensor([[-1.0, 0.0]]).repeat(10, 1)])
    learn(quantizer, z[None], 100)
    assert quantizer.restarted == 5
    assert quantizer.facts()["codes_restarted"] == 5
    moved = quantizer.codebook[3:] / math.sqrt(2)
    by_turns = torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])  # errors in descending order
    assert bool(((moved * by_turns).sum(-1) > 0.7).all())
    assert moved[0, 0].abs() > 1e-3  # off by the deviation of the wide ones
    torch.testing.assert_close(moved[2], torch.tensor([-1.0, 0.0]), rtol=0, atol=1e-3)  # whose vectors are all alike
    torch.testing.assert_close(quantizer.count[3:], torch.full((5,), 0.2 * 30 / 8))


def test_no_code_stays_dead() -> None:
    """A hundred directions, and codes that all start at one place."""
    ends, quantizer = to_sphere(vectors(100, 8, seed=3)), vq(64, 8, decay=0.9)
    quantizer.codebook.copy_(ends[:1].expand(64, 8))
    errors = []
    for step in range(80):
        rng = torch.Generator().manual_seed(step)
        z = ends[torch.randint(100, (4, 256), generator=rng)] + 0.05 * torch.randn(4, 256, 8, generator=rng)
        made = quantizer(z)
        errors.append((made.prepared - made.codes).square().mean().item())
        learn(quantizer, z, step)
    assert (code_counts(made.ids, 64) > 0).float().mean() > 0.95
    assert errors[-1] < errors[0] / 4


def test_what_is_saved() -> None:
    assert set(vq().state_dict()) == {"codebook", "count", "total", "restarted"}
    assert not list(vq().parameters())
