"""Sketches beside the text: what is seen of them, that drawing sees the same, and that they are followed."""

from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tessera.batches import TokenBatch
from tessera.contracts import Context
from tessera.generators.autoregressive.grid_losses import GridLossConfig, GridLosses
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.grid_stage import GridStageConfig, build_nets, build_stage
from tessera.generators.autoregressive.model import LENGTHS
from tests.generators.grid_toys import (
    GRID,
    NEAR,
    TEXT,
    VOCABULARY,
    anything,
    batch_of,
    clips,
    drawn,
    generator,
    rows,
    watched,
    words,
)

CELLS = list(itertools.product(*map(range, GRID)))


def with_sketch(ids: Tensor, sketch: Tensor, lengths: list[int]) -> TokenBatch:
    batch = batch_of(ids, words(len(ids)))
    found = {name: getattr(batch, name) for name in ("ids", "text", "valid", "positions", "keys", "captions")}
    return TokenBatch(**found, sketch=sketch, sketch_lengths=torch.tensor(lengths))


@pytest.mark.parametrize("size", [1, 3])
def test_each_cell_sees_the_sketch_around_its_own_place_and_time(size: int) -> None:
    net, seen = generator(depth=1, sketch=size), dict[str, Tensor]()
    net.embed_sketch[0].register_forward_hook(lambda module, given, out: seen.update(cells=out.requires_grad_()))
    logits = net(clips(1), words(1), anything(1), sketch=clips(1, seed=4))[0, ..., 0, :]
    for t, h, w in CELLS:
        (grad,) = torch.autograd.grad(logits[t, h, w].square().sum(), seen["cells"], retain_graph=True)
        felt = [cell for cell, part in zip(CELLS, grad[0].flatten(0, 2).abs().sum(1).tolist(), strict=True) if part]
        near = [cell for cell in CELLS if cell[0] == t and max(abs(cell[1] - h), abs(cell[2] - w)) <= size // 2]
        assert felt == near


@pytest.mark.parametrize(
    ("near", "order", "codes", "length"),
    [("dilated", "wavefront", 2, 3), ("whole", "sequential", None, 4), ("diagonals", "wavefront", None, 1)],
)
def test_drawing_sees_the_same_sketch_and_guidance_takes_it_away(near: str, order: str, codes: int | None, length: int) -> None:
    """A sketch for a clip of 5 frames; one of 3 is filled up to 4 and then ends, others end by themselves."""
    net, text, seeds, sketch = generator(near, codes, sketch=3), words(2), torch.tensor([5, 6]), clips(2, length, codes, seed=4)
    ids, logits = watched(net, text, seeds, 5, {"sketch": sketch}, order=order, guidance=2.0)
    whole = torch.cat([sketch, torch.full_like(sketch[:, :1].expand(-1, 5 - length, *sketch.shape[2:]), net.nothing)], dim=1)
    with_both = net(ids, text, anything(2), sketch=whole).detach()
    without = net(ids, text.without(torch.ones(2, dtype=torch.bool)), anything(2)).detach()
    torch.testing.assert_close(logits[:2], with_both, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[2:], without, rtol=0, atol=1e-5)
    bare = net(ids, text, anything(2)).detach()
    assert (with_both - bare)[:, :length].abs().mean() > 0.01
    none = {"sketch": torch.full_like(sketch, net.nothing)}
    assert torch.equal(drawn(net, text, seeds, 4, none), drawn(net, text, seeds, 4)), "nothing is no sketch"


def test_a_wavefront_with_a_sketch_draws_the_same() -> None:
    net, text, seeds, given = generator("wide", sketch=3), words(2), torch.tensor([1, 2]), {"sketch": clips(2, 6, seed=4)}
    assert torch.equal(*(drawn(net, text, seeds, 6, given, order=order) for order in ("sequential", "wavefront")))
    other = {"sketch": clips(2, 6, seed=5)}
    assert not torch.equal(drawn(net, text, seeds, 6, other), drawn(net, text, seeds, 6, given))
    assert torch.equal(
        drawn(net, rows(text, [1]), seeds[1:], 6, {"sketch": given["sketch"][1:]}), drawn(net, text, seeds, 6, given)[1:]
    )


def test_frames_that_a_sketch_does_not_have_are_nothing_and_some_sketches_are_taken_away() -> None:
    net, seen = generator(sketch=3), dict[str, Tensor]()
    net.register_forward_hook(lambda module, given, out: seen.update(sketch=given[4]))
    losses = GridLosses(GridLossConfig(sketch_dropout_prob=0.5))
    batch = with_sketch(clips(40), clips(40, seed=4), [0, 1, 4, 4] * 10)
    losses.measure({"generator": net}, batch, Context(0, 0, torch.arange(40)))
    assert batch.sketch is not None
    there = (seen["sketch"] != net.nothing).all(3).all(2)
    assert there.sum(1).tolist() == [0, 1, 4, 4] * 10
    assert torch.equal(seen["sketch"][there], batch.sketch[there])
    losses.turn({"generator": net}, batch, Context(0, 0, torch.arange(40)))
    kept = (seen["sketch"] != net.nothing).all(3).all(2).sum(1)
    assert set(kept.tolist()) == {0, 1, 4}
    assert 3 < (kept.view(10, 4)[:, 2:] == 0).sum() < 17


def test_some_sketches_have_gaps_of_any_size() -> None:
    net, seen = generator(sketch=3), dict[str, Tensor]()
    net.register_forward_hook(lambda module, given, out: seen.update(sketch=given[4]))
    batch, places = with_sketch(clips(400), clips(400, seed=4), [4] * 400), torch.arange(400)
    there = []
    for prob in (0.0, 0.5, 1.0):
        losses = GridLosses(GridLossConfig(sketch_dropout_prob=0.0, sketch_gaps_prob=prob))
        losses.turn({"generator": net}, batch, Context(0, 0, places))
        there.append((seen["sketch"] != net.nothing).all(3).all(2))
        assert batch.sketch is not None
        assert torch.equal(seen["sketch"][there[-1]], batch.sketch[there[-1]])
    whole, half, all_ = there
    assert whole.all()
    for found, wanted in ((all_, [80, 80, 80, 80, 80]), (half, [40, 40, 40, 40, 240])):  # the other half has no gaps
        counts = torch.bincount(found.sum(1), minlength=5)
        assert (counts - torch.tensor(wanted)).abs().max() < 30, "0 to 4 frames, each as often"
    assert all_.double().mean(0).sub(0.5).abs().max() < 0.08
    kept, both = [], GridLossConfig(sketch_dropout_prob=0.5, sketch_gaps_prob=0.5)
    for config in (both.model_copy(update={"sketch_gaps_prob": 0.0}), both):
        GridLosses(config).turn({"generator": net}, batch, Context(0, 0, places))
        kept.append((seen["sketch"] != net.nothing).all(3).all(2))
    assert torch.equal(kept[1], kept[0] & half), "some are taken away as a whole, too"
    half_again = GridLosses(GridLossConfig(sketch_dropout_prob=0.0, sketch_gaps_prob=0.5))
    half_again.turn({"generator": net}, with_sketch(clips(400)[7:9], clips(400, seed=4)[7:9], [4, 4]), Context(0, 0, places[7:9]))
    assert torch.equal((seen["sketch"] != net.nothing).all(3).all(2), half[7:9]), "of its place in the stream alone"


def test_captions_lengths_and_sketches_are_taken_away_each_for_itself() -> None:
    """Each of the eight ways to leave some of them as often as the others: 50 of 400 times."""
    net, seen = generator(sketch=3), dict[str, Tensor]()
    net.register_forward_hook(
        lambda module, given, out: seen.update(text=given[1].mask.any(1), told=given[2] < LENGTHS - 1, sketch=given[4])
    )
    losses = GridLosses(GridLossConfig(text_dropout_prob=0.5, length_dropout_prob=0.5, sketch_dropout_prob=0.5))
    batch = with_sketch(clips(400), clips(400, seed=4), [4] * 400)
    losses.turn({"generator": net}, batch, Context(0, 0, torch.arange(400)))
    there = (seen["sketch"] != net.nothing).flatten(1).all(1)
    counts = torch.bincount(seen["text"] * 4 + seen["told"] * 2 + there, minlength=8)
    assert (counts - 50).abs().max() < 25, counts


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="without sketches"):
        generator()(clips(1), words(1), anything(1), sketch=clips(1))
    with pytest.raises(ValueError, match="without sketches"):
        drawn(generator(), words(1), torch.tensor([0]), 2, {"sketch": clips(1, 2)})
    with pytest.raises(ValueError, match="sketch of shape"):
        drawn(generator(sketch=3), words(1), torch.tensor([0]), 2, {"sketch": clips(1, 2, codes=2)})
    with pytest.raises(ValidationError, match="sketch_window 2 has no middle"):
        GridConfig(sketch_window=2)


def test_sketches_are_followed() -> None:
    """The clip is the sketch in other tokens; without one it is noise."""
    torch.manual_seed(0)
    model = GridConfig(width=32, depth=2, heads=2, inner_width=16, inner_depth=1, nearby=NEAR["window"], sketch_window=3)
    config = GridStageConfig(model=model)
    stage = build_stage(config, build_nets(config, vocab_size=VOCABULARY, grid=GRID, text_width=TEXT))
    net = stage.nets["generator"]
    assert isinstance(net, GridAutoregressive)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(60):
        sketch = clips(8, seed=100 + step)
        batch = with_sketch((sketch * 3 + 1) % VOCABULARY, sketch, [4] * 8)
        loss = stage.turns[0].loss(stage.all_nets, batch, Context(step, 0, batch.positions))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    sketch = clips(4, 6, seed=99)
    found = drawn(net.eval(), words(4), torch.arange(4), 6, {"sketch": sketch}, guidance=1.0, temperature=0.5)
    assert (found == (sketch * 3 + 1) % VOCABULARY).float().mean() > 0.95
