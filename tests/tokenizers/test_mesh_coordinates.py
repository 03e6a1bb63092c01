"""Exact coordinates: what may come next, against all canonical meshes of a tiny world."""

from __future__ import annotations

import itertools

import pytest
import torch

from tessera.contracts import Constraint
from tessera.tokenizers.mesh.coordinates import Coordinates, FaceOrder

BINS = 2
MOST = BINS**3 - 1
FACES = [
    (u, v, w) for u, v, w in itertools.product(range(MOST + 1), repeat=3) if u < v and u < w and v != w
]  # in lexicographic order


def tokens_of(face: tuple[int, ...]) -> list[int]:
    """The nine digits of a face."""
    return [vertex // BINS**power % BINS for vertex in face for power in (2, 1, 0)]


def allowed_after(last: tuple[int, ...] | None, begun: list[int]) -> set[int]:
    """By looking at every face that could follow: the next digits, and the end where a face would begin."""
    faces = [tokens_of(face) for face in FACES if last is None or face > last]
    found = {face[len(begun)] for face in faces if face[: len(begun)] == begun}
    return found | ({BINS} if last is not None and not begun else set())


def test_it_is_a_constraint() -> None:
    assert isinstance(Coordinates(128).constraint, Constraint)


@pytest.mark.parametrize("last", [None, *FACES])
def test_a_token_is_allowed_exactly_where_a_canonical_mesh_goes_on_with_it(last: tuple[int, ...] | None) -> None:
    order = FaceOrder(BINS)
    state, allowed = order.init(1, torch.device("cpu"))
    if last is not None:
        for token in tokens_of(last):
            assert allowed[0, token]
            state, allowed = order.step(state, torch.tensor([token]))
    stack = [(state, allowed, list[int]())]
    while stack:
        state, allowed, begun = stack.pop()
        wanted = allowed_after(last, begun)
        assert set(allowed[0].nonzero()[:, 0].tolist()) == wanted, (last, begun)
        for token in wanted - {BINS}:
            if len(begun) < 8:
                stack.append((*order.step(state, torch.tensor([token])), [*begun, token]))


def test_rows_do_not_touch_each_other_and_end_only_where_a_face_begins() -> None:
    order, generator = FaceOrder(64), torch.Generator().manual_seed(1)
    state, allowed = order.init(64, torch.device("cpu"))
    faces: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    for step in range(9 * 5):
        assert allowed[:, -1].any() == (step % 9 == 0 and step > 0)
        assert allowed.any(1).all(), "no dead end"
        ids = torch.multinomial(allowed[:, :-1].float(), 1, generator=generator)[:, 0]
        _, single_allowed = order.step(type(state)(state.last[3:4], tuple(t[3:4] for t in state.tokens)), ids[3:4])
        state, allowed = order.step(state, ids)
        assert torch.equal(single_allowed, allowed[3:4])
        tokens.append(ids)
        if len(tokens) == 9:
            faces.append(order.vertices(tokens))
            tokens = []
    found = torch.stack(faces, dim=1)  # b f 3
    for mesh in found.tolist():
        assert mesh == sorted(mesh)
        assert len({tuple(face) for face in mesh}) == len(mesh)
        assert all(face[0] < min(face[1:]) and face[1] != face[2] for face in mesh)


def test_ids_are_the_corners_themselves() -> None:
    tokenizer, corners = Coordinates(128), torch.randint(0, 128, (2, 5, 3, 3))
    assert tokenizer.group == (3, 3)
    assert tokenizer.vocab_size == 128
    assert torch.equal(tokenizer.decode(tokenizer.encode(corners)), corners)
