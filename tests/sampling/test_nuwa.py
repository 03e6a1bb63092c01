"""A run of clips drawn one token after another, in use: any length, stories, going on, sketches, and what cannot be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera import pipeline
from tessera.batches import TokenBatch, num_latent, to_uint8
from tessera.config import UserError
from tessera.contracts import Context, Scene
from tessera.generators.autoregressive.grid_sample import GridSampleConfig, GridSampler, GridWriter
from tessera.media.clip_files import encode_gif, grid_gif
from tessera.media.clips import Clip, read_clip
from tessera.recipes.clips import stages
from tessera.recording import Lean
from tessera.sampling.package import export_run
from tessera.sampling.session import Session, load
from tests.cli.conftest import tessera
from tests.sampling.bars import CLIPS, bar, same, write_bars

__all__ = ["tessera"]

Run = Callable[..., Any]
SETS = CLIPS | {
    "data.sketch": "edges",
    "base.model": "{width: 32, depth: 2, heads: 2, nearby: {frames: 2, height: 3, width: 3}, sketch_window: 3}",
}
STORY = [{"prompt": "left", "frames": 9}, {"prompt": "right", "frames": 6}, {"prompt": "left", "frames": 5, "overlap": 0}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of each stage; time stride 2, so training clips are 5 steps of 4 x 4 tokens."""
    folder = tmp_path_factory.mktemp("nuwa")
    write_bars(folder / "data")
    sets = [f"{name}={value}" for name, value in SETS.items()]
    config = pipeline.resolve("nuwa", preset="tiny", data=str(folder / "data"), steps=6, sets=sets)
    return pipeline.train(config, run=folder / "run")


@pytest.fixture(scope="module")
def session(run: Path) -> Session:
    return load(run, device="cpu")


def test_previews_show_sketches_too(run: Path) -> None:
    names = {path.name for path in (run / "base" / "samples").iterdir()}
    assert {"step-000006.gif", "step-000006.png", "step-000006.json"} <= names
    heights = [
        read_clip(run / stage / "samples" / "step-000006.gif", lambda facts: [0, 1]).frames.shape[1]
        for stage in ("tokenizer", "base")
    ]
    assert heights[0] == heights[1], "both have three rows"


def test_previews_are_drawn_as_their_clips_are(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 9 and 4 frames, which are 5 and 3 latents, the first with two latents of a sketch and the second with none."""
    shown: list[Sequence[Sequence[Clip]]] = []
    monkeypatch.setattr(stages, "grid_gif", lambda rows, **more: (shown.append(rows), grid_gif(rows, **more))[1])
    nets: Any = {**session.nets["base"], "tokenizer": session.tokenizer}
    draw: Any = session.draw
    text, lengths, seeds = draw.latents.prompts(nets, ["right", "left"]), torch.tensor([5, 3]), torch.arange(2)
    ids = session.encode(bar(2, 9, 1), bar(7, 9, -1))
    batch = TokenBatch(
        ids=ids, text=text, valid=torch.ones(2, dtype=torch.bool), positions=seeds, keys=("a", "b"), captions=("right", "left"),
        lengths=lengths, sketch=ids.flip(0), sketch_lengths=torch.tensor([2, 0]),
    )  # fmt: skip
    with torch.no_grad():
        preview = stages.preview_base(session.config, {}, nets, batch, Context(0, 0, seeds))
    missing = torch.arange(5) >= torch.tensor([[2], [0]])
    sketch = ids.flip(0).masked_fill(missing[..., None, None], nets["generator"].nothing)

    def wanted(**given: Any) -> list[Clip]:
        sampler = GridSampler(GridWriter(Lean(nets["generator"]), GridSampleConfig.part_of(session.config.sample)))
        with torch.no_grad():
            frames = to_uint8(nets["tokenizer"].decode(torch.cat(list(sampler(text, seeds, 5, **given)), dim=1)))
        rows = zip(frames.permute(0, 2, 3, 4, 1).numpy(), (9, 5), strict=True)
        return [Clip(row[:length], session.config.sample.fps) for row, length in rows]

    assert len(shown[0]) == 3
    assert [[len(clip.frames) for clip in row] for row in shown[0]] == [[9, 5]] * 3
    drawn = list(shown[0][2])
    assert same(drawn, wanted(lengths=lengths, sketch=sketch))
    assert not same(drawn, wanted(sketch=sketch))
    assert not same(drawn, wanted(lengths=lengths))
    assert preview.facts["captions"] == ["right", "left"]


def test_files_by_contract_and_their_json_draws_them_again(tessera: Run, run: Path, session: Session, tmp_path: Path) -> None:
    Image.fromarray(bar(4, 1, 1)[0]).save(tmp_path / "strokes.png")
    ended = tessera(
        "sample", run, "left", "right", "--seed", 5, "--frames", 20, "--sketch", "strokes.png", "--guidance", 3, "--out", "out"
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-2] == "drawn by tokenizer step 6, base step 6: clips are 20 frames of 16 px"
    assert tessera("sample", run, "--request", "out/1.json", "--out", "again").code == 0
    for suffix in (".gif", ".png"):
        assert (tmp_path / "again" / f"0{suffix}").read_bytes() == (tmp_path / "out" / f"1{suffix}").read_bytes()
    (drawn,) = session.sample("right", seed=5, frames=20, sketch=bar(4, 1, 1)[0], options={"guidance": 3.0})
    assert drawn.frames.shape == (20, 16, 16, 3)
    assert encode_gif(drawn) == (tmp_path / "out" / "1.gif").read_bytes()


def test_a_clip_depends_on_its_own_request_alone(session: Session) -> None:
    for asked in ({"frames": 13}, {"frames": 1}, {"image": bar(3, 3, 1)}, {"negative": "left"}, {"sketch": bar(3, 9, 1)}):
        together = session.sample(["left", "right", ""], 2, seed=3, **asked)
        assert [len(clip.frames) for clip in together] == [asked.get("frames", 9)] * 6
        assert same(session.sample("right", seed=4, **asked), together[3:4]), asked
        assert not same(together[2:3], together[3:4]), "another seed"
    stories = session.sample(scenes=STORY, n=3, seed=2)
    assert [len(clip.frames) for clip in stories] == [20] * 3
    assert same(session.sample(scenes=STORY, seed=4), stories[2:])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0}, {"temperature": 1000.0}, {"top_k": 1}, {"guidance": 1.0}, {"guidance": 5.0}, {"top_p": 0.3},
        {"min_share": 0.99},
    ],
)  # fmt: skip
def test_every_option_of_the_choice_is_heard(session: Session, options: dict[str, Any]) -> None:
    assert not same(session.sample("left", options=options), session.sample("left"))


def test_both_orders_draw_the_same_clip(session: Session) -> None:
    for asked in ({"prompts": "left", "frames": 15, "sketch": bar(3, 9, 1)}, {"scenes": STORY}):
        slow, fast = (session.sample(**asked, options={"order": order}) for order in ("sequential", "wavefront"))
        assert same(slow, fast)
        assert same(slow, session.sample(**asked))


def test_what_is_longer_than_training_goes_on(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: the same beginning, and no more at once than a training clip has."""
    decoded, decode = [], session.tokenizer.decode_more  # type: ignore[attr-defined]

    def decode_more(ids: torch.Tensor, memory: Any = None) -> Any:
        frames, memory = decode(ids, memory)
        decoded.append((ids.shape[1], sum(kept.numel() for kept in memory)))
        return frames, memory

    (shorter,) = session.sample("left", frames=12, seed=1)
    monkeypatch.setattr(session.tokenizer, "decode_more", decode_more)
    (longer,) = session.sample("left", frames=50, seed=1)
    assert np.abs(longer.frames[:12].astype(int) - shorter.frames).max() <= 1, "pieces differ in the last bit"
    assert {latents for latents, _ in decoded[:-1]} == {5}
    assert len({size for _, size in decoded}) == 1


def test_scenes_change_the_text_and_go_on(session: Session) -> None:
    """9 frames are 5 latents: what they show does not know what comes; the next latent does."""

    def told(*prompts: str, cut: bool = False) -> np.ndarray[Any, Any]:
        scenes = [Scene(prompts[0], 9), Scene(prompts[1], 8, 0 if cut else None)]
        (clip,) = session.sample(scenes=scenes, seed=3, options={"guidance": 6.0})
        return clip.frames

    first, other, alone = told("left", "right"), told("left", "left"), told("right", "right")
    assert np.array_equal(first[:9], other[:9])
    assert not np.array_equal(first[9:11], other[9:11])
    assert not np.array_equal(first[9:11], alone[9:11])
    (one,) = session.sample("left", frames=17, seed=3, options={"guidance": 6.0})
    assert np.array_equal(other, one.frames), "a change to the same text is none"
    anew = told("left", "right", cut=True)
    assert np.array_equal(anew[:9], session.sample("left", frames=9, seed=3, options={"guidance": 6.0})[0].frames)
    assert np.array_equal(anew[9:], told("right", "right", cut=True)[9:]), "nothing is left of what was before a cut"
    twice = told("left", "left", cut=True)
    assert not np.array_equal(twice[9:], twice[:8]), "it has noise of its own"


def test_going_on_from_what_is_given(session: Session) -> None:
    (clip,) = session.sample("left", image=bar(3, 4, 1), frames=20)
    assert clip.frames.shape[0] == 20
    assert np.array_equal(clip.frames[:3], bar(3, 3, 1)), "the fourth is half of a token"
    (other,) = session.sample("left", image=bar(9, 4, 1), frames=20)
    assert not np.array_equal(clip.frames[5:9], other.frames[5:9])
    (keyed,) = session.sample("left", keyframes={0: bar(3, 1, 1)[0]})
    assert same([keyed], session.sample("left", image=bar(3, 1, 1)))
    (long,) = session.sample("left", image=bar(3, 31, 1), frames=40)
    assert np.array_equal(long.frames[:31], bar(3, 31, 1))
    given = [Scene("left", 6), Scene("right", 9)]
    (story,) = session.sample(scenes=given, image=bar(3, 9, 1))
    assert np.array_equal(story.frames[:9], bar(3, 9, 1)), "given frames may reach into a later scene"
    (cut,) = session.sample(scenes=[Scene("left", 6), Scene("right", 5, 0)], image=bar(3, 6, 1))
    assert np.array_equal(cut.frames[:6], bar(3, 6, 1)), "and up to a cut, where their last token ends"


def test_a_sketch_is_followed_where_it_has_frames(session: Session) -> None:
    plain, drawn, other = (session.sample("left", sketch=sketch)[0].frames for sketch in (None, bar(3, 9, 1), bar(9, 9, -1)))
    assert not np.array_equal(plain, drawn)
    assert not np.array_equal(drawn, other)
    assert not same(session.sample("left", sketch=bar(3, 9, 1)), session.sample("right", sketch=bar(3, 9, 1))), "and the text"
    short, longer = bar(3, 3, 1), np.concatenate([bar(3, 3, 1), bar(9, 6, 1)])
    one, two = (session.sample("left", sketch=sketch)[0].frames for sketch in (short, longer))
    assert np.array_equal(one[:3], two[:3])
    assert not np.array_equal(one[3:], two[3:])


def test_a_sketch_reaches_through_scenes_up_to_a_cut(session: Session) -> None:
    """6 frames, or 2 and 4 of two scenes, end within a latent, which is theirs alone."""
    strokes = bar(3, 7, 1)
    (alone,) = session.sample("left", frames=6, sketch=strokes[:6])
    assert not same(session.sample("left", frames=6, sketch=strokes[:5]), [alone]), "the last latent is sketched, too"
    for start in ([Scene("left", 6)], [Scene("left", 2), Scene("left", 4)]):
        scenes = [*start, Scene("right", 5, 0)]
        (bare,), (story,) = (session.sample(scenes=scenes, sketch=sketch) for sketch in (None, strokes[:6]))
        assert np.array_equal(story.frames[:6], alone.frames)
        assert np.array_equal(story.frames[6:], bare.frames[6:]), "a cut ends it"
        assert same(*(session.sample(scenes=scenes, sketch={place: strokes[5]}) for place in (5, -6)))
        with pytest.raises(UserError, match=r"frame 6 is sketched, and a hard cut .* up to frame 5; give one of at most 6"):
            session.sample(scenes=scenes, sketch=strokes)


def test_a_sketch_with_gaps_is_drawn_again_by_its_json(tessera: Run, run: Path, session: Session, tmp_path: Path) -> None:
    """The network sees the frames that were given, each at its place, and no others."""
    strokes, nets = bar(3, 9, 1), session.nets["base"]
    for place in (0, 6):
        Image.fromarray(strokes[place]).save(tmp_path / f"{place}.png")
    (tmp_path / "a.yaml").write_text("prompt: left\nsketch: [{frame: 0, image: 0.png}, {frame: 6, image: 6.png}]\n")
    assert tessera("sample", run, "--request", "a.yaml", "--out", "out").code == 0
    assert tessera("sample", run, "--request", "out/0.json", "--out", "again").code == 0
    assert (tmp_path / "again/0.gif").read_bytes() == (tmp_path / "out/0.gif").read_bytes()
    seen: list[torch.Tensor] = []
    generator: Any = nets["generator"]
    real = generator.split_sketch
    generator.split_sketch = lambda ids: (seen.append(ids), real(ids))[1]
    (drawn,) = session.sample("left", sketch={0: strokes[0], 6: strokes[6]})
    del generator.split_sketch
    assert encode_gif(drawn) == (tmp_path / "out/0.gif").read_bytes()
    half = seen[0][: len(seen[0]) // 2]  # the branch with the sketch
    held = session.encode(np.stack([strokes[0], *[strokes[6]] * 6]))[0]
    assert [(row == generator.nothing).all().item() for row in half[0]] == [False, True, True, False]
    assert torch.equal(half[0, [0, 3]], held[[0, 3]])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"prompts": "a", "keyframes": {0: bar(1, 1, 1)[0], -1: bar(2, 1, 1)[0]}}, "8 is given and frame 1 is not: .* later"),
        ({"prompts": "a", "keyframes": {4: bar(1, 1, 1)[0]}}, "4 is given and frame 0 is not: .*base.model.kind=masked"),
        ({"scenes": [Scene("a", 9), Scene("b", 4, 4)]}, "overlap of 4, and this generator draws no windows"),
        ({"scenes": [Scene("a", 9), Scene("b", 4, 0)], "image": bar(1, 10, 1)}, "9 is given, and a hard cut .* up to 8"),
        ({"scenes": [Scene("a", 5), Scene("b", 5, 0)], "sketch": bar(1, 6, 1)}, "5 is sketched, and a hard cut .* at most 5"),
        ({"scenes": [Scene("a", 10), Scene("b", 1)]}, r"scene 'b' \(1 of 2 frames .* at least 2 frames"),
        ({"prompts": "a", "options": {"overlap": 2}}, "sample.overlap .*unknown key"),
    ],
    ids=str,
)
def test_what_cannot_be_asked(session: Session, call: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        session.sample(**call)


def test_a_flag_that_does_not_apply_is_named(tessera: Run, run: Path) -> None:
    ended = tessera("sample", str(run), "left", "--steps", "4")
    assert ended.code == 2
    assert "--steps does not apply to this model (nuwa); it draws by guidance, " in ended.err


def test_a_run_keeps_its_kind(run: Path) -> None:
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=r"a run keeps its base\.model\.kind, here autoregressive; start a new run"):
        pipeline.resume(run, sets=["base.model.kind=masked"])
    assert (run / "config.yaml").read_bytes() == before


def test_the_held_out_loss_is_that_of_the_network(session: Session) -> None:
    """In nats and bits a token, by one pass over two clips of 9 and 4 frames."""
    clips, captions = [bar(2, 9, 1), bar(7, 4, -1)], ["right", "left"]
    found = session.draw.loss(clips, captions)
    nets: Any = session.nets["base"]
    nats, tokens = 0.0, 0
    for clip, caption in zip(clips, captions, strict=True):
        ids = session.encode(clip)
        text: Any = session.draw.latents.prompts(nets, [caption])  # type: ignore[attr-defined]
        untold = torch.tensor([nets["generator"].lengths.num_embeddings - 1])
        with torch.no_grad():
            logs = nets["generator"](ids, text, untold)[..., 0, :].log_softmax(-1)
        latents = num_latent(len(clip), 2)
        nats -= float(logs.gather(-1, ids[..., None])[:, :latents].sum())
        tokens += latents * 16
    assert tokens == (5 + 3) * 16
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["bits_per_token"] == pytest.approx(nats / tokens / np.log(2), rel=1e-5)
    assert 0 <= found["right"] <= 1


def test_an_export_draws_the_same(session: Session, run: Path, tmp_path: Path) -> None:
    model = load(export_run(run, tmp_path / "model"), device="cpu")
    asked = {"frames": 12, "sketch": Clip(bar(3, 5, 1), 9.0)}
    assert same(model.sample(["left", "right"], **asked), session.sample(["left", "right"], **asked))
    assert "80 tokens a clip (5 x 4 x 4)" in (tmp_path / "model" / "README.md").read_text()
