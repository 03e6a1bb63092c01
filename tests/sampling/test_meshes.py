"""`tessera sample` and the session on meshes: files by contract, the same mesh again, parts to go on with, wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera import pipeline
from tessera.config import UserError
from tessera.contracts import Chunk
from tessera.data.canonical import quantise, to_mesh
from tessera.data.synth.furniture import write_furniture
from tessera.generators.autoregressive.sample import Writer
from tessera.media.mesh_files import encode_obj
from tessera.media.meshes import Mesh, read_mesh
from tessera.sampling.package import export_run
from tessera.sampling.session import Session, load
from tests.cli.conftest import tessera
from tests.small import generated, pictures, workshop

__all__ = ["generated", "pictures", "tessera", "workshop"]

Run = Callable[..., Any]
BINS = 32
KINDS = ("coordinates", "graph")
SUFFIXES = (".glb", ".obj", ".ply", ".png", ".gif", ".json")
SETS = {
    "engine.device": "cpu",
    "engine.log_every_steps": "2",
    "engine.validate_every_steps": "4",
    "engine.preview_every_steps": "4",
    "engine.preview_samples": "1",
    "engine.save_every_steps": "4",
    "data.validation_fraction": "0.2",
    "data.bins": str(BINS),
    "text": "{kind: bytes, length: 64, width: 16, depth: 1, heads: 2}",
    "base.batch_size": "4",
    "base.model": "{width: 32, depth: 1, heads: 2, inner_width: 16, inner_depth: 1}",
    "base.optim": "{lr: 1.0e-2, warmup_steps: 0}",
    "base.ema_decay": "0.5",
    "sample.max_faces": "20",
    "sample.chunk": "4",
    "sample.temperature": "0.7",
    "sample.guidance": "2",
}
GRAPH = {
    "tokenizer.kind": "graph",
    "tokenizer.batch_size": "4",
    "tokenizer.optim": "{lr: 3.0e-3, warmup_steps: 0}",
    "tokenizer.model": "{coordinate_width: 8, encoder_width: 32, encoder_layers: 1, decoder_width: 32, decoder_blocks: 1, "
    "heads: 2, quantizer: {num_quantizers: 2, quantizer: {kind: fsq, levels: [8, 8, 8, 8, 5]}}}",  # of two digits
}


def config_of(data: Path, kind: str = "coordinates", *, steps: int = 4, **changes: str) -> Any:
    """Of a small run; double underscores stand for dots."""
    own = {name.replace("__", "."): value for name, value in changes.items()}
    values = SETS | (GRAPH if kind == "graph" else {}) | own
    sets = [f"{name}={value}" for name, value in values.items()]
    return pipeline.resolve("meshgpt", preset="tiny", data=str(data), steps=steps, sets=sets)


@pytest.fixture(scope="module")
def furniture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("meshes") / "data"
    write_furniture(path, 24, 0)
    return path / "train"


@pytest.fixture(scope="module")
def runs(furniture: Path) -> dict[str, Path]:
    """A run of each tokenizer."""
    return {kind: pipeline.train(config_of(furniture, kind), run=furniture.parent.parent / kind) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


@pytest.fixture(scope="module")
def exact(runs: dict[str, Path]) -> Session:
    return load(runs["coordinates"], device="cpu")


def same(first: Sequence[Mesh], second: Sequence[Mesh]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(a.vertices, b.vertices) and np.array_equal(a.faces, b.faces) for a, b in zip(first, second, strict=True)
    )


def box(low: Sequence[float], high: Sequence[float]) -> Mesh:
    """Twelve triangles, their corners counter-clockwise seen from outside."""
    places = np.array([[x, y, z] for x in (low[0], high[0]) for y in (low[1], high[1]) for z in (low[2], high[2])])
    squares = [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    return Mesh(places, np.array([[s[0], s[i], s[i + 1]] for s in squares for i in (1, 2)]))


def joined(*parts: Mesh) -> Mesh:
    starts = np.cumsum([0, *(len(part.vertices) for part in parts)])
    faces = [part.faces + start for part, start in zip(parts, starts, strict=False)]
    return Mesh(np.concatenate([part.vertices for part in parts]), np.concatenate(faces))


PART = box((-0.9, -0.9, -0.95), (-0.5, -0.5, -0.5))


# ---- files, and again


def test_files_by_contract_and_their_json_draws_them_again(tessera: Run, run: Path, tmp_path: Path) -> None:
    warm = ("--set", "sample.temperature=1")  # cooler, an untrained model draws one mesh from both prompts
    ended = tessera("sample", run, "a chair", "a table", "-n", 2, "--seed", 5, "--out", "out", *warm)
    assert ended.code == 0, ended.err
    names = ["0-0", "0-1", "1-0", "1-1"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == sorted(f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    assert files["0-0.glb"][:4] == b"glTF"
    assert files["0-0.png"][:4] == b"\x89PNG"
    assert files["0-0.gif"][:4] == b"GIF8"
    assert len({files[f"{name}.obj"] for name in names}) == 4  # each its own
    facts = json.loads(files["1-1.json"])
    assert (facts["prompt"], facts["seed"], facts["n"]) == ("a table", 6, 1)
    assert tessera("sample", run, "--request", "out/1-1.json", "--out", "again").code == 0
    for suffix in SUFFIXES:
        assert (tmp_path / "again" / f"0{suffix}").read_bytes() == files[f"1-1{suffix}"]
    assert tessera("sample", run, "a chair", "-n", 2, "--out", "out").code == 2  # nothing is drawn over


def test_files_hold_what_the_session_draws(tessera: Run, exact: Session, tmp_path: Path) -> None:
    assert tessera("sample", exact.path, "a chair", "--out", "out").code == 0
    (drawn,) = exact.sample("a chair")
    assert 1 <= len(drawn.faces) <= 20
    for suffix in (".glb", ".obj", ".ply"):
        found = quantise(read_mesh(tmp_path / "out" / f"0{suffix}").mesh, BINS)
        assert np.array_equal(found, quantise(drawn, BINS))
    assert same([to_mesh(quantise(drawn, BINS), BINS)], [drawn])  # in canonical order already


@pytest.mark.parametrize("options", [{"leave": False}, {"leave": True}, {"leave": False, "guidance": 1.0}], ids=str)
def test_a_mesh_depends_on_its_own_request_alone(session: Session, options: dict[str, Any]) -> None:
    prompts = ["a chair", "a round table", "", "a bed", "une étagère", "a lamp"]
    together = session.sample(prompts, 2, seed=3, options=options)
    assert len(together) == 12
    assert same(session.sample("une étagère", seed=4, options=options), together[9:10])
    assert same(session.sample(["a bed", "a chair"], seed=3, options=options), [together[6], together[0]])


def test_no_more_rows_are_drawn_than_are_asked_for(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    step, rows = Writer.step_once, list[int]()
    monkeypatch.setattr(Writer, "step_once", lambda *parts: rows.append(len(parts[2].ended)) or step(*parts))
    for num, leave, expected in ((1, True, 1), (2, True, 2), (3, True, 4), (2, False, 4)):
        rows.clear()
        session.sample("a chair", num, options={"leave": leave})
        assert rows[0] == expected


def test_an_export_draws_the_same(session: Session, run: Path, tmp_path: Path) -> None:
    model = load(export_run(run, tmp_path / "model"), device="cpu")
    assert same(model.sample(["a chair", "a bed"]), session.sample(["a chair", "a bed"]))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "encode_glb(mesh)" in card
    assert "model.encode" not in card


def test_more_than_the_first_buffer_holds(runs: dict[str, Path]) -> None:
    """Samples of over a hundred faces, while others leave the batch."""
    draw: Any = load(runs["graph"], device="cpu").draw
    drawn = {}
    for leave in (True, False):
        options = draw.config.sample.model_copy(update={"max_faces": 150, "leave": leave})
        drawn[leave] = draw.draw(Chunk(["a chair"] * 8, torch.arange(8), options), options)
    (ids, faces), (others, wanted) = drawn[True], drawn[False]
    assert faces.min() < 64 < 128 < faces.max()
    assert torch.equal(faces, wanted)
    assert all(torch.equal(a[:count], b[:count]) for a, b, count in zip(ids, others, faces.tolist(), strict=True))


CHANGES = [{"options": {name: value}} for name, value in (
    ("temperature", 0.0), ("temperature", 2.0), ("top_k", 1), ("top_p", 0.1), ("min_share", 0.99), ("guidance", 1.0),
    ("guidance", 9.0), ("faces", 3),
)]  # fmt: skip


@pytest.mark.parametrize("asked", [*CHANGES, {"negative": "a bed"}], ids=str)
def test_all_that_is_asked_is_heard(exact: Session, asked: dict[str, Any]) -> None:
    assert not same(exact.sample("a chair", 4, **asked), exact.sample("a chair", 4))


def test_faces_that_are_asked_for_reach_the_net(exact: Session) -> None:
    seen: list[list[int]] = []
    generator: Any = exact.nets["base"]["generator"]
    hook = generator.lengths.register_forward_pre_hook(lambda net, given: seen.append(given[0].tolist()))
    for faces in (0, 8, 32):
        exact.sample("a chair", options={"faces": faces, "max_faces": 1, "guidance": 1.0})
    hook.remove()
    assert seen == [[64] * 4, [12] * 4, [20] * 4], "quarters of an octave; the last one stands for any"


# ---- a part


def test_a_part_stays_as_the_first_faces(tessera: Run, runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "part.obj").write_bytes(encode_obj(PART))
    (tmp_path / "asked" / "r.yaml").write_text("prompt: a chair\nmesh: part.obj\nn: 2\n")
    assert tessera("sample", runs["coordinates"], "--request", "asked/r.yaml", "--out", "out").code == 0
    corners = quantise(PART, BINS)
    for name in ("0-0", "0-1"):
        whole = quantise(read_mesh(tmp_path / "out" / f"{name}.glb").mesh, BINS)
        assert np.array_equal(whole[:12], corners)
        assert len(whole) > 12
    named = tessera("sample", runs["coordinates"], "a chair", "-n", 2, "--mesh", "asked/part.obj", "--out", "named")
    assert named.code == 0, named.err
    assert (tmp_path / "named" / "0-1.glb").read_bytes() == (tmp_path / "out" / "0-1.glb").read_bytes()
    again = tessera("sample", runs["coordinates"], "--request", "out/0-1.json", "--out", "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again" / "0.glb").read_bytes() == (tmp_path / "out" / "0-1.glb").read_bytes()


def test_a_part_alone_and_among_others(session: Session) -> None:
    options = {"leave": False}
    together = session.sample("a chair", 6, mesh=PART, options=options)
    assert same(session.sample("a chair", seed=5, mesh=PART, options=options), together[5:])
    assert not same(session.sample("a chair", options=options), together[:1])


def test_a_part_larger_than_the_first_buffer(exact: Session) -> None:
    part = joined(*(box((-0.9, -0.9 + i / 4, -0.95), (-0.8, -0.8 + i / 4, -0.5)) for i in range(7)))
    for mesh in exact.sample("a chair", 3, mesh=part, options={"max_faces": 100}):
        assert np.array_equal(quantise(mesh, BINS)[:84], quantise(part, BINS))


def test_a_part_that_is_as_large_as_it_may_be(exact: Session) -> None:
    (whole,) = exact.sample("a chair", mesh=PART, options={"max_faces": 12})
    assert np.array_equal(quantise(whole, BINS), quantise(PART, BINS))


# ---- wrong input


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"mesh": PART, "options": {"max_faces": 11}}, "12 faces.*sample.max_faces"),
        ({"mesh": Mesh(PART.vertices * 3, PART.faces)}, r"\[-1, 1\]"),
        ({"mesh": Mesh(PART.vertices * np.nan, PART.faces)}, "a vertex is not finite"),
        ({"mesh": Mesh(PART.vertices / 1000, PART.faces)}, "no triangle"),
        ({"mesh": Mesh(np.zeros((0, 3)), np.zeros((0, 3), np.int64))}, "no triangle"),
        ({"mesh": Mesh(PART.vertices, PART.faces + 5)}, r"a face names vertex 8 \(counted from 0\); there are 8"),
        ({"mesh": Mesh(PART.vertices, PART.faces + 0.0)}, r"faces \[12, 3\] of float64; expected .* m x 3 whole numbers"),
        ({"mesh": Mesh([[0, 0], [1]], PART.faces)}, "expected vertices, n x 3 numbers"),  # type: ignore[arg-type]
        ({"mesh": Mesh(PART.vertices[:, :2], PART.faces)}, r"vertices \[8, 2\] and"),
        ({"mesh": 5}, "expected a file or a Mesh"),
        ({"mesh": "nowhere.obj"}, "^nowhere.obj: no such file or directory$"),
        ({"mesh": "cat.png"}, "^cat.png: .png; expected one of .obj .glb .gltf .ply .stl .off$"),
        ({"image": np.zeros((8, 8, 3), np.uint8)}, "meshes"),
        ({"options": {"max_faces": 0}}, r"sample.max_faces \(options\): found 0"),
        ({"options": {"max_faces": 10**9}}, "sample.max_faces"),
        ({"options": {"faces": -1}}, r"sample.faces \(options\): found -1"),
        ({"options": {"faces": 10**9}}, "sample.faces"),
        ({"options": {"steps": 3}}, r"sample.steps \(options\): unknown key"),
        ({"negative": "a bed", "options": {"guidance": 1.0}}, "guidance 1 is none"),
    ],
)
def test_a_wrong_request_is_told(exact: Session, call: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        exact.sample("a chair", **call)


def test_wrong_calls_end_with_2(tessera: Run, runs: dict[str, Path], generated: Path, tmp_path: Path) -> None:
    (tmp_path / "part.obj").write_bytes(encode_obj(PART))
    (tmp_path / "far.obj").write_bytes(encode_obj(Mesh(PART.vertices * 3, PART.faces)))
    (tmp_path / "bad.glb").write_bytes(b"no mesh at all")
    for name in ("part.obj", "far.obj", "bad.glb", "gone.ply"):
        (tmp_path / f"{name}.yaml").write_text(f"prompt: a\nmesh: {name}\n")
    mesh = runs["coordinates"]
    calls: list[tuple[list[object], str]] = [
        ([generated, "--request", "part.obj.yaml"], "muse draws pictures; mesh is for meshes"),
        ([mesh, "--request", "far.obj.yaml"], "[-1, 1]"),
        ([mesh, "--request", "bad.glb.yaml"], "bad.glb"),
        ([mesh, "--request", "gone.ply.yaml"], "gone.ply"),
        ([mesh, "--request", "part.obj.yaml", "--set", "sample.max_faces=11"], "sample.max_faces"),
        ([mesh, "a", "--image", "part.obj"], "meshes"),
        ([mesh, "a", "--mask", "part.obj"], "without an image"),
        ([mesh, "a", "--steps", "3"], "--steps does not apply to this model (meshgpt)"),
        ([mesh, "a", "--set", "sample.max_faces=0"], "sample.max_faces"),
    ]
    for call, said in calls:
        ended = tessera("sample", *call, "--out", "out")
        assert (ended.code, said in ended.err) == (2, True), (call, ended)
        assert len(ended.err.strip().splitlines()) <= 4
    assert not (tmp_path / "out").exists()


def test_calls_about_pictures_are_refused(session: Session) -> None:
    for call in (session.encode, session.reconstruct, session.decode):
        with pytest.raises(UserError, match="meshes"):
            call(np.zeros((1, 4, 4), np.int64))  # type: ignore[operator]
    with pytest.raises(UserError, match="meshes"):
        _ = session.resolution


def test_nothing_is_drawn_without_a_generator(furniture: Path, tmp_path: Path) -> None:
    run = pipeline.train(config_of(furniture, "graph", steps=1), run=tmp_path / "run", stage="tokenizer")
    with pytest.raises(UserError, match="stage base has not been trained yet"):
        load(run, device="cpu").sample("a chair")


# ---- other configs


def test_a_tokenizer_from_another_run(runs: dict[str, Path], furniture: Path, tmp_path: Path) -> None:
    origin = str(runs["graph"] / "tokenizer")
    config = config_of(furniture, base__needs__tokenizer=origin)
    session = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    (mesh,) = session.sample("a chair")
    assert len(mesh.vertices) <= 3 * 20
    assert same(load(export_run(tmp_path / "run", tmp_path / "model"), device="cpu").sample("a chair"), [mesh])
    wrong = {"bins": config_of(furniture, base__needs__tokenizer=origin, data__bins="64")}
    wrong["kind"] = config_of(furniture, base__needs__tokenizer=str(runs["coordinates"] / "base"))
    for name, said in (
        ("bins", "was trained with data.bins=32, here it is 64"),
        ("kind", "is a stage of another kind; expected RUN/tokenizer"),
    ):
        with pytest.raises(UserError, match=said):
            pipeline.train(wrong[name], run=tmp_path / name)


@pytest.mark.parametrize(("text", "prompts"), [("{kind: none}", ("", "")), ("{kind: classes}", ("flat", "tall"))])
def test_other_kinds_of_text(text: str, prompts: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for index in range(12):
        name, side = ("flat", "tall")[index % 2], 0.2 + index / 20
        mesh = box((-1, -side, -0.1), (1, side, 0.1)) if name == "flat" else box((-0.1, -side, -1), (0.1, side, 1))
        (tmp_path / "data" / f"{index}.obj").write_bytes(encode_obj(mesh))
        (tmp_path / "data" / f"{index}.txt").write_text(name)
    config = config_of(tmp_path / "data", steps=2, text=text, engine__preview_every_steps="9")
    session = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    first, second = session.sample(prompts[0]) + session.sample(prompts[1], seed=1)
    assert min(len(first.faces), len(second.faces)) >= 1
    assert not same([first], [second])
    if "classes" in text:
        with pytest.raises(UserError, match="'round' is not a class of this model"):
            session.sample("round")


def test_no_mesh_is_small_enough(furniture: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of the 24 meshes can be used: .*more than data.max_faces=3; raise it"):
        pipeline.train(config_of(furniture, data__max_faces="3"), run=tmp_path / "run")
