"""What only a GPU shows of the masked generator: recorded steps draw what the plain loop draws."""

from __future__ import annotations

import pytest
import torch

from tessera.batches import TextStates
from tessera.generators.masked.model import Low
from tessera.generators.masked.replay import GraphedSampler
from tessera.generators.masked.sample import Drawer, MaskedSampleConfig, sample
from tessera.generators.masked.windows import Span, Window, draw_long
from tests.generators.masked_toys import critic, generator, random_text
from tests.generators.test_masked_frames import CLIP, clip_critic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def asked(size: int, seed: int) -> tuple[TextStates, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Text, seeds, known tokens and coarse ones."""
    draws = torch.Generator().manual_seed(seed)
    known = torch.full((size, 12), 20)
    known[0, :5] = torch.randint(20, (5,), generator=draws)
    low = torch.randint(9, (size, 4), generator=draws)
    return random_text(size, seed=seed).to(torch.device("cuda")), torch.arange(size).cuda() + seed, known.cuda(), low.cuda()


@pytest.mark.parametrize(
    "options",
    [
        MaskedSampleConfig(steps=6),
        MaskedSampleConfig(steps=6, guidance=1.0, temperature=0.7, top_p=0.9),
        MaskedSampleConfig(steps=6, order="confidence", remask=0.3),
        MaskedSampleConfig(steps=6, order="critic"),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_recorded_steps_draw_what_the_plain_loop_draws(options: MaskedSampleConfig, bf16: bool) -> None:
    low = Low(9, (2, 2))
    net, judge = generator(low=low, recalls=True).cuda(), critic(low=low).cuda()
    sampler = GraphedSampler(net, options, judge, bf16=bf16)
    results = []
    for size, seed in ((4, 0), (4, 100), (3, 7), (4, 0)):  # the second and the last replay what the first recorded
        text, seeds, known, below = asked(size, seed)
        results.append(sampler(text, seeds, known=known, low=below))
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            plain = sample(net, text, seeds, options, known=known, low=below, critic=judge)
        assert torch.equal(results[-1], plain)
    assert len(sampler.recordings) == 2
    assert torch.equal(results[0], results[-1]), "what was drawn in between leaves no trace"
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("order", ["halton", "critic"])
def test_windows_of_clips_share_a_recording(order: str, bf16: bool) -> None:
    net, options = generator(CLIP).cuda(), MaskedSampleConfig(steps=4, order=order)
    sampler = GraphedSampler(net, options, clip_critic().cuda(), bf16=bf16)
    text = random_text(2).to(torch.device("cuda"))

    def draw(window: Window) -> torch.Tensor:
        found = sampler(text, window.seeds, known=window.known, frames=window.frames)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            plain = sample(
                net, text, window.seeds, options, known=window.known, critic=sampler.drawer.critic, frames=window.frames
            )
        assert torch.equal(found, plain)
        return found

    pieces = list(draw_long(draw, CLIP, net.mask_id, torch.arange(2).cuda(), [Span(9), Span(3, 0), Span(2)], overlap=2))
    assert torch.cat([piece.ids for piece in pieces], dim=1).shape == (2, 14, 2, 2)
    assert len(sampler.recordings) == 2, "of a window in which all is there, and of all others"


def test_new_weights_are_seen() -> None:
    net = generator().cuda()
    sampler = GraphedSampler(net, MaskedSampleConfig(steps=4))
    text, seeds = random_text(2).to(torch.device("cuda")), torch.arange(2).cuda()
    before = sampler(text, seeds)
    net.head.bias.data.normal_(std=5)
    after = sampler(text, seeds)
    assert not torch.equal(before, after)
    assert torch.equal(after, sample(net, text, seeds, MaskedSampleConfig(steps=4)))


@torch.no_grad()
def test_no_step_waits_for_the_device() -> None:
    net, judge = generator(recalls=True).cuda(), critic().cuda()
    text, seeds = random_text(4).to(torch.device("cuda")), torch.arange(4).cuda()
    for options in (MaskedSampleConfig(steps=4, remask=0.2, top_p=0.9), MaskedSampleConfig(steps=4, order="critic")):
        drawer = Drawer(net, options, judge)
        setup, state = drawer.prepare(text, seeds, None, None, None)
        state = drawer.step_once(setup, state)
        torch.cuda.synchronize()
        setting = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                state = drawer.step_once(setup, state)
        finally:
            torch.cuda.set_sync_debug_mode(setting)
        assert (state.ids < 20).all()
