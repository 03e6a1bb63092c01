"""The autoregressive generator of clips: what it sees, what it counts, and that all directions are learned alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.batches import TextStates
from tessera.compiling import settle_einops
from tessera.contracts import Context
from tessera.generators.autoregressive.grid_losses import GridLossConfig, GridLosses, digest, guess
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter
from tessera.generators.autoregressive.grid_stage import GridStageConfig, build_nets, build_stage
from tessera.generators.autoregressive.model import LENGTHS
from tessera.nn.nearby import NearbyConfig
from tessera.recording import Lean
from tests.generators.grid_toys import GRID, NEAR, TEXT, VOCABULARY, anything, batch_of, clips, drawn, generator, rows, words

CELLS = list(itertools.product(*map(range, GRID)))


def felt(net: GridAutoregressive, codes: int | None = None) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Of each cell (and code), which cells (and codes) its guess depends on: those whose gradient is not exactly 0."""
    seen: dict[str, Tensor] = {}
    hook = net.embed.register_forward_hook(
        lambda module, given, out: seen.update(embedded=out.requires_grad_().retain_grad() or out)
    )
    logits = net(clips(1, codes=codes), words(1), anything(1))[0].flatten(0, 3)
    hook.remove()
    places = list(itertools.product(CELLS, range(codes or 1)))
    found = {}
    for place, guesses in zip(places, logits, strict=True):
        (grad,) = torch.autograd.grad(guesses.square().sum(), seen["embedded"], retain_graph=True)
        touched = grad.reshape(len(places), -1).abs().sum(1).nonzero()[:, 0].tolist()
        found[(*place[0], place[1])] = [(*places[index][0], places[index][1]) for index in touched]
    return found


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("codes", [None, 2])
def test_no_token_sees_itself_or_a_later_one(near: str, codes: int | None) -> None:
    """By the order that it is drawn in: a frame's cells one after another, or a first frame's by diagonals."""
    step = NEAR[near].first_step

    def turn(place: tuple[int, ...]) -> tuple[int, ...]:
        t, h, w, _ = place
        return (t, step * h + w, 0, 0) if t == 0 and step else (t, h, w, 0)

    for place, others in felt(generator(near, codes, depth=3), codes).items():
        assert all((other[:3] == place[:3] and other[3] < place[3]) or turn(other) < turn(place) for other in others)
        if step and place[0] == 0:
            before = [other for other in CELLS if other[0] == 0 and turn((*other, 0)) < turn(place)]
            assert before == sorted({other[:3] for other in others} - {place[:3]}), "all earlier diagonals, whole"


@pytest.mark.parametrize("near", NEAR)
def test_one_layer_sees_the_whole_window_to_all_sides_and_nothing_else(near: str) -> None:
    """In cells, by hand; a cell's left neighbour is what its slot holds. The first layer's dilation is 1."""
    config = NEAR[near]
    rows_behind = config.first_step or 100

    def seen(place: tuple[int, ...], other: tuple[int, ...]) -> bool:
        (t, h, w), (past, row, column) = place, other
        if t == 0 and config.first_whole:
            return past == 0 and rows_behind * row + column < rows_behind * h + w
        inside = config.whole or (abs(row - h) <= config.height // 2 and abs(column - w) <= config.width // 2)
        return other < place and t - past < config.frames and inside

    for (t, h, w, _), others in felt(generator(near, depth=1)).items():
        assert others == [(*cell, 0) for cell in CELLS if seen((t, h, w), cell)]
        if t:
            assert (t - 1, h, w, 0) in others, "its own cell in the frame before"
        if t and 0 < h < GRID[1] - 1 and 0 < w < GRID[2] - 1:
            around = {(t - 1, h + down, w + right, 0) for down, right in ((0, -1), (0, 1), (-1, 0), (1, 0))}
            assert around <= set(others), "and those on its left, right, top and bottom"


def test_a_dilated_layer_looks_further() -> None:
    net = generator("dilated", depth=2)
    net.layer_reaches = net.layer_reaches[1:] * 2
    assert (0, 2, 2, 0) in felt(net)[(1, 0, 0, 0)]
    assert (0, 1, 1, 0) not in felt(generator("dilated", depth=1))[(1, 2, 3, 0)]


def test_frames_behind_a_clip_and_samples_that_fill_up_change_nothing() -> None:
    net, ids, text = generator(codes=2), clips(3, codes=2), words(3)
    batch = batch_of(ids, text, [4, 1, 2])
    together = guess({"generator": net}, batch, text, torch.zeros(3, dtype=torch.long))
    alone = [
        guess(
            {"generator": net}, batch_of(ids[row : row + 1, :length], rows(text, [row])), rows(text, [row]), torch.zeros(1).long()
        )
        for row, length in enumerate((4, 1, 2))
    ]
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in alone), rel=1e-5)
    assert together.weight.item() == 7 * 3 * 4 * 2 == sum(loss.weight.item() for loss in alone)
    batch.valid[1] = False
    fewer = guess({"generator": net}, batch, text, torch.zeros(3, dtype=torch.long))
    assert fewer.total.item() == pytest.approx(together.total.item() - alone[1].total.item(), rel=1e-5)
    assert fewer.stats["samples"].item() == 2


def test_loss_and_bits_are_those_of_a_sum_by_hand() -> None:
    net, ids, text = generator(), clips(2), words(2)
    loss = guess({"generator": net}, batch_of(ids, text, [3, 1]), text, torch.zeros(2, dtype=torch.long))
    probs = net(ids, text, anything(2)).softmax(-1).detach().numpy()
    bits = {(row, t): 0.0 for row in range(2) for t in range(4)}
    for row, (t, h, w) in itertools.product(range(2), CELLS):
        bits[row, t] -= math.log2(probs[row, t, h, w, 0, int(ids[row, t, h, w])])
    first, later, numbers = bits[0, 0] + bits[1, 0], bits[0, 1] + bits[0, 2], digest(loss.stats)
    assert loss.total.item() == pytest.approx((first + later) * math.log(2), rel=1e-5)
    assert numbers["bits_per_token"] == pytest.approx((first + later) / 48, rel=1e-5)
    assert numbers["bits_per_sample"] == pytest.approx((first + later) / 2, rel=1e-5)
    assert numbers["bits_of_first_frame"] == pytest.approx(first / 24, rel=1e-5)
    assert numbers["bits_of_later_frames"] == pytest.approx(later / 24, rel=1e-5)
    picture = guess({"generator": net}, batch_of(ids[:, :1], text), text, torch.zeros(2, dtype=torch.long))
    assert "bits_of_later_frames" not in digest(picture.stats)


def test_tokens_of_a_large_vocabulary_are_two_digits_one_after_the_other() -> None:
    torch.manual_seed(0)
    config = GridConfig(width=32, depth=1, heads=2, inner_width=16, inner_depth=1, nearby=NEAR["window"], sketch_window=3)
    net, vocabulary, text = GridAutoregressive(config, 16_500, GRID, TEXT).eval(), 16_500, words(2)
    torch.nn.init.normal_(net.head.weight, std=0.3)
    ids = torch.randint(0, vocabulary, (2, *GRID))
    assert net.sizes == (125, 132)
    assert torch.equal(net.join(net.split(ids)), ids)
    logs = net(ids, text, anything(2)).double().log_softmax(-1).detach()
    assert (logs[..., 0, 125:] == -math.inf).all()
    assert torch.allclose(logs[..., 0, :125].exp().sum(-1), torch.ones((), dtype=torch.float64))
    wanted = logs[..., 0, :].gather(-1, ids[..., None] // 132) + logs[..., 1, :].gather(-1, ids[..., None] % 132)
    loss = guess({"generator": net}, batch_of(ids, text), text, torch.zeros(2, dtype=torch.long))
    assert loss.total.item() == pytest.approx(-wanted.sum().item(), rel=1e-5)
    assert loss.weight.item() == ids.numel(), "tokens, not digits"
    for order in ("sequential", "wavefront"):
        found = drawn(net, text, torch.arange(2), 4, {"known": ids[:, :2], "sketch": ids}, order=order)
        assert torch.equal(found[:, :2], ids[:, :2])
        assert found.max() < vocabulary
        assert torch.equal(found, drawn(net, text, torch.arange(2), 4, {"known": ids[:, :2], "sketch": ids}))


def test_captions_and_numbers_of_frames_are_taken_away_as_often_as_asked() -> None:
    net, seen = generator(), dict[str, Tensor]()
    net.register_forward_hook(lambda module, given, out: seen.update(mask=given[1].mask, pooled=given[1].pooled, told=given[2]))
    losses = GridLosses(GridLossConfig(text_dropout_prob=0.25, length_dropout_prob=0.5))
    batch = batch_of(clips(64), words(64), [2] * 64)
    losses.turn({"generator": net}, batch, Context(3, 0, torch.arange(64)))
    untold = ~seen["mask"].any(1)
    assert 0.1 < untold.float().mean() < 0.4
    assert torch.equal(untold, (seen["pooled"] == 0).all(1))
    assert set(seen["told"].tolist()) == {4, LENGTHS - 1}
    assert 0.3 < (seen["told"] == LENGTHS - 1).float().mean() < 0.7
    losses.measure({"generator": net}, batch, Context(3, 0, torch.arange(64)))
    assert seen["mask"].all()
    assert (seen["told"] == LENGTHS - 1).all()


def test_dropout_is_of_training_alone() -> None:
    sizes = {"width": 32, "depth": 2, "heads": 2, "inner_width": 16, "inner_depth": 1, "nearby": NEAR["diagonals"]}
    plain, ids, text = generator("diagonals"), clips(2), words(2)
    net = GridAutoregressive(GridConfig(**sizes, dropout=0.3), VOCABULARY, GRID, TEXT)
    net.load_state_dict(plain.state_dict())
    wanted = plain(ids, text, anything(2))
    assert torch.equal(plain.train()(ids, text, anything(2)), wanted), "none is asked for"
    assert torch.equal(net.eval()(ids, text, anything(2)), wanted)
    first, second = (net.train()(ids, text, anything(2)) for _ in range(2))
    assert (first - wanted).abs().mean() > 0.01
    assert (first - second).abs().mean() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("near", ["dilated", "whole"])
def test_the_whole_network_is_one_graph(near: str) -> None:
    """What engine.cuda_graphs records: no break, no look at the host."""
    net, text, ids = generator(near, codes=2, sketch=3).train(), words(2), clips(2, codes=2)
    settle_einops()
    whole = torch.compile(net, backend="aot_eager", fullgraph=True)
    sights = net.sights(4, ids.device)
    found, wanted = (run(ids, text, anything(2), sights, ids) for run in (whole, net))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_it_is_built_on_the_meta_device() -> None:
    config = GridStageConfig(model=GridConfig(sketch_window=3))
    with torch.device("meta"):
        nets = build_nets(config, vocab_size=64_000, grid=(5, 8, 8), text_width=TEXT)
    net = nets["generator"]
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    ids = torch.zeros(2, 5, 8, 8, dtype=torch.long, device="meta")
    assert net(ids, words(2).to(ids.device), anything(2).to("meta"), sketch=ids).shape == (2, 5, 8, 8, 2, 256)


# ---- directions

MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def moving(num: int, direction: int, seed: int) -> Tensor:
    """b t h w: each frame is the one before it, moved by a cell; what comes in from outside is drawn anew."""
    down, right = list(MOVES.values())[direction]
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 4, (num, 12, 12), generator=rng)
    corners = [(4 - t * down, 4 - t * right) for t in range(3)]
    return torch.stack([wide[:, top : top + 4, left : left + 4] for top, left in corners], dim=1)


def told(directions: Tensor) -> TextStates:
    states = F.one_hot(directions, 4).float()[:, None] * 2
    return TextStates(states, torch.ones(len(directions), 1, dtype=torch.bool), states[:, 0])


def inner(grids: Tensor) -> Tensor:
    """Cells of later frames that can be told from the previous one."""
    return grids[:, 1:, 1:-1, 1:-1]


@pytest.mark.parametrize(
    "near",
    [
        NearbyConfig(frames=2, height=3, width=3), NearbyConfig(height=3, width=3, first_whole=True),
        NearbyConfig(height=3, width=3, first_whole=True, first_step=2),
    ],
    ids=["window", "first whole", "diagonals"],
)  # fmt: skip
def test_all_four_directions_are_learned_alike_and_drawn(near: NearbyConfig) -> None:
    """The last two would see all three frames of a training clip, the whole first one among them: behind them frames that do not
    see it would then be something new."""
    torch.manual_seed(0)
    model = GridConfig(width=64, depth=2, heads=2, inner_width=16, inner_depth=1, nearby=near)
    config = GridStageConfig(model=model)
    stage = build_stage(config, build_nets(config, vocab_size=4, grid=(3, 4, 4), text_width=4))
    net = stage.nets["generator"]
    assert isinstance(net, GridAutoregressive)
    optimizer, directions = torch.optim.AdamW(net.parameters(), lr=5e-3), torch.arange(4).repeat_interleave(8)
    for step in range(120):
        ids = torch.cat([moving(8, direction, seed=4 * step + direction) for direction in range(4)])
        loss = stage.turns[0].loss(stage.all_nets, batch_of(ids, told(directions)), Context(step, 0, torch.arange(32)))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    net.eval()
    right = []
    for direction in range(4):
        ids, text = moving(64, direction, seed=10**6 + direction), told(torch.full((64,), direction))
        guesses = net(ids, text, anything(64)).argmax(-1)[..., 0]
        right.append((inner(guesses) == inner(ids)).float().mean().item())
    assert min(right) > 0.95, right
    assert max(right) - min(right) < 0.05
    first = moving(16, 0, seed=10**7)[:, :1]
    for direction, (down, across) in enumerate(MOVES.values()):
        sampler = GridSampler(GridWriter(Lean(net), GridSampleConfig(guidance=1.0)))
        text = told(torch.full((16,), direction))
        ids = torch.cat(list(sampler(text, torch.arange(16), 5, known=first)), dim=1)  # longer than it was trained on
        moved = torch.roll(ids[:, :-1], (down, across), dims=(2, 3))
        assert (inner(ids) == moved[:, :, 1:-1, 1:-1]).float().mean((0, 2, 3)).min() > 0.9


def test_a_clip_is_learned_by_heart_with_several_codes() -> None:
    torch.manual_seed(0)
    config = GridStageConfig(
        model=GridConfig(width=32, depth=2, heads=2, inner_width=16, inner_depth=1, nearby=NEAR["window"]),
        loss=GridLossConfig(text_dropout_prob=0.0),
    )
    stage = build_stage(config, build_nets(config, vocab_size=VOCABULARY, grid=GRID, text_width=TEXT, codes=2))
    net, batch = stage.nets["generator"], batch_of(clips(2, codes=2), words(2))
    assert isinstance(net, GridAutoregressive)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for step in range(150):
        loss = stage.turns[0].loss(stage.all_nets, batch, Context(step, 0, batch.positions))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    sampler = GridSampler(GridWriter(Lean(net.eval()), GridSampleConfig(guidance=1.0, temperature=0)))
    assert torch.equal(torch.cat(list(sampler(words(2), torch.arange(2), 4)), dim=1), batch.ids)
