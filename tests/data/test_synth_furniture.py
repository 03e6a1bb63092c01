"""Captioned furniture: the same seed makes the same set, parts are closed and stay apart, and the oracle reads what was made."""

import hashlib
import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tessera.config.errors import UserError
from tessera.data.synth import furniture as synth
from tessera.data.synth.furniture import (
    ATTRIBUTES,
    caption,
    combinations_of,
    parse_caption,
    plan_furniture,
    sample_furniture,
    write_furniture,
)
from tessera.data.synth.furniture_meshes import build_furniture
from tessera.data.synth.furniture_oracle import oracle_accuracy, read_furniture, score
from tessera.media.meshes import Mesh
from tessera.randomness import Draws

BINS = 128
EVERY = [words for kind in ATTRIBUTES for words in combinations_of(kind)]
NAMES = {name for attributes in ATTRIBUTES.values() for name in attributes} | {"kind", "parts", "joint"}


def made(words: dict[str, str], seed: int) -> Mesh:
    return build_furniture(words, Draws(seed, EVERY.index(words)))


def to_bins(mesh: Mesh) -> np.ndarray:
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    scaled = (mesh.vertices - (low + high) / 2) / (high - low).max() * 1.9
    return np.floor((scaled + 1) / 2 * BINS).astype(np.int64)


def quantise(mesh: Mesh) -> Mesh:
    """As a model sees it: bin centres, one vertex a bin."""
    welded, index = np.unique(to_bins(mesh), axis=0, return_inverse=True)
    return Mesh((welded + 0.5) * 2 / BINS - 1, index.reshape(-1)[mesh.faces])


def pieces_of(mesh: Mesh) -> list[list[int]]:
    """Vertices of each piece, by walking from face to face."""
    faces_at: dict[int, list[list[int]]] = {}
    for face in mesh.faces.tolist():
        for vertex in face:
            faces_at.setdefault(vertex, []).append(face)
    pieces, seen = [], set()
    for start in faces_at:
        if start not in seen:
            piece, ahead = [], [start]
            seen.add(start)
            while ahead:
                vertex = ahead.pop()
                piece.append(vertex)
                fresh = {other for face in faces_at[vertex] for other in face} - seen
                seen |= fresh
                ahead += fresh
            pieces.append(sorted(piece))
    return pieces


def without(mesh: Mesh, piece: list[int]) -> Mesh:
    return Mesh(mesh.vertices, mesh.faces[~np.isin(mesh.faces, piece).any(axis=1)])


def with_piece(mesh: Mesh, other: Mesh) -> Mesh:
    return Mesh(np.concatenate([mesh.vertices, other.vertices]), np.concatenate([mesh.faces, other.faces + len(mesh.vertices)]))


def cuboid(low: tuple[float, ...], high: tuple[float, ...]) -> Mesh:
    """A box whose corner k has the high x, y, z where bits 0, 1, 2 of k are set."""
    corners = [[(low, high)[k >> axis & 1][axis] for axis in range(3)] for k in range(8)]
    sides = [(0, 2, 3, 1), (4, 5, 7, 6), (0, 1, 5, 4), (2, 6, 7, 3), (0, 4, 6, 2), (1, 3, 7, 5)]
    return Mesh(np.array(corners, np.float64), np.array([t for a, b, c, d in sides for t in ((a, b, c), (a, c, d))]))


def join(*meshes: Mesh) -> Mesh:
    whole = meshes[0]
    for mesh in meshes[1:]:
        whole = with_piece(whole, mesh)
    return whole


def test_a_chair_and_a_table_by_hand() -> None:
    """Not made by the generator: what the oracle reads are proportions."""
    legs = [cuboid((x, y, 0), (x + 5, y + 5, 45)) for x, y in ((2, 2), (43, 2), (2, 43), (43, 43))]
    seat, cushion, back = cuboid((0, 0, 45), (50, 50, 50)), cuboid((4, 4, 50), (46, 38, 54)), cuboid((3, 43, 50), (47, 47, 100))
    chair = {"kind": "chair", "width": "narrow", "legs": "four", "back": "high", "armrests": "without", "parts": "whole"}
    assert read_furniture(join(*legs, seat, cushion, back)) == chair
    assert read_furniture(join(*legs, seat, cushion)) == chair | {"back": "none"}
    assert read_furniture(join(*legs[:3], seat, cushion, back)) == chair | {"legs": "other"}
    middle = cuboid((22, 43, 0), (27, 48, 45))
    assert read_furniture(join(*legs[:2], middle, seat, cushion, back)) == chair | {"legs": "three"}
    table = {"kind": "table", "height": "high", "top": "square", "legs": "four", "shelf": "without", "parts": "whole"}
    assert read_furniture(join(*legs, seat)) == table
    assert read_furniture(join(*legs, seat, cuboid((5, 5, 15), (45, 45, 18)))) == table | {"shelf": "with"}
    assert read_furniture(join(*legs)) is None


def test_version_1_is_pinned() -> None:
    """A change of these bytes is a new version: raise VERSION, and say so to whoever compares with older sets."""
    plan, digest = plan_furniture(7), hashlib.sha256()
    for split in synth.SPLITS:
        for index in range(40):
            words, mesh = sample_furniture(plan, split, index)
            digest.update(caption(words).encode() + mesh.vertices.tobytes() + mesh.faces.tobytes())
    assert (synth.VERSION, digest.hexdigest()[:16]) == (1, "d6d57be7c7246f08")


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("few", "again", "many", "other")]
    for folder, n, seed in zip(folders, (9, 9, 24, 9), (3, 3, 3, 4), strict=True):
        write_furniture(folder, n, seed)
    contents = [{str(path.relative_to(f)): path.read_bytes() for path in f.rglob("*.*")} for f in folders]
    few, again, many, other = contents
    assert few == again
    for name in [f"train/{i:06d}.obj" for i in range(9)] + ["heldout/000000.obj"]:
        assert few[name] == many[name]
        assert few[name] != other[name]


def test_folder(tmp_path: Path) -> None:
    about = write_furniture(tmp_path / "a/b", 17, 0)
    assert json.loads((tmp_path / "a/b/synth.json").read_text()) == about
    assert (about["kind"], about["version"], about["seed"], about["n"]) == ("furniture", 1, 0, 17)
    held = {text for texts in about["heldout"].values() for text in texts}
    for split, count in (("train", 17), ("heldout", 2)):
        folder = tmp_path / "a/b" / split
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        assert [row["file_name"] for row in rows] == [f"{i:06d}.obj" for i in range(count)]
        assert len(list(folder.iterdir())) == count + 1
        for row in rows:
            assert (row["text"] in held) == (split == "heldout")
            lines = [line.split() for line in (folder / row["file_name"]).read_text().splitlines()]
            points = np.array([line[1:] for line in lines if line[0] == "v"], np.float64)
            faces = np.array([line[1:] for line in lines if line[0] == "f"], np.int64) - 1
            assert len(points) + len(faces) == len(lines)
            upright = np.stack([points[:, 0], -points[:, 2], points[:, 1]], axis=1)  # y is up in files
            assert score(Mesh(upright, faces), row["text"])["joint"]
            assert not score(Mesh(points, faces), row["text"])["joint"]
    with pytest.raises(UserError, match="nothing is overwritten"):
        write_furniture(tmp_path / "a/b", 1, 0)
    with pytest.raises(UserError, match="n is 0"):
        write_furniture(tmp_path / "c", 0, 0)
    assert {path.name for path in tmp_path.rglob("*") if path.is_dir()} == {"a", "b", "train", "heldout"}


def test_captions_parse_back() -> None:
    texts = [caption(words) for words in EVERY]
    assert len(set(texts)) == len(texts) == 176
    assert [parse_caption(text) for text in texts] == EVERY
    for text in (
        "a narrow chair with three legs, a high back and armrests",
        "a low round table with a pedestal and no lower shelf",
        "a tall lamp with a cross base and two cone shades",
        "a short lamp with a round base and one drum shade",
        "a wide shelf with five boards, a back panel and no feet",
        "a double bed with no legs, a low headboard and one pillow",
    ):
        assert text in texts
    for text in (
        "",
        "a chair",
        "a narrow chair with three legs, a high back",
        "A narrow chair with three legs, a high back and armrests",
    ):
        assert parse_caption(text) is None
        with pytest.raises(UserError, match="no caption of furniture"):
            score(made(EVERY[0], 0), text)


@pytest.mark.parametrize("seed", [0, 1, -5])
def test_held_out_combinations_stay_out(seed: int) -> None:
    plan = plan_furniture(seed)
    held = {caption(words) for kinds in plan.choices["heldout"].values() for words in kinds}
    seen = [caption(sample_furniture(plan, "train", index)[0]) for index in range(1200)]
    assert held.isdisjoint(seen)
    assert {caption(sample_furniture(plan, "heldout", index)[0]) for index in range(250)} == held
    assert len(held) == 20
    counts = Counter(text.split(" with ")[0].split()[-1] for text in seen)
    assert set(counts) == set(ATTRIBUTES)
    assert min(counts.values()) > 180  # of 240 expected, four deviations off
    for kind, attributes in ATTRIBUTES.items():  # every pair of words of a kind is trained on
        shown = plan.choices["train"][kind]
        for (a, values), (b, others) in combinations(attributes.items(), 2):
            assert {(words[a], words[b]) for words in shown} == {(x, y) for x in values for y in others}
    assert held != {caption(words) for kinds in plan_furniture(seed + 1).choices["heldout"].values() for words in kinds}


def test_parts_are_closed_and_look_outward() -> None:
    for words in EVERY:
        mesh = made(words, 1)
        assert 24 <= len(mesh.faces) <= 150
        halves = Counter((face[k], face[(k + 1) % 3]) for face in mesh.faces.tolist() for k in range(3))
        assert set(halves.values()) == {1}
        assert all((b, a) in halves for a, b in halves), caption(words)
        for piece in pieces_of(mesh):
            corners = mesh.vertices[mesh.faces[np.isin(mesh.faces[:, 0], piece)]]
            corners = corners - mesh.vertices[piece].mean(axis=0)  # f 3 3
            volumes = np.linalg.det(corners) / 6  # of the tetrahedra to the middle: all positive where a part is convex
            assert volumes.min() > 0, caption(words)
        assert mesh.vertices[:, 2].min() == 0


def test_welding_by_bin_joins_no_parts() -> None:
    for words in EVERY:
        for seed in range(3):
            mesh = made(words, seed)
            bins, owner = to_bins(mesh), np.zeros(len(mesh.vertices), np.int64)
            assert bins.min() >= 0
            assert bins.max() < BINS
            for index, piece in enumerate(pieces_of(mesh)):
                owner[piece] = index
                assert np.ptp(bins[piece], axis=0).min() >= 4, caption(words)
            apart = np.abs(bins[:, None] - bins[None]).max(axis=2)
            assert apart[owner[:, None] != owner[None]].min() >= 3, caption(words)
            assert (apart + 9 * np.eye(len(bins))).min() >= 3


def test_no_two_meshes_are_equal() -> None:
    plan = plan_furniture(5)
    seen = {quantise(sample_furniture(plan, "train", index)[1]).vertices.tobytes() for index in range(500)}
    assert len(seen) == 500


@pytest.mark.parametrize("see", [lambda mesh: mesh, quantise], ids=["exact", "quantised"])
def test_oracle_reads_what_was_made(see) -> None:
    plan = plan_furniture(11)
    samples = [sample_furniture(plan, "train", index) for index in range(250)]
    samples += [sample_furniture(plan, "heldout", index) for index in range(80)]
    samples += [(words, made(words, 2)) for words in EVERY]
    accuracy = oracle_accuracy([see(mesh) for _, mesh in samples], [caption(words) for words, _ in samples])
    assert accuracy == dict.fromkeys(NAMES, 1.0)


def test_one_wrong_word_is_noticed() -> None:
    """A mesh of other words than asked for fails in these, and in these only."""
    for index, words in enumerate(EVERY[::3]):
        for name, values in ATTRIBUTES[words["kind"]].items():
            for value in values:
                if value != words[name]:
                    verdict = score(quantise(made(words | {name: value}, index)), caption(words))
                    assert {wrong for wrong, right in verdict.items() if not right} == {name, "joint"}, (caption(words), value)


def test_another_kind_is_wrong_in_everything() -> None:
    for index, words in enumerate(EVERY[::7]):
        for kind in ATTRIBUTES:
            if kind != words["kind"]:
                other = combinations_of(kind)[index % 32]
                assert not any(score(made(words, index), other).values())


def test_a_part_less_or_more_is_noticed() -> None:
    box = cuboid((0, 0, 0), (0.1, 0.1, 0.1))
    for index, words in enumerate(EVERY):
        mesh = quantise(made(words, index))
        pieces = pieces_of(mesh)
        for piece in pieces[index % 2 :: 2]:
            assert not score(without(mesh, piece), words)["joint"], caption(words)
        corner = mesh.vertices[pieces[-1]].max(axis=0)
        for spot in (mesh.vertices.max(axis=0) + 0.01, corner, corner - 0.03):  # beside the mesh, welded to it, stuck in it
            assert not score(with_piece(mesh, Mesh(box.vertices + spot, box.faces)), words)["joint"], caption(words)
        triangle = Mesh(mesh.vertices[:3] * 0.5 + 0.01, np.array([[0, 1, 2]]))
        assert not score(with_piece(mesh, triangle), words)["parts"]


def test_small_damage_is_forgiven() -> None:
    rng = np.random.default_rng(0)
    for index, words in enumerate(EVERY):
        mesh = quantise(made(words, index))
        assert score(Mesh(mesh.vertices, np.delete(mesh.faces, rng.integers(len(mesh.faces)), axis=0)), words)["joint"]
        moved = mesh.vertices.copy()
        moved[rng.integers(len(moved))] += rng.integers(-1, 2, 3) * 2 / BINS
        assert score(Mesh(moved, mesh.faces), words)["joint"], caption(words)
        torn = mesh.faces.copy()  # one corner of one face a bin off: a crack
        torn[rng.integers(len(torn)), 0] = len(mesh.vertices)
        spot = mesh.vertices[mesh.faces[(torn == len(mesh.vertices)).any(axis=1)][0, 0]]
        assert score(Mesh(np.concatenate([mesh.vertices, [spot + 2 / BINS]]), torn), words)["joint"]


def test_a_part_full_of_holes_is_no_part() -> None:
    words = EVERY[0]
    mesh = made(words, 0)
    leg = np.flatnonzero(np.isin(mesh.faces[:, 0], pieces_of(mesh)[0]))
    open_leg = read_furniture(Mesh(mesh.vertices, np.delete(mesh.faces, leg[::2], axis=0)))
    assert open_leg is not None
    assert (open_leg["legs"], open_leg["parts"]) == ("other", "other")


def test_size_place_turn_and_repeated_vertices_do_not_matter() -> None:
    for index, words in enumerate(EVERY[::2]):
        mesh = made(words, index)
        for turn in range(4):
            x, y = (-1.0, 0.0, 1.0, 0.0)[turn], (0.0, 1.0, 0.0, -1.0)[turn]
            turned = mesh.vertices @ np.array([[x, y, 0], [-y, x, 0], [0, 0, 1]]) * (3.0, 3.0, 3.0) + (5, -70, 2)
            assert score(Mesh(turned, mesh.faces), words)["joint"], (caption(words), turn)
        soup = Mesh(mesh.vertices[mesh.faces].reshape(-1, 3), np.arange(mesh.faces.size).reshape(-1, 3))
        assert score(soup, words)["joint"]


def test_mild_axis_scales_keep_the_words() -> None:
    """Augmentation may stretch each axis by a tenth."""
    rng = np.random.default_rng(1)
    for index, words in enumerate(EVERY):
        mesh = made(words, index + 7)
        assert score(quantise(Mesh(mesh.vertices * rng.choice([0.9, 1.1], 3), mesh.faces)), words)["joint"], caption(words)


def test_strange_meshes_are_no_furniture() -> None:
    rng = np.random.default_rng(0)
    nothing = Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))
    faces = rng.integers(0, 60, (100, 3))
    broken = made(EVERY[0], 0)
    infinite = Mesh(np.where(broken.vertices > 0.3, np.inf, broken.vertices), broken.faces)
    flat = Mesh(broken.vertices * (1.0, 1.0, 0.0), broken.faces)
    point = Mesh(np.zeros((3, 3)), np.array([[0, 1, 2]]))
    scattered = Mesh(rng.normal(0, 1, (300, 3)), np.arange(300).reshape(100, 3))
    level = with_piece(cuboid((0, 0, 0), (1, 1, 1)), Mesh(np.eye(3) * (1, 1, 0) + (0, 0, 2), np.array([[0, 1, 2], [2, 1, 0]])))
    for mesh in (nothing, Mesh(rng.normal(0, 1, (60, 3)), faces), infinite, flat, point, scattered, level):
        assert read_furniture(mesh) is None
        assert not any(score(mesh, EVERY[0]).values())


def test_trimesh_agrees_about_the_files(tmp_path: Path) -> None:
    trimesh = pytest.importorskip("trimesh")
    write_furniture(tmp_path / "set", 12, 9)
    for path in sorted((tmp_path / "set/train").glob("*.obj")):
        loaded = trimesh.load(path, process=False)
        assert loaded.is_watertight
        assert loaded.is_winding_consistent
        assert loaded.volume > 0
        assert loaded.bounds[0][1] == 0
