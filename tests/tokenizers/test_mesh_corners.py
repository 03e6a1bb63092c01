"""Which codes may follow which, beside all sequences that there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tessera.tokenizers.mesh.corners import DistinctCorners


def is_face(corners: list[tuple[int, ...]]) -> bool:
    """By hand: no corner twice; of four the last may be the third."""
    if len(corners) == 4 and corners[3] == corners[2]:
        corners = corners[:3]
    return len(set(corners)) == len(corners)


def followed(constraint: DistinctCorners, rows: Tensor, face: int) -> Tensor:
    """b: whether each token of rows (b t), the faces of a mesh but for the first `face` ones of which nothing is asked, is
    allowed after those before it."""
    state, allowed = constraint.init(len(rows), rows.device)
    right = torch.ones(len(rows), dtype=torch.bool)
    for index, token in enumerate(rows.unbind(1)):
        if index >= face * constraint.corners * len(constraint.sizes):
            right &= allowed.gather(1, token[:, None])[:, 0]
        state, allowed = constraint.step(state, token)
    return right


@pytest.mark.parametrize(
    ("corners", "sizes"), [(3, (3,)), (3, (2, 3)), (4, (4,)), (3, (2, 2)), (4, (2, 4)), (3, (1, 4))], ids=str
)
@pytest.mark.parametrize("face", [0, 1])
def test_a_face_is_allowed_exactly_if_no_corner_repeats_another(corners: int, sizes: tuple[int, ...], face: int) -> None:
    """Every sequence of tokens, as the first face and after another one."""
    tokens = list(itertools.product(*map(range, sizes * corners)))
    rows = torch.tensor([[*([0] * corners * len(sizes) * face), *row] for row in tokens])
    found = followed(DistinctCorners(corners, sizes), rows, face)
    split = [[row[c * len(sizes) : (c + 1) * len(sizes)] for c in range(corners)] for row in tokens]
    wanted = [is_face(own) or sizes[-1] < corners for own in split]
    assert found.tolist() == wanted
    if sizes[-1] >= corners:
        assert 0 < sum(wanted) < len(wanted)


def test_the_end_stands_between_faces_and_ids_are_those_of_their_place() -> None:
    constraint = DistinctCorners(3, (2, 5))
    state, allowed = constraint.init(1, torch.device("cpu"))
    places = [allowed[0].nonzero()[:, 0].tolist()]
    for token in (0, 0, 0, 1, 1, 3) * 2:
        state, allowed = constraint.step(state, torch.tensor([token]))
        places.append(allowed[0].nonzero()[:, 0].tolist())
    face = [[0, 1], [0, 1, 2, 3, 4], [0, 1], [1, 2, 3, 4], [0, 1], [0, 1, 2, 3, 4]]
    assert places == [*face, [0, 1, 5], *face[1:], [0, 1, 5]]


def test_there_is_always_something_to_go_on_with() -> None:
    for sizes in ((1,), (2,), (4, 1), (1, 3)):
        constraint = DistinctCorners(4, sizes)
        state, allowed = constraint.init(3, torch.device("cpu"))
        for _ in range(2 * 4 * len(sizes)):
            assert allowed.any(1).all()
            state, allowed = constraint.step(state, allowed.int().argmax(1))


def test_rows_do_not_see_each_other() -> None:
    constraint = DistinctCorners(3, (4,))
    together, alone = [[0, 1], [2, 2], [3, 0]], []
    state, _ = constraint.init(3, torch.device("cpu"))
    for column in zip(*together, strict=True):
        state, allowed = constraint.step(state, torch.tensor(column))
    for row in together:
        own, _ = constraint.init(1, torch.device("cpu"))
        for token in row:
            own, one = constraint.step(own, torch.tensor([token]))
        alone.append(one)
    assert torch.equal(allowed, torch.cat(alone))
