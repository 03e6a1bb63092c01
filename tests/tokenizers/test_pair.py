"""The contrastive pair: the loss against a loop in NumPy, who is told apart from whom, ranks, and a batch learned by heart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.batches import PairBatch, TextStates
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Context, Loss
from tessera.engine.dist import World
from tessera.engine.state import place
from tessera.engine.step import Setting, train_step
from tessera.engine.validate import validate
from tessera.text.bytes import ByteTextConfig, read_bytes
from tessera.text.encoders import MiniLMTextConfig
from tessera.tokenizers.pair.losses import PairLossConfig, PairLosses
from tessera.tokenizers.pair.model import Embedder, EmbedderConfig
from tessera.tokenizers.pair.stage import EmbedderStageConfig, build_embedder, build_stage

CPU = torch.device("cpu")
TEXT = ByteTextConfig(length=16, width=16, depth=1, heads=2)
MODEL = EmbedderConfig(width=12, widths=(8, 16))


def embedder(seed: int = 0) -> Embedder:
    torch.manual_seed(seed)
    net = build_embedder(MODEL, TEXT, 3)
    for parameter in net.parameters():  # away from a start at which residual blocks say 0
        parameter.data.add_(0.05 * torch.randn(parameter.shape))
    return net


def batch(captions: list[str | None], first: int = 0, keys: list[str] | None = None) -> PairBatch:
    rng = torch.Generator().manual_seed(first)
    num = len(captions)
    images = torch.nn.functional.interpolate(torch.rand(num, 3, 4, 4, generator=rng) * 2 - 1, size=16)
    names = tuple(keys or [str(first + row) for row in range(num)])
    valid, positions = torch.ones(num, dtype=torch.bool), torch.arange(first, first + num)
    return PairBatch(images, None, read_bytes(captions, 16), valid, positions, names, tuple(captions))


def rows(whole: PairBatch, part: slice) -> PairBatch:
    """What a rank, or a micro-batch, sees of a batch."""
    assert whole.images is not None
    text = replace(whole.text, ids=whole.text.ids[part])
    return PairBatch(
        whole.images[part], None, text, whole.valid[part], whole.positions[part], whole.keys[part], whole.captions[part]
    )


def loss_of(net: Embedder, given: PairBatch, group: int = 64) -> Loss:
    return PairLosses(PairLossConfig(group=group)).turn({"embedder": net}, given, Context(0, 0, given.positions))


def by_hand(net: Embedder, given: PairBatch, group: int) -> tuple[float, int, int, int]:
    """Loss, weight and hits of both directions, row by row in float64."""
    with torch.no_grad():
        pictures, captions = (part.double().numpy() for part in net(given.images, given.text))
        scores = float(net.log_sharpness.double().exp()) * pictures @ captions.T
    total, weight, hits = 0.0, 0, [0, 0]
    for row in range(len(given.keys)):
        if not given.captions[row] or not given.valid[row]:
            continue
        rivals = [
            other
            for other in range(len(given.keys))
            if given.captions[other] and given.valid[other]
            and given.captions[other] != given.captions[row] and given.keys[other] != given.keys[row]
            and int(given.positions[other]) // group == int(given.positions[row]) // group
        ]  # fmt: skip
        if not rivals:
            continue
        weight += 1
        for way, table in enumerate((scores, scores.T)):
            own, others = table[row, row], table[row, rivals]
            total += 0.5 * (np.log(np.exp(own) + np.exp(others).sum()) - own)
            hits[way] += bool((others < own).all())
    return total, weight, *hits


CAPTIONS: list[str | None] = ["a cat", "a dog", "a cat", None, "a bird", "", "a fish", "a dog", "an ant", "a bee"]


@pytest.mark.parametrize("group", [3, 4, 64])
def test_the_loss_is_that_of_a_loop(group: int) -> None:
    net, given = embedder(), batch(CAPTIONS, first=5, keys=[*"abcdefghib"])
    given = replace(given, valid=torch.arange(10) != 4)
    loss = loss_of(net, given, group)
    total, weight, hits_picture, hits_caption = by_hand(net, given, group)
    assert loss.total.item() == pytest.approx(total, rel=1e-5)
    assert float(loss.weight) == weight > 0
    assert float(loss.parts["picture_r@1"]) == hits_picture
    assert float(loss.parts["caption_r@1"]) == hits_caption
    assert (loss.parts["sharpness"] / loss.weight).item() == pytest.approx(net.log_sharpness.exp().item())


def gradients(net: Embedder, parts: list[PairBatch], group: int) -> tuple[Tensor, float]:
    """Of all parameters, summed over parts as the step does, and the summed loss."""
    net.zero_grad()
    total = 0.0
    for part in parts:
        loss = loss_of(net, part, group)
        loss.total.backward()
        total += float(loss.total.detach())
    return torch.cat([p.grad.flatten().double() for p in net.parameters() if p.grad is not None]), total


@pytest.mark.parametrize("cuts", [(6, 12), (3, 6, 9, 12), (9, 12)])
def test_micro_batches_of_whole_groups_change_nothing(cuts: tuple[int, ...]) -> None:
    net, given = embedder(), batch([f"word {number % 5}" for number in range(12)])
    parts = [rows(given, slice(start, stop)) for start, stop in zip((0, *cuts), cuts, strict=False)]
    whole, loss = gradients(net, [given], 3)
    summed, losses = gradients(net, parts, 3)
    assert whole.norm() > 0.1
    assert (summed - whole).norm() <= 1e-6 * whole.norm()
    assert losses == pytest.approx(loss, rel=1e-6)


def test_a_cut_group_is_another_loss() -> None:
    """So the test above is one of groups."""
    net, given = embedder(), batch([f"word {number}" for number in range(12)])
    whole, _ = gradients(net, [given], 4)
    summed, _ = gradients(net, [rows(given, slice(0, 6)), rows(given, slice(6, 12))], 4)
    assert (summed - whole).norm() > 1e-2 * whole.norm()


def test_equal_captions_and_the_same_picture_are_not_pushed_apart() -> None:
    net = embedder()
    alone = loss_of(net, batch(["a cat", "a cat", "a cat"]))
    assert (alone.total.item(), alone.weight.item()) == (0.0, 0.0)
    twice = loss_of(net, batch(["a cat", "the same cat"], keys=["x", "x"]))
    assert (twice.total.item(), twice.weight.item()) == (0.0, 0.0)
    assert float(loss_of(net, batch(["a cat", "a dog", "a cat"])).weight) == 3


def test_samples_that_do_not_count_change_nothing() -> None:
    net = embedder()
    few = loss_of(net, batch(["a cat", "a dog", "a bee"]))
    more = replace(batch(["a cat", "a dog", "a bee", None, "a fly"]), valid=torch.tensor([True, True, True, True, False]))
    given = batch(["a cat", "a dog", "a bee"])
    assert more.images is not None
    assert given.images is not None
    more.images[:3] = given.images
    again = loss_of(net, more)
    assert again.total.item() == pytest.approx(few.total.item(), rel=1e-6)
    assert float(again.weight) == 3


def test_embeddings_have_length_one_and_captions_without_text_none() -> None:
    net, given = embedder(), batch(["a cat", None, ""])
    pictures, captions = net(given.images, given.text)
    assert pictures.norm(dim=1).tolist() == pytest.approx([1, 1, 1])
    assert captions.norm(dim=1).tolist() == pytest.approx([1, 0, 0])
    assert net.pictures(torch.zeros(2, 3, 24, 40)).shape == (2, 12)


def test_frozen_states_go_through_the_head_alone() -> None:
    torch.manual_seed(0)
    net = build_embedder(MODEL, MiniLMTextConfig(), 3)
    assert net.text is None
    states = TextStates(torch.randn(2, 4, 384), torch.tensor([[True] * 4, [False] * 4]), torch.randn(2, 384))
    assert net.captions(states).norm(dim=1).tolist() == pytest.approx([1, 0])
    with pytest.raises(ValueError, match="raw captions, but this pair was built without a text encoder"):
        net.captions(read_bytes(["a cat"], 16))


def test_sharpness_is_bounded() -> None:
    net = embedder()
    net.log_sharpness.data.fill_(9.0)
    assert net.sharpness.item() == 100
    net.log_sharpness.data.fill_(math.log(20))
    assert net.sharpness.item() == pytest.approx(20)


def test_batches_are_made_of_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"batch_size 100 is not made of whole groups of loss\.group 64; set batch_size to 64"):
        EmbedderStageConfig(batch_size=100)
    assert EmbedderStageConfig(batch_size=32).batch_size == 32  # one group, smaller
    assert EmbedderStageConfig(batch_size=96, loss=PairLossConfig(group=32)).loss.group == 32


def test_a_batch_is_learned_by_heart() -> None:
    """In the real step; before, recall is about that of guessing."""
    optim = OptimConfig(lr=3e-3, warmup_steps=0, schedule="constant")
    stage = build_stage(EmbedderStageConfig(model=MODEL, optim=optim, ema_decay=0.5), embedder())
    state, setting = place(stage, 0, EngineConfig(), CPU), Setting(World(0, 1, CPU), 1000)
    given = batch([f"number {number}" for number in range(12)])
    before = validate(stage.nets, stage, [given], 0, 0, setting)
    assert before["picture_r@1"] < 0.5
    for _ in range(60):
        train_step(state, stage, [rows(given, slice(0, 12))], setting)
    after = validate(stage.nets, stage, [given], 0, 0, setting)
    assert after["picture_r@1"] == after["caption_r@1"] == 1
    assert after["loss"] < 0.3 < before["loss"]
