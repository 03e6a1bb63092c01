"""The stage inside the real step: one forward for both turns, codebooks that follow, and a batch learned by heart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import VideoBatch
from tessera.compiling import settle_einops
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Stage
from tessera.engine.dist import World
from tessera.engine.state import TrainState, place
from tessera.engine.step import Setting, StepReport, train_step
from tessera.engine.validate import eval_mode
from tessera.nn.perceptual import VGG16Distance
from tessera.nn.quantizers import LFQConfig, QuantizerConfig, ResidualConfig, VQConfig
from tessera.tokenizers.image.critic import LeCamConfig, PenaltyConfig
from tessera.tokenizers.video.critic import ClipCritic, ClipCriticConfig, FrameCriticConfig, VideoCriticConfig, build_critic
from tessera.tokenizers.video.losses import VideoLossConfig, VideoLosses
from tessera.tokenizers.video.model import VideoTokenizer
from tessera.tokenizers.video.stage import VideoTokenizerStageConfig, build_stage
from tests.tokenizers.clips import KINDS, LEVELS, at, batch, cut, model_config, rouse, tokenizer

CPU = torch.device("cpu")
FRAMES = FrameCriticConfig(widths=(8, 8), start_step=3, warmup_steps=2, penalty=PenaltyConfig(every=2), lecam=LeCamConfig())
CLIPS = ClipCriticConfig(**{name: getattr(FRAMES, name) for name in FRAMES.model_fields_set})


def start(
    critic: VideoCriticConfig | None = None, kind: str = "conv", quantizer: QuantizerConfig = LEVELS, lr: float = 1e-3
) -> tuple[Stage, TrainState]:
    torch.manual_seed(0)
    optim = OptimConfig(lr=lr, warmup_steps=0, schedule="constant")
    config = VideoTokenizerStageConfig(model=model_config(kind, quantizer), critic=critic, optim=optim, critic_optim=optim)
    stage = build_stage(config, 3)
    return stage, place(stage, 0, EngineConfig(), CPU)


def step(stage: Stage, state: TrainState, batches: Sequence[VideoBatch]) -> StepReport:
    return train_step(state, stage, batches, Setting(World(0, 1, CPU), 1000))


def squares(num: int = 4, length: int = 9, size: int = 16) -> VideoBatch:
    """Squares that move by a pixel a frame, of several lengths."""
    rng = torch.Generator().manual_seed(0)
    frames = torch.full((num, 3, length, size, size), -1.0)
    for row in range(num):
        colour, y, x = torch.rand(3, generator=rng) * 2 - 1, row % 3, row % 4
        for t in range(length):
            frames[row, :, t, y + t % 8 : y + t % 8 + 5, x : x + 5] = colour[:, None, None]
    lengths = torch.tensor([length, 1, length - 3, length - 4])[torch.arange(num) % 4]
    names = tuple(map(str, range(num)))
    return VideoBatch(frames, lengths, torch.ones(num, dtype=torch.bool), torch.arange(num), names, (None,) * num)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


@pytest.mark.parametrize("critic", [FRAMES, CLIPS], ids=["frames", "clips"])
def test_both_turns_share_one_forward_and_begin_where_the_config_says(critic: VideoCriticConfig) -> None:
    stage, state = start(critic)
    assert isinstance(stage.nets["critic"], ClipCritic) is (critic is CLIPS)
    forwards: list[int] = []
    stage.nets["tokenizer"].register_forward_hook(lambda *_: forwards.append(1))
    seen = []
    for _ in range(5):
        before = {name: weights(net) for name, net in stage.nets.items()}
        report = step(stage, state, [squares()])
        changed = {name: not torch.equal(before[name], weights(net)) for name, net in stage.nets.items()}
        assert changed["tokenizer"]
        assert changed["critic"] is (len(report.turns) == 2)
        seen.append(("plea" in report.turns[0].sums.numbers, changed["critic"]))
    assert seen == [(False, False), (False, True), (False, True), (True, True), (True, True)]
    assert len(forwards) == 5


@pytest.mark.parametrize("critic", [FRAMES, CLIPS], ids=["frames", "clips"])
def test_micro_batches_are_one_batch(critic: VideoCriticConfig) -> None:
    made = []
    for edges in ((0, 4), (0, 1, 4)):
        stage, state = start(critic, lr=1e-2)
        state.step = 4
        parts = [cut(squares(), slice(a, b)) for a, b in itertools.pairwise(edges)]
        report = step(stage, state, parts)
        made.append((report, stage))
    (one, first), (two, second) = made
    for a, b in zip(one.turns, two.turns, strict=True):
        assert {name: float(value) for name, value in b.sums.numbers.items()} == pytest.approx(
            {name: float(value) for name, value in a.sums.numbers.items()}, rel=1e-3, abs=1e-5
        )
    for name in ("latent_mean", "latent_variance"):
        torch.testing.assert_close(first.nets["tokenizer"].get_buffer(name), second.nets["tokenizer"].get_buffer(name))
    past = [stage.nets["critic"].get_buffer("past.real") for stage in (first, second)]
    torch.testing.assert_close(*past)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_learned_by_heart(kind: str) -> None:
    stage, state = start(kind=kind, lr=1e-2)
    data = squares()
    assert stage.measure is not None
    found = []
    for num_steps in (0, 40):
        for _ in range(num_steps):
            step(stage, state, [data])
        with torch.no_grad(), eval_mode(stage.nets):
            found.append(stage.measure(stage.nets, data, at(0, data)))
    before, after = (measured.parts["psnr"].item() / 4 for measured in found)
    assert after > before + 8, (before, after)
    assert stage.digest(found[1].stats).keys() == {"codes_used", "perplexity", "flicker"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 9])
def test_nets_are_one_graph(kind: str, length: int) -> None:
    """torch.compile finds nothing that it would have to leave to Python, and computes the same."""
    stage, _ = start(kind=kind)
    net, clips = stage.nets["tokenizer"], squares().frames[:, :, :length]
    assert isinstance(net, VideoTokenizer)
    settle_einops()
    encode, decode = (torch.compile(part, backend="eager", fullgraph=True) for part in (net.encoder, net.decoder))
    with torch.no_grad():
        torch.testing.assert_close(encode(clips), net.encoder(clips), rtol=1e-4, atol=1e-5)
        codes = net.encode_latent(clips)
        torch.testing.assert_close(decode(codes)[0], net.decoder(codes)[0], rtol=1e-4, atol=1e-5)


CHAIN = ResidualConfig(quantizer=VQConfig(codes=8, width=4), num_quantizers=2)


@pytest.mark.parametrize("quantizer", [VQConfig(codes=16, width=4), LFQConfig(bits=4), CHAIN], ids=lambda q: q.kind)
def test_codebooks_follow_the_clips(quantizer: QuantizerConfig) -> None:
    stage, state = start(quantizer=quantizer)
    before = {name: buffer.clone() for name, buffer in stage.nets["tokenizer"].named_buffers()}
    report = step(stage, state, [squares()])
    moved = {name for name, buffer in stage.nets["tokenizer"].named_buffers() if not torch.equal(before[name], buffer)}
    assert {"latent_mean", "latent_variance"} <= moved
    assert bool([name for name in moved if "codebook" in name]) is not isinstance(quantizer, LFQConfig)
    assert 0 < stage.digest(report.stats)["codes_used"] <= 1


def test_the_perceptual_net_is_frozen() -> None:
    torch.manual_seed(0)
    config = VideoTokenizerStageConfig(model=model_config("conv"), loss=VideoLossConfig(seen_frames=1))
    stage = build_stage(config, 3, VGG16Distance().train())
    state = place(stage, 0, EngineConfig(), CPU)
    assert step(stage, state, [squares()]).turns[0].sums.numbers["perceptual"] > 0
    assert not stage.frozen["perceptual"].training
    assert set(state.nets) == {"tokenizer"}


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_change_nothing(kind: str) -> None:
    sums = []
    for checkpointing in (False, True):
        stage, _ = start(kind=kind)
        state = place(stage, 0, EngineConfig(activation_checkpointing=checkpointing), CPU)
        for _ in range(2):
            step(stage, state, [squares()])
        sums.append(weights(state.nets["tokenizer"]))
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("critic", [FRAMES, CLIPS], ids=["frames", "clips"])
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_hear_the_critic_as_much_as_was_asked(critic: FrameCriticConfig | ClipCriticConfig, kind: str) -> None:
    """The adaptive weight is a ratio of slopes at what was made, so a first frame alone has one, too."""
    adaptive = critic.model_copy(update={"adaptive": True, "weight": 0.5})
    nets: dict[str, nn.Module] = {"tokenizer": tokenizer(kind), "critic": rouse(build_critic(adaptive, 3))}
    data, made = batch((1, 1), length=1), []

    def watch(_: nn.Module, arguments: Any, found: Any) -> None:
        found.frames.retain_grad()
        made.append(found.frames)

    nets["tokenizer"].register_forward_hook(watch)
    losses = VideoLosses(VideoLossConfig(), adaptive)
    before, after = (losses.tokenizer_turn(nets, data, at(index, data)) for index in (2, 3))  # the critic is heard from 3 on
    for loss in (before, after):
        loss.total.backward()
    plain, both = (frames.grad.flatten(1) for frames in made)
    assert "plea_weight" not in before.parts
    assert after.parts["plea_weight"] > 0
    torch.testing.assert_close((both - plain).norm(dim=1), 0.5 * plain.norm(dim=1), rtol=1e-3, atol=1e-6)


def test_configs() -> None:
    config = VideoTokenizerStageConfig()
    assert config.critic is None
    chosen = VideoTokenizerStageConfig.model_validate({"critic": {"kind": "clips"}, "model": {"kind": "cvivit"}})
    assert isinstance(chosen.critic, ClipCriticConfig)
    assert VideoTokenizerStageConfig.model_validate(chosen.model_dump(mode="json")) == chosen
    with pytest.raises(ValueError, match="nothing would be learned"):
        VideoTokenizerStageConfig(loss=VideoLossConfig(l1=0, l2=0))
    assert isinstance(build_stage(VideoTokenizerStageConfig(model=model_config("conv")), 1).nets["tokenizer"], VideoTokenizer)
