"""On a GPU: recorded passes are the plain ones, and FlexAttention has the gradients of the dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tessera.batches import TextStates
from tessera.generators.autoregressive.grid_model import GridAutoregressive
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter
from tessera.nn.nearby import RASTER, Grid, Reach, sight_of
from tessera.recording import Lean
from tests.generators.grid_toys import NEAR, anything, clips, generator, words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("near", ["window", "dilated", "whole", "first", "diagonals"])
@pytest.mark.parametrize("codes", [None, 2])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_replay_is_the_plain_loop(near: str, codes: int | None, guidance: float) -> None:
    writer, known = GridWriter(Lean(generator(near, codes).to(DEVICE)), GridSampleConfig(guidance=guidance)), clips(3, 2, codes)
    text, seeds, known = words(3).to(DEVICE), torch.arange(3, device=DEVICE), known.to(DEVICE)
    plain, sampler = torch.cat(list(GridSampler(writer, recorded=False)(text, seeds, 9, known=known)), dim=1), GridSampler(writer)
    for _ in range(2):  # the second time nothing is recorded anew
        assert torch.equal(torch.cat(list(sampler(text, seeds, 9, known=known)), dim=1), plain)
    num_recordings = 2 if NEAR[near].first_whole else 1
    assert len(sampler.recordings) == num_recordings
    longer = torch.cat(list(sampler(text, seeds, 20, known=known)), dim=1)
    assert len(sampler.recordings) == num_recordings, "nor for longer clips"
    assert torch.equal(longer[:, :9], plain)


@pytest.mark.parametrize("near", ["window", "diagonals"])
def test_sketches_replay_as_the_plain_loop_draws_them(near: str) -> None:
    """One of 3 frames is filled up to 4, so it takes the recording of one of 4."""
    writer = GridWriter(Lean(generator(near, sketch=3).to(DEVICE)), GridSampleConfig())
    text, seeds, sampler = words(3).to(DEVICE), torch.arange(3, device=DEVICE), GridSampler(writer)
    for length in (3, 4):
        sketch = clips(3, length, seed=length).to(DEVICE)
        plain = torch.cat(list(GridSampler(writer, recorded=False)(text, seeds, 6, sketch=sketch)), dim=1)
        assert torch.equal(torch.cat(list(sampler(text, seeds, 6, sketch=sketch)), dim=1), plain)
    assert len(sampler.recordings) == (2 if NEAR[near].first_whole else 1)


def test_scenes_replay_as_the_plain_loop_draws_them() -> None:
    writer = GridWriter(Lean(generator().to(DEVICE)), GridSampleConfig())
    scenes, seeds = [(words(3, 4, seed).to(DEVICE), 4) for seed in (1, 2, 1)], torch.arange(3, device=DEVICE)
    plain, sampler = torch.cat(list(GridSampler(writer, recorded=False).story(scenes, seeds)), dim=1), GridSampler(writer)
    for _ in range(2):
        assert torch.equal(torch.cat(list(sampler.story(scenes, seeds)), dim=1), plain)
    assert len(sampler.recordings) == 1


def test_bf16_draws_tokens() -> None:
    writer = GridWriter(Lean(generator().to(DEVICE), bf16=True), GridSampleConfig())
    ids = torch.cat(list(GridSampler(writer)(words(4).to(DEVICE), torch.arange(4, device=DEVICE), 5)), dim=1)
    assert ids.shape == (4, 5, 3, 4)
    assert 0 <= int(ids.min()) < int(ids.max()) < 7


def gradients(reach: Reach, execution: str, parts: list[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    grid = Grid(9, 12, 13)
    found = sight_of(reach, grid, DEVICE, execution)(*parts)  # type: ignore[arg-type]
    return found, *torch.autograd.grad((found * weights).sum(), parts)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(
    "reach", [Reach(2, 3, 3, 1), Reach(3, 5, 3, 2), Reach(2, 0, 0, 1), Reach(2, 3, 3, 1, RASTER), Reach(2, 3, 3, 1, 2)]
)
def test_blocks_have_the_gradients_of_the_dense_mask(reach: Reach) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(2, 2, 9 * 12 * 13, 32, device=DEVICE, requires_grad=True) for _ in range(3)]
    weights = torch.randn_like(parts[0])
    with sdpa_kernel(SDPBackend.MATH):
        dense = gradients(reach, "dense", parts, weights)
    for execution in ("blocks", "bands"):
        (found, *made), (wanted, *known) = gradients(reach, execution, parts, weights), dense
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for one, other in zip(made, known, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums over hundreds of keys, in another order


@pytest.mark.usefixtures("exact_products")
def test_a_network_with_blocks_is_the_dense_one_compiled_or_not() -> None:
    net, ids, text = generator("dilated").to(DEVICE), clips(2, 12).to(DEVICE), words(2).to(DEVICE)
    wanted, known = guessed(net, ids, text)
    net.execution = "blocks"
    found, made = guessed(net, ids, text)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (made - known).norm() <= 1e-4 * known.norm()
    for block in net.blocks:
        block.compile()
    found, made = guessed(net, ids, text)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (made - known).norm() <= 1e-4 * known.norm(), "backward, too"


def guessed(net: GridAutoregressive, ids: Tensor, text: TextStates) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of all parameters that have one."""
    logits = net(ids, text, anything(2).to(DEVICE))
    found = torch.autograd.grad(logits.square().mean(), list(net.parameters()), allow_unused=True)
    return logits.detach(), torch.cat([gradient.flatten() for gradient in found if gradient is not None])
