"""Guidance by hand: nested branches, each with its own scale, within an interval, and never on the variance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.guidance import GuidanceConfig, branched, branches_of, guided
from tessera.generators.diffusion.processes import DdpmConfig, FlowConfig, Guess, build_process
from tessera.generators.diffusion.sample import DiffusionSampleConfig, DiffusionSampler
from tests.generators.diffusion_toys import process

TEXT = TextStates(torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.tensor([[1.0] * 4, [2.0] * 4]))
EMBEDDING = torch.tensor([[10.0, 0], [20.0, 0]])


class Told(nn.Module):
    """Guesses clean by what it is told, and remembers how often and how it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.befores: list[Tensor] = []

    def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        self.rows.append(len(x))
        if condition.before is not None:
            self.befores.append(condition.before)
        clean = torch.zeros_like(x)
        if condition.text is not None:
            clean = clean + 0.1 * condition.text.pooled[:, :1] * condition.text.mask.any(1, keepdim=True)
        if condition.embedding is not None:
            there = True if condition.has_embedding is None else condition.has_embedding[:, None]
            clean = clean + 0.01 * condition.embedding[:, :1] * there
        return clean


def clean_process() -> object:
    made = build_process(DdpmConfig(predicts="clean"))
    made.ends = (-1e4, 1e4)
    return made


def draw(condition: Condition, guidance: GuidanceConfig, **options: object) -> tuple[Tensor, Told]:
    net = Told()
    config = DiffusionSampleConfig(steps=4, sampler="euler", threshold="none", guidance=guidance, **options)
    return DiffusionSampler(net, clean_process(), config)((3,), condition, torch.arange(2)), net


@pytest.mark.parametrize(
    ("text", "embedding", "branches"), [(1.0, 1.0, 1), (3.0, 1.0, 2), (3.0, 3.0, 2), (1.0, 2.0, 3), (4.0, 2.0, 3), (0.0, 0.0, 2)]
)
def test_each_scale_counts_its_own_difference(text: float, embedding: float, branches: int) -> None:
    """With a constant guess every sampler ends there: 0 for nothing, e with the embedding, e + t with both."""
    x, net = draw(Condition(text=TEXT, embedding=EMBEDDING), GuidanceConfig(text=text, embedding=embedding))
    for row, (e, t) in enumerate(((0.1, 0.1), (0.2, 0.2))):
        torch.testing.assert_close(x[row], torch.full((3,), embedding * e + text * t))
    assert net.rows == [2 * branches] * 4


def test_one_condition_alone() -> None:
    x, net = draw(Condition(text=TEXT), GuidanceConfig(text=3.0, embedding=7.0))
    torch.testing.assert_close(x[:, 0], torch.tensor([0.3, 0.6]))
    x, net = draw(Condition(embedding=EMBEDDING), GuidanceConfig(text=3.0, embedding=7.0))
    torch.testing.assert_close(x[:, 0], torch.tensor([0.7, 1.4]))
    x, net = draw(Condition(), GuidanceConfig(text=3.0, embedding=7.0))
    assert not x.any()
    assert net.rows == [2] * 4


def test_a_negative_text_stands_where_text_was() -> None:
    net = Told()
    config = DiffusionSampleConfig(steps=2, sampler="euler", threshold="none", guidance=GuidanceConfig(text=3.0, embedding=2.0))
    negative = TextStates(torch.ones(2, 5, 4), torch.ones(2, 5, dtype=torch.bool), torch.full((2, 4), 5.0))
    condition = Condition(text=TEXT, embedding=EMBEDDING, has_embedding=torch.tensor([True, False]))
    x = DiffusionSampler(net, clean_process(), config)((3,), condition, torch.arange(2), negative)
    # by hand: nothing 0.5, with the embedding 0.5 + e, with both e + t; the second row has no embedding
    wanted = [0.5 + 2 * 0.1 + 3 * (0.2 - 0.6), 0.5 + 3 * (0.2 - 0.5)]
    torch.testing.assert_close(x[:, 0], torch.tensor(wanted))


def test_only_within_its_levels() -> None:
    """Outside, the guess is the plain one, at the cost of one branch."""
    levels = build_process(DdpmConfig()).level_at(torch.tensor([0.75, 0.5], dtype=torch.float64)).tolist()
    guidance = GuidanceConfig(text=3.0, levels=(levels[0] - 0.1, levels[1] + 0.1))
    x, net = draw(Condition(text=TEXT), guidance)
    assert net.rows == [2, 4, 4, 2]
    torch.testing.assert_close(x[:, 0], torch.tensor([0.1, 0.2]), msg="the last guess is a plain one")


@pytest.mark.parametrize(("lowest", "rows"), [(-10.0, [4, 4, 4]), (-9.9, [2, 4, 4])])
def test_noise_alone_is_of_the_level_that_the_network_is_told(lowest: float, rows: list[int]) -> None:
    net, made = Told(), build_process(FlowConfig())
    assert made.ends[0] == -10
    config = DiffusionSampleConfig(steps=3, guidance=GuidanceConfig(text=3.0, levels=(lowest, 10.0)))
    DiffusionSampler(net, made, config)((3,), Condition(text=TEXT), torch.arange(2))
    assert net.rows == rows


def test_the_variance_is_not_guided() -> None:
    guess = Guess(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.25], [0.75]]))
    found = guided(guess, (3.0, 0.0, -2.0))
    assert found.clean.tolist() == [[-3.0]]
    assert found.fraction is not None
    assert found.fraction.tolist() == [[0.25]]


def test_branches_are_rows_of_one_batch() -> None:
    low, level = torch.randn(2, 3, 4, 4), torch.tensor([1.0, 2.0])
    condition = Condition(text=TEXT, embedding=EMBEDDING, low=low, low_level=level)
    stack = branched(condition, branches_of(GuidanceConfig(text=4.0, embedding=2.0), condition))
    assert stack.text is not None
    assert stack.text.mask.any(1).tolist() == [True, True, False, False, False, False]
    assert stack.has_embedding is not None
    assert stack.has_embedding.tolist() == [True, True, True, True, False, False]
    assert stack.low is not None
    assert torch.equal(stack.low, torch.cat([low] * 3))
    assert stack.low_level is not None
    assert torch.equal(stack.low_level, torch.cat([level] * 3))


def test_all_branches_recall_the_guess_before() -> None:
    net = Told()
    config = DiffusionSampleConfig(steps=3, sampler="dpm", threshold="static", guidance=GuidanceConfig(text=20.0))
    DiffusionSampler(net, clean_process(), config, recalls=True)((3,), Condition(text=TEXT), torch.arange(2))
    assert [before.flatten().unique().tolist() for before in net.befores] == [[0], [1], [1]], "as it was used: guided, cut off"
    assert all(len(before) == 4 for before in net.befores)


def test_nothing_waits_for_the_device() -> None:
    """Meta tensors have no values: a step that reads one fails."""
    made = process("flow")
    config = DiffusionSampleConfig(sampler="ancestral", steps=3, threshold="dynamic", guidance=GuidanceConfig(embedding=2.0))
    ours = DiffusionSampler(Told(), made, config, recalls=True)
    meta = torch.device("meta")
    text = TextStates(TEXT.states.to(meta), TEXT.mask.to(meta), TEXT.pooled.to(meta))
    condition = Condition(text=text, embedding=EMBEDDING.to(meta))
    shares = branches_of(config.guidance, condition)
    known, kept = torch.zeros(2, 3, device=meta), torch.zeros(2, 3, dtype=torch.bool, device=meta)
    seeds = torch.zeros(2, dtype=torch.int64, device=meta)
    setup, state = ours.prepare((3,), branched(condition, shares), ours.inpainting, seeds, known, kept)
    assert ours.step(setup, state, shares).base.shape == (2, 3)


def test_the_network_is_told_only_levels_that_it_has_seen() -> None:
    seen = []

    class Listening(Told):
        def forward(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
            seen.append(level)
            return super().forward(x, level, condition)

    made = build_process(FlowConfig(shift=2.0))
    x = DiffusionSampler(Listening(), made, DiffusionSampleConfig(steps=3))((3,), Condition(), torch.arange(2))
    assert x.isfinite().all()
    low, high = made.ends
    assert all((low <= level).all() and (level <= high).all() for level in seen)
    assert seen[0][0] == pytest.approx(low), "noise alone has level -inf"
