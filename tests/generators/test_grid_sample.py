"""Drawing clips: a cache in a ring is the whole network, every order draws the same clips, and guidance has its two branches."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tessera.batches import TextStates
from tessera.generators.autoregressive.grid_model import GridAutoregressive, GridConfig
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter, plans_of
from tessera.generators.autoregressive.grid_schedule import Schedule, sequential, wavefront
from tessera.nn.nearby import Grid, NearbyConfig, Window, window_of
from tessera.recording import Lean, mapped, shapes_of
from tests.generators.grid_toys import CPU, NEAR, VOCABULARY, anything, arranged, clips, drawn, generator, rows, watched, words

CASES = [
    ("window", "wavefront", None), ("window", "sequential", 2), ("wide", "wavefront", 2), ("dilated", "wavefront", None),
    ("dilated", "sequential", None), ("whole", "sequential", 2), ("first", "wavefront", None), ("first", "sequential", 2),
    ("first, dilated", "wavefront", 2), ("diagonals", "wavefront", 2), ("diagonals", "sequential", None),
    ("diagonals, dilated", "wavefront", None),
]  # fmt: skip


@pytest.mark.parametrize(("near", "order", "codes"), CASES)
def test_a_ring_is_the_whole_network_and_both_branches_are_what_they_should_be(near: str, order: str, codes: int | None) -> None:
    """Longer than the grid of training. Without cache, schedule and joint batch: one forward pass with the text, another one
    without."""
    net, text, seeds, frames = generator(near, codes), words(2), torch.tensor([5, 6]), 7
    ids, logits = watched(net, text, seeds, frames, order=order, guidance=2.5, temperature=0.7)
    with_text = net(ids, text, anything(2)).detach()
    none = TextStates(torch.randn(2, 1, 12), torch.zeros(2, 1, dtype=torch.bool), torch.zeros(2, 12))
    without = net(ids, none, anything(2)).detach()
    torch.testing.assert_close(logits[:2], with_text, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[2:], without, rtol=0, atol=1e-5)
    assert (with_text - without).abs().mean() > 0.01
    greedy, logits = watched(net, text, seeds, frames, order=order, guidance=2.5, temperature=0)
    guided = logits[2:] + 2.5 * (logits[:2] - logits[2:])
    assert torch.equal(greedy.view(guided.shape[:-1]), guided.argmax(-1))
    greedy, logits = watched(net, text, seeds, frames, order=order, guidance=9.0, temperature=0, min_share=0.7)
    sure, guided = logits[:2].softmax(-1), logits[2:] + 9.0 * (logits[:2] - logits[2:])
    plausible = guided.masked_fill(sure < 0.7 * sure.amax(-1, keepdim=True), -torch.inf)
    assert torch.equal(greedy.view(guided.shape[:-1]), plausible.argmax(-1))
    assert not torch.equal(plausible.argmax(-1), guided.argmax(-1))


@pytest.mark.parametrize(
    ("near", "codes", "guidance"),
    [("window", None, 1.0), ("wide", None, 2.0), ("dilated", 2, 2.0), ("first", None, 2.0), ("diagonals", None, 2.0)],
)
def test_a_wavefront_draws_what_one_cell_after_another_draws(near: str, codes: int | None, guidance: float) -> None:
    net, text, seeds = generator(near, codes, depth=3), words(3), torch.tensor([1, 2, 3])
    given = {"known": clips(3, 2, codes), "lengths": torch.tensor([0, 4, 9])}
    for more in (None, given):
        options = {"guidance": guidance, "top_p": 0.9, "top_k": 5, "min_share": 0.2}
        slow, slow_logits = watched(net, text, seeds, 6, more, order="sequential", **options)
        fast, fast_logits = watched(net, text, seeds, 6, more, order="wavefront", **options)
        torch.testing.assert_close(fast_logits, slow_logits, rtol=0, atol=1e-5)
        assert torch.equal(fast, slow)
        assert torch.equal(drawn(net, text, seeds, 6, more, **options), slow), "auto"


@pytest.mark.parametrize("near", ["window", "diagonals"])
def test_numbers_of_frames_that_are_told_are_heard_by_both_branches(near: str) -> None:
    """By quarters of an octave: 4 frames are class 8, 9 are class 12, and 64 is any number."""
    net, text, seeds, classes = generator(near), words(3), torch.tensor([1, 2, 3]), torch.tensor([64, 8, 12])
    options = {"order": "wavefront", "guidance": 2.0}
    ids, logits = watched(net, text, seeds, 4, {"lengths": torch.tensor([0, 4, 9])}, **options)
    none = text.without(torch.ones(3, dtype=torch.bool))
    for branch, read in ((logits[:3], text), (logits[3:], none)):
        torch.testing.assert_close(branch, net(ids, read, classes).detach(), rtol=0, atol=1e-5)
    assert (logits[1:3] - net(ids, text, anything(3)).detach()[1:]).abs().mean() > 0.01


def test_known_frames_stay_and_are_seen_and_negative_text_takes_the_place_of_none() -> None:
    net, text, seeds, known = generator(), words(2), torch.tensor([5, 6]), clips(2, 3)
    ids = drawn(net, text, seeds, 6, {"known": known})
    assert torch.equal(ids[:, :3], known)
    assert not torch.equal(ids[:, 3:], drawn(net, text, seeds, 6)[:, 3:])
    again = {"known": ids[:, :5]}
    assert torch.equal(drawn(net, text, seeds, 6, again), ids), "going on from one's own frames is not stopping"
    other = words(2, length=6, seed=8)
    options = {"order": "wavefront", "guidance": 3.0}
    ids, logits = watched(net, text, seeds, 4, {"negative": other}, **options)
    torch.testing.assert_close(logits[2:], net(ids, other, anything(2)).detach(), rtol=0, atol=1e-5)


def test_a_clip_depends_on_its_own_seed_and_text_alone() -> None:
    net, text, seeds = generator("dilated", codes=2), words(4), torch.tensor([9, 2, 2, 7])
    whole = drawn(net, text, seeds, 5)
    assert torch.equal(drawn(net, rows(text, [3, 1]), seeds[[3, 1]], 5), whole[[3, 1]])
    assert torch.equal(drawn(net, text, seeds, 3), whole[:, :3]), "nor on how many frames are asked for"
    same = drawn(net, rows(text, [0, 0, 0]), torch.tensor([9, 9, 8]), 5)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_draws_have_the_probabilities_of_the_network() -> None:
    """Two cells whose joint distribution is counted over many seeds; chi-squared with 48 degrees of freedom."""
    net, text, num = generator(), rows(words(1), [0] * 1500), 1500
    ids = drawn(net, text, torch.arange(num), 1, guidance=1.0)
    found = torch.bincount(ids[:, 0, 0, 0] * VOCABULARY + ids[:, 0, 0, 1], minlength=VOCABULARY**2)
    first = torch.arange(VOCABULARY)
    grid = torch.zeros(VOCABULARY, 1, *net.grid[1:], dtype=torch.long)
    grid[:, 0, 0, 0] = first
    probs = net(grid, rows(text, [0] * VOCABULARY), anything(VOCABULARY)).double().softmax(-1).detach()[:, 0, 0, :2, 0]
    wanted = num * (probs[first, 0, first][:, None] * probs[:, 1]).flatten()
    assert ((found - wanted) ** 2 / wanted).sum() < 85  # 1 in 1000 by chance


@pytest.mark.parametrize("near", ["window", "diagonals"])
def test_every_cell_of_every_frame_has_noise_of_its_own(near: str) -> None:
    """Of a network that finds all tokens equally probable tokens are noise: 2 clips of 40 frames, no two of them alike."""
    net = generator(near)
    torch.nn.init.zeros_(net.head.weight)
    ids = drawn(net, words(2), torch.tensor([5, 6]), 40, guidance=1.0)
    for same in (ids.flatten(2).flatten(0, 1), ids.flatten(2).mT.flatten(0, 1)):  # frames, and what a cell is in all frames
        assert len(same.unique(dim=0)) == len(same)
    counts = torch.bincount(ids.flatten(), minlength=VOCABULARY).double()
    assert ((counts - ids.numel() / 7) ** 2 / (ids.numel() / 7)).sum() < 22.5  # 1 in 1000 by chance, 6 degrees of freedom


@pytest.mark.parametrize(("near", "order", "codes"), CASES)
def test_passes_in_bf16_guess_what_the_whole_network_guesses_in_bf16(near: str, order: str, codes: int | None) -> None:
    """Weights are cast once, not by autocast in every pass; all tokens are given, so that rounding changes none of them."""
    net, text, ids = generator(near, codes), words(2), clips(2, 4, codes)
    lean = Lean(net, bf16=True)
    seen: list[torch.Tensor] = []
    lean.passes.head.register_forward_hook(lambda module, inputs, out: seen.append(out))
    sampler = GridSampler(GridWriter(lean, GridSampleConfig(order=order, guidance=1.0)))
    assert torch.equal(torch.cat(list(sampler(text, torch.arange(2), 4, known=ids)), dim=1), ids)
    assert {out.dtype for out in seen} == {torch.bfloat16}
    found = arranged(net, [out.float() for out in seen], 4, order)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = net(ids, text, anything(2))
    exact = net(ids, text, anything(2)).detach()
    assert (found - exact).square().mean() < 2 * (wanted - exact).square().mean() < 1e-3 * exact.square().mean()


def test_the_text_is_read_once_for_each_scene_not_in_every_pass() -> None:
    net, text, calls = generator("first"), words(2), []
    net.blocks[0].cross.key_value.register_forward_hook(lambda *_: calls.append(1))
    told(net, [(text, 2), (words(2, seed=8), 3)], torch.arange(2))
    assert len(calls) == 2


@pytest.mark.parametrize("near", ["window", "first"])
def test_memory_does_not_grow_with_a_clip(near: str) -> None:
    writer = GridWriter(Lean(generator(near)), GridSampleConfig(guidance=1.0))
    setup, _ = writer.prepare(words(1), torch.tensor([0]), None, torch.tensor([0]), None)
    assert setup.kept.shape[4] == setup.plan.ring.size == (2 * 3 * 5 if near == "first" else 4 * 3 * 5) + 1
    frames, held = 0, {}
    for ids in GridSampler(writer)(words(1), torch.tensor([0]), 60):
        frames += 1
        assert ids.shape == (1, 1, 3, 4)
        if frames in (5, 30, 60):
            held[frames] = live_bytes()
    assert frames == 60
    assert held[5] == held[30] == held[60] > 0, "whatever holds tensors while it draws"


def live_bytes() -> int:
    """Of all tensors that somebody holds; those that a compiler has left behind hold nothing."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    held = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in kinds]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def test_passes_are_recorded_for_few_numbers_of_known_frames_and_of_a_sketchs() -> None:
    writer = GridWriter(Lean(generator(sketch=3)), GridSampleConfig(guidance=2.0))
    seeds, shapes = torch.arange(2), set()
    for num in range(1, 17):
        known = clips(2, num)
        setup, state = writer.prepare(words(2), seeds, None, torch.zeros(2), known, known)
        shapes.add(shapes_of(setup, state))
    assert len(shapes) == 5, "1, 2, 4, 8 and 16"


# ---- scenes


def told(net: GridAutoregressive, scenes: list[tuple[TextStates, int]], seeds: torch.Tensor, **options: Any) -> torch.Tensor:
    given = {name: options.pop(name) for name in ("known", "negative", "sketch") if name in options}
    sampler = GridSampler(GridWriter(Lean(net), GridSampleConfig(**options)))
    return torch.cat(list(sampler.story(scenes, seeds, **given)), dim=1)


@pytest.mark.parametrize(("near", "order", "codes"), CASES)
def test_scenes_of_one_text_are_one_clip(near: str, order: str, codes: int | None) -> None:
    """The ring goes on: what was drawn ahead of a change is drawn again, the same."""
    net, text, seeds = generator(near, codes), words(2), torch.tensor([5, 6])
    whole = drawn(net, text, seeds, 9, {"known": clips(2, 1, codes)}, order=order, guidance=2.0)
    for lengths in ([1, 8], [2, 3, 4], [1, 1, 1, 6], [8, 1]):
        scenes = [(text, length) for length in lengths]
        assert torch.equal(told(net, scenes, seeds, known=clips(2, 1, codes), order=order, guidance=2.0), whole), lengths


@pytest.mark.parametrize("near", [NearbyConfig(frames=1, height=3, width=3), NearbyConfig(height=1, width=1)])
@pytest.mark.parametrize("grid", [(4, 3, 4), (1, 3, 4), (3, 1, 1)])
@pytest.mark.parametrize("first", [{}, {"first_whole": True}, {"first_whole": True, "first_step": 1}])
def test_frames_that_are_begun_in_every_pass_are_as_many_as_asked_for(
    near: NearbyConfig, grid: tuple[int, ...], first: dict[str, Any]
) -> None:
    near = near.model_copy(update=first)
    net = GridAutoregressive(GridConfig(width=32, depth=1, heads=2, inner_width=16, nearby=near), VOCABULARY, grid, 12)
    for lengths in ([4], [2, 2], [1, 3, 2]):
        ids = told(net, [(words(2), length) for length in lengths], torch.tensor([5, 6]))
        assert ids.shape == (2, sum(lengths), *grid[1:])


def test_a_text_is_read_when_its_scene_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all scenes at once would be as many as there are scenes."""
    sampler, read = GridSampler(GridWriter(Lean(generator()), GridSampleConfig())), list[float]()
    plain = GridWriter.told

    def counted(writer: GridWriter, text: TextStates, *rest: Any) -> Any:
        read.append(float(text.states[0, 0, 0]))
        return plain(writer, text, *rest)

    monkeypatch.setattr(GridWriter, "told", lambda writer, text, negative, lengths: counted(writer, text, negative, lengths))
    scenes = [(words(1, 4, seed), 2) for seed in (1, 2, 3)]
    begins = [len(read) for _ in sampler.story(scenes, torch.tensor([5]))]
    assert begins == [1, 1, 2, 2, 3, 3]
    assert read == [float(text.states[0, 0, 0]) for text, _ in scenes]


@pytest.mark.parametrize("near", ["window", "dilated", "first", "diagonals"])
def test_a_scene_sees_its_text_and_what_came_before_and_nothing_else_does(near: str) -> None:
    net, seeds, first, second, third = generator(near), torch.tensor([5, 6]), *(words(2, 4, seed) for seed in (1, 2, 3))
    ids = told(net, [(first, 3), (second, 3), (third, 2)], seeds, guidance=2.0)
    slow = told(net, [(first, 3), (second, 3), (third, 2)], seeds, guidance=2.0, order="sequential")
    assert torch.equal(ids, slow), "a wavefront changes the text where one cell after another does"
    assert torch.equal(ids[:, :3], drawn(net, first, seeds, 3, guidance=2.0))
    other = told(net, [(first, 3), (third, 3), (third, 2)], seeds, guidance=2.0)
    assert torch.equal(other[:, :3], ids[:, :3])
    assert not torch.equal(other[:, 3], ids[:, 3]), "the first frame of a scene has its text"
    before = told(net, [(third, 3), (second, 3), (third, 2)], seeds, guidance=2.0)
    assert not torch.equal(before[:, 3], ids[:, 3]), "and sees what came before"
    assert torch.equal(told(net, [(words(2, 9, 1), 3), (second, 1)], seeds)[:, :3], drawn(net, words(2, 9, 1), seeds, 3))


def test_a_first_frame_of_a_scene_has_the_logits_of_its_text() -> None:
    """By the network as a whole. With one layer and a row, what is kept of earlier frames does not hang on their text."""
    net, seeds, first, second = generator(depth=1), torch.tensor([5, 6]), words(2, 4, 1), words(2, 4, 2)
    net.pooled.weight.data.zero_()  # it would say in every row's start what the text is
    ids = told(net, [(first, 2), (second, 1)], seeds, guidance=1.0, temperature=0)
    wanted = [net(ids, text, anything(2)).argmax(-1)[..., 0] for text in (first, second)]
    assert torch.equal(ids[:, :2], wanted[0][:, :2])
    assert torch.equal(ids[:, 2], wanted[1][:, 2])
    assert not torch.equal(ids[:, 2], wanted[0][:, 2])


# ---- the order


def windows(near: NearbyConfig, rows: int, columns: int) -> tuple[list[Window], Grid]:
    grid = Grid(near.frames, rows, columns + 1)
    reaches = dict.fromkeys(near.reach(layer) for layer in range(len(near.dilation)))
    return [window_of(reach, grid, CPU) for reach in reaches], grid


def out_of_turn(schedule: Schedule, found: list[Window], grid: Grid) -> int:
    """How many pairs are seen before their turn: by loops, and on coordinates."""
    wrong = 0
    for window in found:
        for own, (backs, places, theres) in enumerate(
            zip(window.back.tolist(), window.place.tolist(), window.there.tolist(), strict=True)
        ):
            turn = schedule.frame_step * grid.frames + schedule.row_step * (own // grid.slots) + own % grid.slots
            for back, place, there in zip(backs, places, theres, strict=True):
                frame = grid.frames - back
                other = schedule.frame_step * frame + schedule.row_step * (place // grid.slots) + place % grid.slots
                wrong += there and other > turn
    return wrong


@pytest.mark.parametrize("near", [*NEAR.values(), NearbyConfig(height=7, width=3), NearbyConfig(frames=1, height=1, width=1)])
@pytest.mark.parametrize("shape", [(6, 9), (3, 4), (1, 5), (5, 1)])
def test_nothing_is_seen_before_its_turn_and_no_smaller_steps_would_do(near: NearbyConfig, shape: tuple[int, int]) -> None:
    found, grid = windows(near, *shape)
    assert out_of_turn(sequential(grid), found, grid) == 0
    fast = wavefront(found, grid)
    assert out_of_turn(fast, found, grid) == 0
    assert fast.row_step <= sequential(grid).row_step
    assert fast.frame_step <= sequential(grid).frame_step
    if fast.row_step > 0:
        assert out_of_turn(Schedule(10**6, fast.row_step - 1), found, grid) > 0
    if fast.frame_step > 1:
        assert out_of_turn(Schedule(fast.frame_step - 1, fast.row_step), found, grid) > 0


@pytest.mark.parametrize(("size", "passes"), [(3, 82), (5, 142), (7, 220)])
def test_a_clip_of_2560_cells_takes_few_passes(size: int, passes: int) -> None:
    """r + 1 passes from row to row, (r + 1)^2 from frame to frame: by hand for a radius of r."""
    found, grid = windows(NearbyConfig(frames=3, height=size, width=size), 16, 16)
    radius = size // 2
    assert wavefront(found, grid) == Schedule((radius + 1) ** 2, radius + 1)
    assert wavefront(found, grid).last(9, grid) + 1 == passes
    assert sequential(grid).last(9, grid) + 1 == 2560


def test_dilated_layers_cost_no_more_from_row_to_row() -> None:
    """Rows are as far apart as columns, so the slope stays."""
    found, grid = windows(NearbyConfig(height=3, width=3, dilation=(1, 2, 4)), 16, 16)
    assert wavefront(found, grid).row_step == 2


# ---- at the door, and on a device


def test_no_more_frames_are_seen_than_in_training() -> None:
    config = GridConfig(width=32, depth=1, heads=2, nearby=NearbyConfig(frames=50, whole=True))
    net = GridAutoregressive(config, VOCABULARY, (3, 3, 4), 12)
    assert net.reaches[0].frames == 3
    assert plans_of(net, "auto", CPU).later.ring.frames == 4


def test_what_cannot_be_drawn_is_refused() -> None:
    sampler = GridSampler(GridWriter(Lean(generator()), GridSampleConfig()))
    with pytest.raises(ValueError, match="0 frames"):
        sampler(words(1), torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="0 frames"):
        sampler.story([(words(1), 3), (words(1), 0)], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"known frames of shape \(1, 2, 3, 3\); expected \(1, 2, 3, 4\)"):
        sampler(words(1), torch.tensor([0]), 4, known=torch.zeros(1, 2, 3, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="5 known frames of 4"):
        sampler(words(1), torch.tensor([0]), 4, known=clips(1, 5))
    with pytest.raises(ValueError, match="sees whole frames"):
        plans_of(generator("whole"), "wavefront", CPU)
    first = sampler(words(1), torch.tensor([0]), 4)
    next(first)
    next(sampler(words(1), torch.tensor([0]), 4))
    with pytest.raises(RuntimeError, match="a sampler for each"):
        next(first)


@pytest.mark.parametrize("near", ["dilated", "whole", "first", "diagonals"])
@pytest.mark.parametrize("sketch", [0, 3])
def test_nothing_waits_for_the_device(near: str, sketch: int) -> None:
    net, meta = generator(near, codes=2, sketch=sketch), torch.device("meta")
    writer = GridWriter(Lean(net), GridSampleConfig(top_k=3))
    writer.made[meta] = mapped(writer.plans(CPU), lambda tensor: tensor.to(meta))
    net.to(meta)
    seeds, known = torch.zeros(2, dtype=torch.long, device=meta), torch.zeros(2, 1, 3, 4, 2, dtype=torch.long, device=meta)
    found = list(GridSampler(writer)(words(2).to(meta), seeds, 2, known=known, sketch=known if sketch else None))
    assert [ids.shape for ids in found] == [(2, 1, 3, 4, 2)] * 2


# ---- the first frame, whole


@pytest.mark.parametrize(("step", "alone"), [(0, 64), (1, 7 + 8), (2, 2 * 7 + 8), (7, 7 * 7 + 8), (8, 64), (99, 64)])
def test_a_first_frame_that_is_seen_whole_costs_its_own_passes_and_no_others(step: int, alone: int) -> None:
    """64 cells one by one, or by diagonals; one pass that shows the last of them, and of the wavefront all that comes after the
    first frame."""
    config = GridConfig(width=32, depth=1, heads=2, nearby=NearbyConfig(first_whole=True, first_step=step))
    net = GridAutoregressive(config, VOCABULARY, (5, 8, 8), 12)
    plans = plans_of(net, "auto", CPU)
    assert plans.num_passes(1) == alone
    assert plans.num_passes(5) == alone + 1 + 4 * 9 + 7 * 3 + 8 - 9
    assert plans_of(net, "sequential", CPU).num_passes(5) == alone + 1 + 4 * 64
    calls: list[int] = []
    net.head.register_forward_hook(lambda module, inputs, out: calls.append(1))
    drawn(net, words(1), torch.tensor([0]), 5, guidance=1.0)
    assert len(calls) == plans.num_passes(5)


def test_far_cells_of_a_first_frame_know_of_each_other() -> None:
    """The last cell of the first frame hangs on its first one, which a window does not reach in one layer; later frames keep
    their window."""
    for near, reached in (("window", False), ("first", True), ("diagonals", True)):
        net, text, ids = generator(near, depth=1), words(1), clips(1)
        other = ids.clone()
        other[0, 0, 0, 0] = (other[0, 0, 0, 0] + 1) % VOCABULARY
        one, two = (net(some, text, anything(1)).detach()[0] for some in (ids, other))
        assert torch.equal(one[0, 2, 3], two[0, 2, 3]) != reached
        assert torch.equal(one[1, 2, 3], two[1, 2, 3]), "a later frame sees a window of the first"
