"""Nearby attention: one definition against a count by hand, and every way to carry it out against the others."""

from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tessera.config import UserError
from tessera.nn import nearby
from tessera.nn.nearby import (
    BLOCK,
    RASTER,
    Bands,
    Causal,
    Dense,
    Grid,
    NearbyAttention,
    NearbyConfig,
    Reach,
    Ring,
    block_mask,
    sight_of,
    window_of,
)
from tessera.nn.positions import rotary_turns

CPU = torch.device("cpu")
REACHES = [Reach(2, 3, 3, 1), Reach(3, 3, 5, 2), Reach(1, 5, 3, 1), Reach(9, 7, 1, 1), Reach(2, 0, 0, 1), Reach(9, 0, 0, 1)]
REACHES += [Reach(2, 3, 3, 1, RASTER), Reach(3, 3, 5, 2, RASTER), Reach(1, 3, 3, 1, RASTER)]
REACHES += [Reach(2, 3, 3, 1, 2), Reach(3, 3, 5, 2, 1), Reach(1, 3, 3, 1, 4)]
GRID = Grid(4, 3, 5)


def by_hand(reach: Reach, grid: Grid) -> Tensor:
    """n n: lists of cells instead of arithmetic on coordinates."""
    slots = list(itertools.product(range(grid.frames), range(grid.rows), range(grid.slots)))
    seen = torch.eye(len(slots), dtype=torch.bool)
    for number, (frame, row, cell) in enumerate(slots):
        if reach.first and frame == 0:
            for other, (past, above, slot) in enumerate(slots):
                turns = [(past, reach.first * above + slot, 0), (frame, reach.first * row + cell, 0)]
                if reach.first == RASTER:
                    turns = [slots[other], slots[number]]
                seen[number, other] = turns[0] <= turns[1]
            continue
        if reach.whole:
            cells = set(itertools.product(range(grid.frames), range(grid.rows), range(-1, grid.slots)))
        else:
            rows = {row + step * reach.dilation for step in range(-(reach.height // 2), reach.height // 2 + 1)}
            columns = {cell + step * reach.dilation for step in range(-(reach.width // 2), reach.width // 2 + 1)}
            cells = set(itertools.product(range(grid.frames), rows, columns))
        for other in range(number):
            past, above, slot = slots[other]
            if past > frame - reach.frames and (past, above, slot - 1) in cells:
                seen[number, other] = True
    return seen


def numbers(grid: Grid, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys and values, 2 3 n 8."""
    drawn = torch.randn(3, 2, 3, grid.size, 8, generator=torch.Generator().manual_seed(seed))
    return tuple(part.requires_grad_() for part in drawn.unbind(0))


@pytest.mark.parametrize("reach", REACHES)
def test_the_definition_is_the_count_by_hand(reach: Reach) -> None:
    sight = sight_of(reach, GRID, CPU, "dense")
    assert isinstance(sight, Dense)
    assert torch.equal(sight.mask, by_hand(reach, GRID))


@pytest.mark.parametrize("reach", REACHES)
def test_bands_and_blocks_are_the_dense_mask(reach: Reach) -> None:
    grid = Grid(5, 6, 7)
    parts = numbers(grid)
    dense = sight_of(reach, grid, CPU, "dense")(*parts)
    bands = sight_of(reach, grid, CPU, "bands")(*parts)
    torch.testing.assert_close(bands, dense, rtol=0, atol=1e-5)
    weights = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), parts) for x in (bands, dense)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    with torch.no_grad():
        blocks = sight_of(reach, grid, CPU, "blocks")(*(part.detach() for part in parts))
        torch.testing.assert_close(blocks, dense, rtol=0, atol=1e-5)
    if reach == Reach(9, 0, 0, 1):
        torch.testing.assert_close(Causal()(*parts), dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reach", REACHES)
def test_tiles_are_left_out_only_where_nothing_is_seen(reach: Reach) -> None:
    grid = Grid(7, 8, 9)  # 504 slots: the last tile is not full
    blocks, seen = block_mask(reach, grid, CPU), sight_of(reach, grid, CPU, "dense")
    assert isinstance(seen, Dense)
    tiles = torch.nn.functional.pad(seen.mask, (0, 8, 0, 8)).unflatten(1, (4, BLOCK)).unflatten(0, (4, BLOCK))
    some, inside = tiles.any(3).any(1), torch.zeros(4, 4, dtype=torch.bool)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), some)
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    for row in range(4):
        inside[row, blocks.full_kv_indices[0, 0, row, : blocks.full_kv_num_blocks[0, 0, row]].long()] = True
    assert torch.equal(inside[:3], tiles.all(3).all(1)[:3])
    assert inside.any() == (reach == Reach(9, 0, 0, 1)), "only there is a tile seen as a whole"


@pytest.mark.slow
@pytest.mark.parametrize("reach", REACHES)
def test_compiled_blocks_are_the_dense_mask(reach: Reach) -> None:
    torch.manual_seed(0)
    grid = Grid(7, 8, 9)
    layer, x = NearbyAttention(32, 2).requires_grad_(False), torch.randn(2, grid.size, 32)
    turns = rotary_turns(grid.coordinates(CPU), 16)
    with torch.no_grad():
        found = torch.compile(layer.look)(x, turns, sight_of(reach, grid, CPU, "blocks"))
        torch.testing.assert_close(found, layer.look(x, turns, sight_of(reach, grid, CPU, "dense")), rtol=0, atol=1e-5)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("gathered", [True, False])
def test_what_is_gathered_from_a_ring_is_the_dense_mask(reach: Reach, gathered: bool) -> None:
    """Frame after frame is written into a ring that holds fewer of them than the grid has; each then looks back."""
    grid, room = Grid(7, 3, 5), Grid(min(reach.frames, 3), 3, 5)
    reach = reach._replace(frames=room.frames)
    query, key, value = numbers(grid)
    dense = sight_of(reach, grid, CPU, "dense")(query, key, value)
    ring = Ring(room.frames + 1, 3, 5)
    window = window_of(reach, room, CPU) if gathered else None
    kept = torch.full((2, 2, 3, ring.size, 8), 7.0)
    with torch.no_grad():
        for frame in range(grid.frames):
            own = torch.arange(frame * grid.area, (frame + 1) * grid.area)
            slot = grid.slot(own)
            kept[:, :, :, ring.at(slot.frame, own % grid.area)] = torch.stack([key, value])[:, :, :, own]
            seen_whole = reach.first and frame == 0  # what is gathered is a window
            view = ring.view(reach, None if seen_whole else window, slot, torch.tensor([frame]), kept)
            torch.testing.assert_close(view(query[:, :, own], kept), dense[:, :, own], rtol=0, atol=1e-5)


def test_a_window_has_no_more_keys_than_it_needs() -> None:
    window = window_of(Reach(3, 3, 3, 1), Grid(3, 8, 9), CPU)
    assert window.place.shape == (72, 2 * 9 + 3 + 1), "two frames of 9, a row above, and what the slot itself holds"


def test_the_way_is_chosen_by_length_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    local, whole = Reach(2, 3, 3, 1), Reach(3, 0, 0, 1)
    assert isinstance(sight_of(whole, Grid(3, 2, 3), CPU), Causal)
    assert isinstance(sight_of(whole, Grid(4, 2, 3), CPU), Dense)
    assert isinstance(sight_of(local, Grid(2, 2, 3), CPU), Dense)
    assert isinstance(sight_of(local._replace(first=RASTER), Grid(1, 2, 3), CPU), Causal)
    assert isinstance(sight_of(local._replace(first=2), Grid(1, 2, 3), CPU), Dense)
    monkeypatch.setattr(nearby, "LONG", 20)
    assert isinstance(sight_of(local, Grid(4, 2, 3), CPU), Bands)
    assert isinstance(sight_of(local, Grid(3, 2, 3), CPU), Dense)
    assert sight_of(local, Grid(4, 2, 3), CPU) is sight_of(local, Grid(4, 2, 3), CPU)


def test_layers_take_dilations_in_turn_and_wrong_windows_are_refused() -> None:
    config = NearbyConfig(frames=2, height=3, width=5, dilation=(1, 2))
    assert [config.reach(layer).dilation for layer in range(4)] == [1, 2, 1, 2]
    assert NearbyConfig(whole=True, dilation=(1, 2)).reach(1) == NearbyConfig(whole=True).reach(0)
    with pytest.raises(ValidationError, match=r"height 4 has no middle; use 3 or 5"):
        NearbyConfig(height=4)
    with pytest.raises(ValidationError, match="1 or more"):
        NearbyConfig(dilation=(1, 0))
    for without in ({"first_whole": False}, {"first_whole": True, "whole": True}):
        assert NearbyConfig(first_step=2, **without).reach(0) == NearbyConfig(**without).reach(0), "no first frame to order"
    with pytest.raises(UserError, match="execution to auto"):
        sight_of(config.reach(0), GRID, CPU, "blocks")
