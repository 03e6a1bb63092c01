"""The image tokenizer with every kind of quantizer: shapes, the log, codebooks that no cut of a batch changes, exact resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.batches import ImageBatch
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Context, Stage
from tessera.engine.checkpoint import restore, save_checkpoint
from tessera.engine.dist import World
from tessera.engine.state import TrainState, place
from tessera.engine.step import Setting, StepReport, train_step
from tessera.nn.quantizers import VQ, FSQConfig, LFQConfig, QuantizerConfig, ResidualConfig, VQConfig
from tessera.tokenizers.image.critic import CriticConfig, LeCamConfig, PenaltyConfig
from tessera.tokenizers.image.losses import ImageLossConfig, ImageLosses, follow, tokenizer_of
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.image.stage import ImageTokenizerStageConfig, build_stage

CPU = torch.device("cpu")
VQ_SMALL, LFQ_SMALL = VQConfig(codes=32, width=4), LFQConfig(bits=6)
KINDS: dict[str, QuantizerConfig] = {
    "fsq": FSQConfig(levels=(5, 5, 5)),
    "lfq": LFQ_SMALL,
    "vq": VQ_SMALL,
    "residual fsq": ResidualConfig(quantizer=FSQConfig(levels=(5, 5)), num_quantizers=2),
    "residual lfq": ResidualConfig(quantizer=LFQ_SMALL, num_quantizers=2),
    "residual vq": ResidualConfig(quantizer=VQ_SMALL, num_quantizers=3),
}
every_kind = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())
CRITIC = CriticConfig(widths=(8, 8), start_step=1, warmup_steps=1, lecam=LeCamConfig(decay=0.5), penalty=PenaltyConfig(every=2))


def config(quantizer: QuantizerConfig, critic: CriticConfig | None = None, lr: float = 1e-3) -> ImageTokenizerStageConfig:
    optim = OptimConfig(lr=lr, warmup_steps=0, schedule="constant")
    model = ImageTokenizerConfig(widths=(16, 16), blocks=(1, 1), quantizer=quantizer)
    return ImageTokenizerStageConfig(model=model, critic=critic, optim=optim, critic_optim=optim)


def start(stage_config: ImageTokenizerStageConfig) -> tuple[Stage, TrainState]:
    torch.manual_seed(0)
    stage = build_stage(stage_config, 3)
    return stage, place(stage, 0, EngineConfig(), CPU)


def step(stage: Stage, state: TrainState, batches: Sequence[ImageBatch]) -> StepReport:
    return train_step(state, stage, batches, Setting(World(0, 1, CPU), 1000))


def batch(num: int = 6, seed: int = 0) -> ImageBatch:
    coarse = torch.rand(num, 3, 3, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    images = nn.functional.interpolate(coarse, size=16, mode="bilinear")
    return ImageBatch(images, torch.ones(num, dtype=torch.bool), torch.arange(num), tuple(map(str, range(num))), (None,) * num)


def cut(whole: ImageBatch, first: int, last: int) -> ImageBatch:
    part = slice(first, last)
    return ImageBatch(whole.images[part], whole.valid[part], whole.positions[part], whole.keys[part], whole.captions[part])


def tensors(state: TrainState) -> dict[str, Tensor]:
    nets = {**{f"{name} average": net for name, net in state.averages.items()}, **state.nets}
    return {f"{name}/{key}": value for name, net in nets.items() for key, value in net.state_dict().items()}


# ---- there and back


@every_kind
def test_ids_and_latents_there_and_back(quantizer: QuantizerConfig) -> None:
    torch.manual_seed(0)
    net, x = ImageTokenizer(config(quantizer).model, 3), batch(2).images
    nn.init.normal_(net.decoder.out.weight, std=0.1)
    ids = net.encode(x)
    links = (quantizer.num_quantizers,) if isinstance(quantizer, ResidualConfig) else ()
    assert ids.shape == (2, 8, 8, *links)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() <= ids.max() < net.vocab_size == quantizer.vocab_size
    made = net(x)
    assert torch.equal(made.ids, ids)
    torch.testing.assert_close(net.decode(ids), made.images.clamp(-1, 1))
    latent = net.encode_latent(x)
    assert latent.shape == (2, quantizer.width, 8, 8)
    codes = rearrange(net.quantizer.decode(ids), "b h w d -> b d h w")
    torch.testing.assert_close(net.decode_latent(codes), net.decode(ids))
    assert (codes - latent).square().mean() < latent.square().mean()  # the codes are near
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).quantized.codes.dtype == net.encode_latent(x).dtype == torch.float32


@every_kind
def test_what_the_log_names(quantizer: QuantizerConfig) -> None:
    stage, state = start(config(quantizer))
    turn = step(stage, state, [batch()]).turns[0]
    named = set(turn.sums.numbers) - {"loss", "weight", "l1", "l2", "psnr"}
    inner = quantizer.quantizer if isinstance(quantizer, ResidualConfig) else quantizer
    assert named == {"fsq": set(), "lfq": {"commitment", "entropy"}, "vq": {"commitment", "codes_restarted"}}[inner.kind]
    numbers = turn.sums.numbers
    added = sum(numbers[name] for name in named - {"codes_restarted"}) + numbers["l1"] + numbers["l2"]
    assert numbers["loss"].item() == pytest.approx(float(added), rel=1e-5)
    measured = ImageLosses(ImageLossConfig(), None).measure(stage.nets, batch(), Context(0, 0, torch.arange(6)))
    assert set(measured.parts) == {"l1", "l2", "psnr", "ssim"} | (named & {"commitment"})
    assert 0 < stage.digest(measured.stats)["codes_used"] <= 1


@every_kind
def test_a_batch_is_learned_by_heart(quantizer: QuantizerConfig) -> None:
    stage, state = start(config(quantizer, lr=3e-3))
    errors, data = [], [batch(2)]
    for _ in range(150):
        numbers = step(stage, state, data).turns[0].sums.numbers
        errors.append((numbers["l1"] + numbers["l2"]).item())
    assert min(errors[-10:]) * 4 < errors[0]
    average, raw = (net(data[0].images).images for net in (state.averages["tokenizer"], state.nets["tokenizer"]))
    assert (average - data[0].images).square().mean() < 2 * (raw - data[0].images).square().mean() + 0.02


# ---- no cut of a batch changes anything


@pytest.mark.parametrize("kind", ["vq", "residual vq", "residual fsq", "lfq without entropy"])
def test_one_micro_batch_or_three(kind: str) -> None:
    quantizer = LFQConfig(bits=6, entropy=0) if kind == "lfq without entropy" else KINDS[kind]
    whole, parts = (start(config(quantizer, CRITIC)) for _ in range(2))
    for index in range(5):
        data = batch(6, index)
        one = step(*whole, [data])
        three = step(*parts, [cut(data, 0, 1), cut(data, 1, 4), cut(data, 4, 6)])
        for a, b in zip(one.turns, three.turns, strict=True):
            for name, value in a.sums.numbers.items():
                assert b.sums.numbers[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5), (index, name)
    for name, value in tensors(whole[1]).items():
        if "quantizer" in name or "past" in name:
            torch.testing.assert_close(tensors(parts[1])[name], value, rtol=1e-3, atol=1e-3)


def test_padded_pictures_move_no_codebook() -> None:
    stage, _ = start(config(VQ_SMALL))
    other, _ = start(config(VQ_SMALL))
    data = batch(4)
    padded = ImageBatch(data.images, torch.tensor([True, True, False, False]), data.positions, data.keys, data.captions)
    losses = ImageLosses(ImageLossConfig(), None)
    for nets, seen in ((stage.nets, padded), (other.nets, cut(data, 0, 2))):
        loss = losses.tokenizer_turn(nets, seen, Context(0, 0, seen.positions))
        torch.manual_seed(1)
        follow(nets, loss.stats, 0)
    for name, buffer in stage.nets["tokenizer"].named_buffers():
        torch.testing.assert_close(other.nets["tokenizer"].get_buffer(name), buffer, rtol=1e-5, atol=1e-5)


# ---- stop and go on


@pytest.mark.parametrize("kind", ["vq", "residual vq", "lfq"])
def test_saving_and_resuming_is_never_having_stopped(kind: str, tmp_path: Path) -> None:
    unbroken = start(config(KINDS[kind], CRITIC))
    for index in range(6):
        step(*unbroken, [batch(6, index)])
    first = start(config(KINDS[kind], CRITIC))
    for index in range(3):
        step(*first, [batch(6, index)])
    saved = save_checkpoint(tmp_path, first[1], {})
    stage, state = start(config(KINDS[kind], CRITIC))
    restore(saved, state)
    for index in range(3, 6):
        step(stage, state, [batch(6, index)])
    expected = tensors(unbroken[1])
    assert all(torch.equal(value, expected[name]) for name, value in tensors(state).items())
    assert any("past" in name for name in expected)


def test_the_average_has_a_codebook_of_its_own() -> None:
    stage, state = start(config(VQ_SMALL))
    for index in range(4):
        before = tokenizer_of(state.averages).quantizer.get_buffer("codebook").clone()
        step(stage, state, [batch(6, index)])
        average, raw = (tokenizer_of(nets).quantizer for nets in (state.averages, state.nets))
        assert isinstance(average, VQ)
        decay = (1 + index) / (10 + index)
        torch.testing.assert_close(average.codebook, decay * before + (1 - decay) * raw.get_buffer("codebook"))
    x = batch(3).images
    ids = tokenizer_of(state.averages).encode(x)
    distances = torch.cdist(tokenizer_of(state.averages)(x).quantized.prepared.flatten(0, 2), average.codebook)
    assert (distances.argmin(-1) == ids.flatten()).float().mean() > 0.99


# ---- the step never waits for the device


class Waits(TorchDispatchMode):
    """Refuses what would wait for a GPU: reading a number, shapes that depend on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")), name
        if "aten.index.Tensor" in name:
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), "boolean indexing"
        return func(*args, **(kwargs or {}))


@every_kind
def test_neither_turn_nor_the_codebook_waits(quantizer: QuantizerConfig) -> None:
    stage, _ = start(config(quantizer, CRITIC))
    losses, data = ImageLosses(ImageLossConfig(), CRITIC), batch()
    with Waits():
        first = losses.tokenizer_turn(stage.nets, data, Context(2, 0, data.positions))
        second = losses.critic_turn(stage.nets, data, Context(2, 0, data.positions, {"tokenizer": first.hand}))
        follow(stage.nets, {**first.stats, **second.stats}, 2)
