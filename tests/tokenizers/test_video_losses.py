"""The two turns on clips: terms by hand in NumPy, masks by gradients that are exactly 0, and batches cut anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tessera.batches import VideoBatch
from tessera.contracts import Context, Loss
from tessera.nn.perceptual import VGG16Distance
from tessera.nn.quantizers import LFQConfig, QuantizerConfig, ResidualConfig, VQConfig
from tessera.nn.similarity import psnr, ssim
from tessera.tokenizers.image.critic import LeCamConfig, PenaltyConfig
from tessera.tokenizers.image.losses import ImageLosses, follow, judge_with_slope
from tessera.tokenizers.video.critic import ClipCritic, ClipCriticConfig, FrameCriticConfig, build_critic, frames_of
from tessera.tokenizers.video.losses import Sight, VideoLossConfig, VideoLosses, clip_mean, unsteadiness
from tessera.tokenizers.video.model import VideoTokenizer, held
from tests.tokenizers.clips import KINDS, LEVELS, at, batch, cut, noise, rouse, tokenizer

FRAMES = FrameCriticConfig(widths=(8, 8), start_step=10, warmup_steps=4)
CLIPS = ClipCriticConfig(widths=(8, 8), start_step=10, warmup_steps=4)
Critic = FrameCriticConfig | ClipCriticConfig
critics = pytest.mark.parametrize("critic", [FRAMES, CLIPS], ids=["frames", "clips"])
LENGTHS = (9, 1, 4, 6)


def nets(critic: Critic | None = None, kind: str = "conv", quantizer: QuantizerConfig = LEVELS) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {"tokenizer": tokenizer(kind, quantizer)}
    return made if critic is None else made | {"critic": rouse(build_critic(critic, 3))}


def losses(critic: Critic | None = None, **terms: Any) -> VideoLosses:
    return VideoLosses(VideoLossConfig(**terms), critic)


# ---- terms by hand


def test_terms_and_measures_in_numpy() -> None:
    used, data = nets(), batch(LENGTHS)
    with torch.no_grad():
        made = used["tokenizer"](held(data.frames, data.lengths)).frames
        loss = losses(l1=0.7, l2=0.3, temporal=0.5).measure(used, data, at(0, data))
    wanted = dict.fromkeys(("l1", "l2", "temporal", "psnr", "ssim"), 0.0)
    flicker = []
    for row, length in enumerate(LENGTHS):
        x, y = made[row, :, :length].numpy().astype(np.float64), data.frames[row, :, :length].numpy().astype(np.float64)
        wanted["l1"] += 0.7 * np.abs(x - y).mean()
        wanted["l2"] += 0.3 * ((x - y) ** 2).mean()
        seen = x.clip(-1, 1)
        wanted["psnr"] += np.mean([10 * np.log10(4 / ((seen[:, t] - y[:, t]) ** 2).mean()) for t in range(length)])
        if length > 1:
            wanted["temporal"] += 0.5 * np.abs(np.diff(x, axis=1) - np.diff(y, axis=1)).mean()
            flicker.append(np.abs(np.diff(seen, axis=1) - np.diff(y, axis=1)).mean())
    small = {name: value for name, value in wanted.items() if name != "ssim"}
    assert {name: loss.parts[name].item() for name in small} == pytest.approx(small, rel=1e-4)
    assert loss.total.item() == pytest.approx(wanted["l1"] + wanted["l2"] + wanted["temporal"], rel=1e-4)
    assert loss.weight.item() == 4
    assert VideoLosses.digest(loss.stats)["flicker"] == pytest.approx(np.mean(flicker), rel=1e-4)


def test_similarity_is_of_a_clips_own_frames() -> None:
    used, data = nets(), batch((9, 2, 5))
    with torch.no_grad():
        seen = used["tokenizer"](held(data.frames, data.lengths)).frames.clamp(-1, 1)
        loss = losses().measure(used, data, at(0, data))
    pairs = [
        (seen[row, :, :length].transpose(0, 1), data.frames[row, :, :length].transpose(0, 1))
        for row, length in enumerate((9, 2, 5))
    ]
    assert loss.parts["ssim"].item() == pytest.approx(sum(ssim(x, y).mean().item() for x, y in pairs), rel=1e-4)
    assert loss.parts["psnr"].item() == pytest.approx(sum(psnr(x, y).mean().item() for x, y in pairs), rel=1e-4)


def test_pictures_alone_have_no_flicker() -> None:
    used, data = nets(), batch((1, 1), length=1)
    loss = losses().measure(used, data, at(0, data))
    assert loss.parts["temporal"].item() == 0
    assert "flicker" not in VideoLosses.digest(loss.stats)
    assert losses().tokenizer_turn(used, data, at(0, data)).parts["temporal"].item() == 0


def test_a_constant_offset_does_not_flicker() -> None:
    real = noise(2, 5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(unsteadiness(real + 0.3, real, mask), torch.zeros(2), rtol=0, atol=1e-6)
    shaken = real + 0.1 * torch.tensor([1.0, -1, 1, -1, 1]).view(1, 1, 5, 1, 1)
    torch.testing.assert_close(unsteadiness(shaken, real, mask), torch.full((2,), 0.2), rtol=1e-4, atol=0)


def test_a_clip_of_one_frame_is_a_picture() -> None:
    """The image tokenizer's losses on the same reconstruction say the same."""
    used, data = nets(), batch((1, 1, 1), length=1)
    loss = losses().measure(used, data, at(0, data))
    made = used["tokenizer"](data.frames).frames[:, :, 0]
    pictures = ImageLosses(VideoLossConfig(), None).reconstruction_terms({}, made, data.frames[:, :, 0])
    assert {name: loss.parts[name].item() for name in pictures} == pytest.approx(
        {name: value.sum().item() for name, value in pictures.items()}, rel=1e-5
    )


# ---- what lies behind a clip's end


@pytest.mark.parametrize("kind", KINDS)
@critics
def test_what_lies_behind_the_end_gets_no_gradient_and_changes_no_number(critic: Critic, kind: str) -> None:
    penalised = critic.model_copy(update={"penalty": PenaltyConfig(every=5), "lecam": LeCamConfig(), "adaptive": True})
    used, terms = nets(penalised, kind), losses(penalised, seen_frames=3)
    eyes = {"perceptual": VGG16Distance().eval().requires_grad_(False)} if kind == "conv" and critic is FRAMES else {}

    def turns(frames: Tensor) -> list[Loss]:
        data = replace(batch(LENGTHS), frames=frames)
        first = terms.tokenizer_turn(used | eyes, data, at(10, data))
        second = terms.critic_turn(used, data, at(10, data, {"tokenizer": first.hand}))
        return [first, second, terms.measure(used, data, at(10, data))]

    frames = noise(4, 9, 16).requires_grad_(True)
    behind = ~batch(LENGTHS).mask[:, None, :, None, None].expand(frames.shape)
    ours = turns(frames)
    for loss in ours[:1] + ours[2:]:
        (slope,) = torch.autograd.grad(loss.total, frames, retain_graph=True)
        assert slope[~behind].abs().sum() > 0
        assert not slope[behind].any()
    others = turns(torch.where(behind, torch.randn(frames.shape), frames))
    for one, other in zip(ours, others, strict=True):
        for name in ("parts", "stats"):
            for key, value in getattr(one, name).items():
                assert torch.equal(value, getattr(other, name)[key]), key
        assert torch.equal(one.total, other.total)


@critics
def test_the_slope_at_made_frames_behind_the_end_is_exactly_zero(critic: Critic) -> None:
    used, data, terms = nets(critic), batch(LENGTHS), losses(critic, seen_frames=3)
    made = noise(4, 9, 16, seed=5).requires_grad_(True)
    sight = Sight.choose(data.mask, 3, at(3, data))
    parts = terms.reconstruction_terms(used, made, data.frames, data.mask, sight)
    total = sum(parts.values(), torch.zeros(4)) + terms.plea(used, made, data.mask, sight)
    (slope,) = torch.autograd.grad(total.sum(), made)
    by_frame = slope.abs().sum((1, 3, 4))
    assert not by_frame[~data.mask].any()
    assert by_frame[data.mask].all()


# ---- cutting


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("quantizer", [LEVELS, VQConfig(codes=16, width=4)], ids=["fsq", "vq"])
@critics
def test_a_batch_may_be_cut_anywhere(critic: Critic, quantizer: QuantizerConfig, adaptive: bool) -> None:
    critic = critic.model_copy(update={"penalty": PenaltyConfig(every=5), "lecam": LeCamConfig(), "adaptive": adaptive})
    used, terms = nets(critic, quantizer=quantizer), losses(critic, seen_frames=3)
    data = batch(LENGTHS, valid=(True, True, False, True))

    def both(part: VideoBatch) -> tuple[Loss, Loss, Loss]:
        first = terms.tokenizer_turn(used, part, at(10, part))
        second = terms.critic_turn(used, part, at(10, part, {"tokenizer": first.hand}))
        return first, second, terms.measure(used, part, at(10, part))

    def gradients(made: Sequence[tuple[Loss, ...]]) -> list[Tensor]:
        found: list[Tensor] = []
        for turn, net in enumerate(("tokenizer", "critic")):
            total = torch.stack([losses_[turn].total for losses_ in made]).sum()
            found += torch.autograd.grad(total, list(used[net].parameters()), retain_graph=True)
        return found

    whole = [both(data)]
    parts = [both(cut(data, slice(a, b))) for a, b in itertools.pairwise((0, 1, 3, 4))]
    for turn in range(3):
        assert sum(made[turn].weight.item() for made in parts) == 3
        for group in ("parts", "stats"):
            for name, value in getattr(whole[0][turn], group).items():
                added = torch.stack([getattr(made[turn], group)[name] for made in parts]).sum(0)
                torch.testing.assert_close(added, value, rtol=1e-4, atol=1e-4, msg=name)
    for a, b in zip(gradients(whole), gradients(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---- which frames are seen


def test_seen_frames_are_the_clips_own_and_change_with_step_and_sample() -> None:
    data = batch((9, 2, 5, 9, 9))
    one, two = (Sight.choose(data.mask, 3, at(step, data)) for step in (0, 1))
    assert one.rows is not None
    assert two.rows is not None
    assert one.weights.sum(1).tolist() == [3, 2, 3, 3, 3]
    for row, length in enumerate((9, 2, 5, 9, 9)):
        own = one.rows[row][one.weights[row] > 0] - 9 * row
        assert len(own.unique()) == min(3, length)
        assert own.max() < length
    assert not torch.equal(one.rows, two.rows)
    assert not torch.equal(one.rows[0], one.rows[3] - 27)
    part = Sight.choose(data.mask[3:], 3, Context(0, 0, data.positions[3:]))
    assert part.rows is not None
    assert torch.equal(part.rows + 27, one.rows[3:])
    assert torch.equal(one.of(data.frames), frames_of(data.frames)[one.rows.flatten()])


def test_every_frame_is_seen_equally_often() -> None:
    positions = torch.arange(4000)
    sight = Sight.choose(torch.ones(4000, 8, dtype=torch.bool), 2, Context(0, 0, positions))
    assert sight.rows is not None
    counts = torch.bincount((sight.rows - 8 * positions[:, None]).flatten(), minlength=8)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


def test_the_perceptual_term_is_of_the_seen_frames() -> None:
    eyes = VGG16Distance().eval().requires_grad_(False)
    data, made = batch((9, 2)), noise(2, 9, 16, seed=3)
    sight = Sight.choose(data.mask, 2, at(0, data))
    found = losses(seen_frames=2).reconstruction_terms({"perceptual": eyes}, made, data.frames, data.mask, sight)["perceptual"]
    assert sight.rows is not None
    for row in range(2):
        places = sight.rows[row] - 9 * row
        alone = eyes(made[row, :, places].transpose(0, 1), data.frames[row, :, places].transpose(0, 1))
        assert found[row].item() == pytest.approx(alone.mean().item(), rel=1e-4)


# ---- the critics


def test_the_frame_critic_by_hand() -> None:
    used, data = nets(FRAMES), batch(LENGTHS)
    terms = losses(FRAMES, seen_frames=None)
    loss = terms.tokenizer_turn(used, data, at(10, data))
    judged = terms.critic_turn(used, data, at(10, data, {"tokenizer": loss.hand}))
    plea = hinge = 0.0
    for row, length in enumerate(LENGTHS):
        fake, real = (used["critic"](x[row, :, :length].transpose(0, 1)).flatten(1) for x in (loss.hand, data.frames))
        plea += -fake.mean().item()
        hinge += ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean()).item()
    assert loss.parts["plea"].item() == pytest.approx(plea, rel=1e-4, abs=1e-5)
    assert judged.total.item() == pytest.approx(hinge, rel=1e-4)


def test_the_clip_critic_by_hand() -> None:
    """Each clip by itself, cut at its end."""
    used, data, terms = nets(CLIPS), batch(LENGTHS), losses(CLIPS)
    loss = terms.tokenizer_turn(used, data, at(10, data))
    judged = terms.critic_turn(used, data, at(10, data, {"tokenizer": loss.hand}))
    plea = hinge = 0.0
    for row, length in enumerate(LENGTHS):
        fake, real = (used["critic"](x[row : row + 1, :, :length]).flatten(1) for x in (loss.hand, data.frames))
        plea += -fake.mean().item()
        hinge += ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean()).item()
    assert loss.parts["plea"].item() == pytest.approx(plea, rel=1e-4, abs=1e-5)
    assert judged.total.item() == pytest.approx(hinge, rel=1e-4)


def test_the_clip_critic_is_made_of_conv3d() -> None:
    """Two levels, written out."""
    torch.manual_seed(0)
    critic = rouse(ClipCritic(CLIPS, 3))
    clips = noise(2, 5)
    fold, bend = nn.functional, lambda x: nn.functional.leaky_relu(x, 0.2)
    assert isinstance(critic, ClipCritic)
    first, conv, time, out = critic.first, critic.convs[0], critic.times[0], critic.out
    h = bend(fold.conv3d(clips, first.weight[:, :, None], first.bias, padding=(0, 2, 2)))
    h = fold.conv3d(h, conv.weight[:, :, None], conv.bias, stride=(1, 2, 2), padding=(0, 1, 1))  # type: ignore[operator,index,arg-type]
    padded = torch.cat([h[:, :, :1], h[:, :, :1], h], dim=2)
    h = h + fold.conv3d(padded, time.weight[..., None])  # type: ignore[operator,index]
    h = torch.stack([bend(critic.norms[0](h[:, :, t])) for t in range(5)], dim=2)
    h = bend(fold.conv3d(h, critic.mix.weight[:, :, None], critic.mix.bias))
    wanted = fold.conv3d(h, out.weight[:, :, None], out.bias, padding=(0, 1, 1))
    torch.testing.assert_close(critic(clips), frames_of(wanted), rtol=1e-4, atol=1e-4)


def test_the_clip_critics_penalty_against_torch() -> None:
    torch.manual_seed(0)
    critic, clips = rouse(ClipCritic(ClipCriticConfig(widths=(8, 16, 16)), 3)), noise(2, 5, 16)
    weights = batch((5, 3), length=5).mask.float()
    direction = torch.randn(clips.shape)
    logits, along = critic(clips, direction).detach().chunk(2)
    assert torch.equal(logits, critic(clips))
    _, wanted = torch.autograd.functional.jvp(critic, clips, direction)
    torch.testing.assert_close(along, wanted, rtol=1e-4, atol=1e-4)

    def mean(logits: Tensor) -> Tensor:
        return clip_mean(logits.flatten(1).mean(1), weights)

    squared = judge_with_slope(critic, clips, mean)[1]
    leaf = clips.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(mean(critic(leaf)).sum(), leaf, create_graph=True)
    by_hand = slope.square().flatten(1).sum(1)
    torch.testing.assert_close(squared, by_hand, rtol=1e-4, atol=1e-8)
    parameters = list(critic.parameters())
    ours, theirs = (torch.autograd.grad(x.sum(), parameters, allow_unused=True) for x in (squared, by_hand))
    for a, b, parameter in zip(ours, theirs, parameters, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-3, atol=1e-6)


@critics
def test_the_penalty_is_r1_of_what_is_judged(critic: Critic) -> None:
    penalised = critic.model_copy(update={"penalty": PenaltyConfig(weight=3.0, every=4)})
    used, data, terms = nets(critic), batch((5, 3), length=5), losses(penalised, seen_frames=None)
    hand = {"tokenizer": noise(2, 5, 16, seed=4)}
    due, not_due = (terms.critic_turn(used, data, at(step, data, hand)) for step in (8, 9))
    by_hand = 0.0
    for row, length in enumerate((5, 3)):
        clip = data.frames[row : row + 1, :, :length]
        views = [clip] if critic is CLIPS else [clip[:, :, t] for t in range(length)]
        for view in views:
            leaf = view.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(used["critic"](leaf).mean(), leaf)
            by_hand += 3.0 / 2 * 4 * slope.square().sum().item() / len(views)
    assert due.parts["penalty"].item() == pytest.approx(by_hand, rel=1e-4)
    assert due.total.item() == pytest.approx(not_due.total.item() + by_hand, rel=1e-4)


def test_the_clip_critic_tells_motion_from_stillness_and_the_frame_critic_cannot() -> None:
    """The same frames, in order and shuffled in time: only one of the two critics can learn to tell them apart."""
    torch.manual_seed(0)
    places = torch.arange(5)
    ramp = torch.zeros(8, 1, 5, 8, 8)
    for row in range(8):
        ramp[row, 0, places, :, (places + row) % 8] = 1.0
    real, made = ramp, ramp[:, :, [2, 0, 4, 1, 3]]
    gaps = []
    for critic in (FRAMES, CLIPS):
        net = build_critic(critic, 1)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        views = [x if critic is CLIPS else frames_of(x) for x in (real, made)]
        for _ in range(40):
            optimizer.zero_grad()
            made_logits, real_logits = (net(x).flatten(1) for x in (views[1], views[0]))
            VideoLosses(VideoLossConfig(), critic).pictures.contest(real_logits, made_logits).mean().backward()
            optimizer.step()
        gaps.append((net(views[0]).mean() - net(views[1]).mean()).item())
    assert abs(gaps[0]) < 1e-4
    assert gaps[1] > 1


# ---- statistics


def test_statistics_count_only_latents_of_the_clips() -> None:
    """9 frames are 3 latent frames; 1 frame is one, 4 are two, 6 are three; the third clip is not valid."""
    used, data = nets(), batch(LENGTHS, valid=(True, True, False, True))
    net = used["tokenizer"]
    assert isinstance(net, VideoTokenizer)
    stats = losses().tokenizer_turn(used, data, at(0, data)).stats
    latents, ids = [], []
    for row, count in ((0, 3), (1, 1), (3, 3)):
        clip = held(data.frames, data.lengths)[row : row + 1]
        latents.append(net.latent(clip)[0, :count].flatten(0, 2).detach())
        ids.append(net.encode(clip)[0, :count].flatten())
    seen = torch.cat(latents)
    assert torch.equal(stats["codes"], torch.bincount(torch.cat(ids), minlength=200).float())
    assert stats["latent_count"].item() == len(seen) == 7 * 16
    assert torch.equal(losses().measure(used, data, at(0, data)).stats["codes"], stats["codes"])
    follow(used, stats, 0)
    torch.testing.assert_close(net.latent_mean, seen.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.latent_variance, seen.var(0, unbiased=False), rtol=1e-3, atol=1e-5)


CHAIN = ResidualConfig(quantizer=VQConfig(codes=8, width=4), num_quantizers=2)


@pytest.mark.parametrize("quantizer", [VQConfig(codes=16, width=4), LFQConfig(bits=4), CHAIN], ids=lambda q: q.kind)
def test_terms_of_quantizers_are_of_latents_that_belong_to_clips(quantizer: QuantizerConfig) -> None:
    """A clip of four frames in a batch of nine is as one of two latent frames alone."""
    used, long = nets(quantizer=quantizer), batch((4,), length=9)
    short = replace(long, frames=held(long.frames, long.lengths)[:, :, :5])
    one, two = (losses().tokenizer_turn(used, data, at(0, data)) for data in (long, short))
    assert one.parts["commitment"].item() > 0
    for name, value in two.parts.items():
        assert one.parts[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    for name, value in two.stats.items():
        torch.testing.assert_close(one.stats[name], value, rtol=1e-4, atol=1e-5)
    before = [buffer.clone() for buffer in used["tokenizer"].buffers()]
    follow(used, one.stats, 0)
    assert any(not torch.equal(a, b) for a, b in zip(before, used["tokenizer"].buffers(), strict=True))


def test_validation_sees_only_what_is_valid() -> None:
    used, data = nets(), batch(LENGTHS, valid=(True, False, True, False))
    alone = cut(data, slice(0, 4, 2))
    masked, kept = (losses().measure(used, x, at(3, x)) for x in (data, alone))
    assert masked.weight.item() == kept.weight.item() == 2
    for name, value in kept.parts.items():
        assert masked.parts[name].item() == pytest.approx(value.item(), rel=1e-4), name
    assert VideoLosses.digest(masked.stats) == pytest.approx(VideoLosses.digest(kept.stats), rel=1e-5)
