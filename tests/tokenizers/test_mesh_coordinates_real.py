"""Real and made meshes as coordinates: nothing is lost, and each is a mesh that the constraint allows, token by token."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from tessera.data.canonical import quantise, standardise
from tessera.data.synth.furniture import plan_furniture, sample_furniture
from tessera.media.meshes import Mesh, read_mesh
from tessera.tokenizers.mesh.coordinates import FACE, Begun, Coordinates

BINS = 128
REAL_DATA = os.environ.get("TESSERA_REAL_DATA")
Triangle = tuple[tuple[int, ...], ...]


def by_hand(mesh: Mesh) -> list[Triangle]:
    """Faces in bins, each from its lowest corner on, sorted and without those that are none."""
    found = set()
    for face in mesh.faces:
        corners = [tuple(min(BINS - 1, math.floor((c + 1) * BINS / 2)) for c in mesh.vertices[v][::-1].tolist()) for v in face]
        first = corners.index(min(corners))
        if len(set(corners)) == 3:
            found.add(tuple(corners[first:] + corners[:first]))
    return sorted(found)


def check(meshes: list[Mesh]) -> int:
    """All faces of a mesh go through the constraint at once: its state is the face before."""
    tokens, order, checked = Coordinates(BINS), Coordinates(BINS).constraint, 0
    for mesh in (standardise(mesh)[0] for mesh in meshes):
        corners = torch.from_numpy(quantise(mesh, BINS))
        ids = tokens.encode(corners[None])
        assert torch.equal(tokens.decode(ids)[0], corners)
        assert [tuple(map(tuple, face)) for face in corners.tolist()] == by_hand(mesh)
        numbers = corners @ torch.tensor([BINS * BINS, BINS, 1])
        start, _ = order.init(1, corners.device)
        state = Begun(torch.cat([start.last, numbers[:-1]]), ())
        allowed = order.allowed(state)
        for token in ids[0].unbind(1):
            assert allowed.gather(1, token[:, None]).all()
            state, allowed = order.step(state, token)
        assert torch.equal(state.last, numbers)
        assert allowed[:, BINS].all()  # a mesh may end after each face
        checked += FACE * len(corners)
    return checked


def test_furniture_is_allowed() -> None:
    plan = plan_furniture(0)
    assert check([sample_furniture(plan, "train", index)[1] for index in range(100)]) > 100 * 12 * FACE


def test_a_face_out_of_order_is_not() -> None:
    """The check above can fail."""
    order = Coordinates(BINS).constraint
    last, token = torch.tensor([[5 * BINS**2, 6 * BINS**2, 7 * BINS**2]]), torch.tensor([4])
    assert not order.allowed(Begun(last, ()))[0, token].any()


@pytest.mark.skipif(REAL_DATA is None, reason="set TESSERA_REAL_DATA")
def test_every_real_mesh_is_allowed() -> None:
    paths = sorted(Path(str(REAL_DATA), "lowpoly").rglob("*.obj"))
    assert len(paths) > 400
    assert check([read_mesh(path).mesh for path in paths]) > len(paths) * 12 * FACE
