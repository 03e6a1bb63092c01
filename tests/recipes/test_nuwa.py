"""Either generator in either recipe, on every tokenizer: what its config says, and that it draws."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera import pipeline
from tessera.batches import TokenBatch, num_latent
from tessera.config import UserError, build, difference, dump_yaml, read_yaml
from tessera.contracts import Chunk, Scene
from tessera.generators.autoregressive import grid_losses
from tessera.recipes import RECIPES
from tessera.recipes.clips.config import AutoregressiveClipsConfig, MaskedClipsConfig
from tessera.recipes.clips.drawing import Animator
from tessera.rehearsal import dry_run
from tessera.sampling.session import load
from tests.sampling.bars import CLIPS, bar, write_bars

OTHER = {"phenaki": "autoregressive", "nuwa": "masked"}
TYPES = {"masked": MaskedClipsConfig, "autoregressive": AutoregressiveClipsConfig}
MODELS = {"masked": "{width: 16, depth: 1, heads: 2}", "autoregressive": "{width: 16, depth: 1, heads: 2, inner_width: 16}"}
CODES = ["base.model.width=96", "tokenizer.model.quantizer={kind: residual}"]
SUPERRES = "superres={resolution: 64, model: {width: 32, depth: 1, heads: 16}}"
DRAWN = ("nuwa", "phenaki", "muse", "meshgpt")
TOKENIZERS = {
    "conv": "{widths: [8, 8, 8], blocks: [0, 0, 0], quantizer: {kind: fsq, levels: [8, 8, 8, 8, 8]}}",
    "cvivit": "{kind: cvivit, width: 16, heads: 2, patch: 4, time_patch: 4, window: 2, quantizer: {kind: residual}}",
    "frames": "{kind: frames, widths: [8, 8, 8], blocks: [0, 0, 0]}",
}


def resolved(recipe: str, *sets: str, preset: str = "tiny") -> Any:
    return pipeline.resolve(recipe, preset=preset, sets=sets)


@pytest.mark.parametrize(("recipe", "preset"), list(itertools.product(OTHER, ["tiny", "small", "base", "large"])))
def test_one_value_asks_for_the_other_generator(recipe: str, preset: str, tmp_path: Path) -> None:
    """It brings the values of the other recipe's preset, and nothing of its own generator's stays."""
    (other,) = set(OTHER) - {recipe}
    made = resolved(recipe, f"base.model.kind={OTHER[recipe]}", preset=preset)
    assert type(made) is TYPES[OTHER[recipe]]
    assert [key for key, *_ in difference(made, resolved(other, preset=preset))] == ["recipe"]
    assert type(resolved(recipe, preset=preset)) is TYPES[OTHER[other]]
    (tmp_path / "c.yaml").write_text(dump_yaml(made))
    assert pipeline.resolve(str(tmp_path / "c.yaml")) == made
    assert build(RECIPES[recipe].config_type, [read_yaml(tmp_path / "c.yaml")]) == made
    (tmp_path / "short.yaml").write_text(f"recipe: {recipe}\npreset: {preset}\nbase: {{model: {{kind: {OTHER[recipe]}}}}}\n")
    assert pipeline.resolve(str(tmp_path / "short.yaml")) == made


@pytest.mark.parametrize(
    ("recipe", "sets", "said"),
    [
        ("nuwa", ["sample.steps=4"], r"sample.steps \(--set\): unknown key where .* 'autoregressive'; it belongs to 'masked'"),
        ("nuwa", ["base.loss.frames=null"], r"base.loss.frames .*it belongs to 'masked'"),
        ("nuwa", ["base.critic={kind: head}"], r"base.critic .*it belongs to 'masked'"),
        ("nuwa", ["base.model.kind=masked", "base.model.nearby.frames=2"], r"base.model.nearby .*belongs to 'autoregressive'"),
        ("phenaki", ["base.model.kind=autoregressive", "sample.overlap=4"], r"sample.overlap .*it belongs to 'masked'"),
        ("phenaki", ["sample.top_k=4"], r"sample.top_k .*where base.model.kind is 'masked'; it belongs to 'autoregressive'"),
        ("phenaki", ["base.model.kind=autoregresive"], r"expected 'masked' or 'autoregressive'; did you mean 'autoregressive'\?"),
        ("nuwa", ["base.model=4"], r"base.model \(--set\): found 4; expected a section"),
        ("nuwa", ["sample.ordre=auto"], r"unknown key; did you mean 'sample.order'"),
        ("nuwa", ["data.sketch=edges"], "sketch_window 0 looks at no sketch; set it to 3"),
        ("nuwa", ["base.model.sketch_window=3"], "data.sketch none brings no sketches; set data.sketch to edges or files"),
        ("nuwa", ["base.model.sketch_window=4"], "4 has no middle"),
        ("phenaki", ["data.sketch=edges"], "a masked generator learns nothing .* set base.model.kind=autoregressive"),
        ("nuwa", ["base.model.nearby.whole=true", "sample.order=wavefront"], "sees whole frames; use auto"),
        ("nuwa", ["data.frames=16"], "16 is not 1 more than a multiple of the tokenizer's time stride 4; use 13 or 17"),
        ("nuwa", ["data.resolution=34"], "34 cannot be divided"),
        ("nuwa", ["base.model.heads=16"], r"heads 16 of width 64 have 4 channels .* 3 axes .* at least 6; use 8 heads"),
        ("phenaki", ["base.model.heads=16"], r"base.model.heads 16 of base.model.width 64 .* 3 axes .* at least 6; use 8 heads"),
        ("phenaki", ["base.model.heads=24", *CODES], r"base.model.heads 24 .* 4 axes take at least 8; use 12 heads at most"),
        ("muse", ["base.model.heads=48"], r"base.model.heads 48 .* 2 axes take at least 4; use 24 heads at most, or width 192"),
        ("muse", [SUPERRES], r"superres.model.heads 16 of superres.model.width 32 have 2 .* use 8 heads at most, or width 64"),
        *((recipe, ["sample.temperature=1e39"], r"sample.temperature .*: found 1.0e\+39; .* and <= 1000") for recipe in DRAWN),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(recipe: str, sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolved(recipe, *sets)


def animator(recipe: str, kind: str, tokenizer: str, *sets: str) -> Animator:
    """With weights as they start."""
    config = resolved(
        recipe, "engine.device=cpu", "data.resolution=16", "text.kind=none", f"tokenizer.model={TOKENIZERS[tokenizer]}",
        f"base.model.kind={kind}", *(f"base.model.{part.strip()}".replace(": ", "=") for part in MODELS[kind][1:-1].split(",")),
        *sets,
    )  # fmt: skip
    torch.manual_seed(0)
    nets = {train.name: {name: net.eval() for name, net in train.serves().items()} for train in RECIPES[recipe].steps(config)}
    return Animator(config, nets, torch.device("cpu"))


@pytest.mark.parametrize(("kind", "tokenizer"), list(itertools.product(TYPES, TOKENIZERS)))
def test_either_generator_draws_on_every_tokenizer(kind: str, tokenizer: str) -> None:
    """A clip longer than those of training that goes on from given frames, and a story; 32,768 codes are two digits."""
    made = animator("nuwa" if tokenizer == "conv" else "phenaki", kind, tokenizer)
    frames = torch.from_numpy(bar(3, 5, 1)).permute(3, 0, 1, 2)[None].float().div(127.5).sub(1)
    given = {"frames": frames.expand(2, -1, -1, -1, -1), "given": torch.ones(5, dtype=torch.bool)}
    seeds = torch.tensor([3, 4])
    for clip in made(Chunk(["", ""], seeds, made.config.sample.model_copy(update={"frames": 13}), **given)):
        assert clip.frames.shape == (13, 16, 16, 3)
        assert np.array_equal(clip.frames[:5], bar(3, 5, 1))
    scenes = [Scene("a", 6), Scene("b", 7), Scene("c", 5, 0)]
    assert [len(clip.frames) for clip in made(Chunk(["", ""], seeds, made.config.sample, scenes=scenes))] == [18, 18]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_sketches_on_every_tokenizer(tokenizer: str) -> None:
    """Behind a sketch's end, and where its frames are not there, it has nothing to say."""
    made = animator("nuwa", "autoregressive", tokenizer, "data.sketch=edges", "base.model.sketch_window=3")
    generator: Any = made.nets["generator"]
    torch.nn.init.normal_(generator.head.weight, std=0.3)
    for block in generator.blocks:
        torch.nn.init.normal_(block.sketch.out.weight, std=0.5)  # it starts at 0
    frames = torch.from_numpy(bar(3, 9, 1)).permute(3, 0, 1, 2)[None].float().div(127.5).sub(1)
    ids = made.tokenizer.encode(frames)
    options, seeds = made.config.sample.model_copy(update={"frames": 13}), torch.tensor([3])

    def draw(**sketch: Any) -> torch.Tensor:
        pieces = made.latents.pieces(Chunk([""], seeds, options, **sketch), [[Scene("", 13)]])
        return torch.cat([piece.ids for piece in pieces], dim=1)

    every = torch.ones(ids.shape[1], dtype=torch.bool)
    one = torch.arange(ids.shape[1]) == 0
    whole, start = draw(sketch=ids, sketched=every), draw(sketch=ids, sketched=one)
    assert whole.shape[1] == num_latent(13, made.time_stride)
    assert not torch.equal(whole, start)
    assert not torch.equal(start, draw())
    assert torch.equal(draw(sketch=ids, sketched=~every), draw())
    assert torch.equal(start, draw(sketch=ids[:, :1], sketched=every[:1]))
    gone = ids.masked_fill(~one.flip(0).view(1, -1, *[1] * (ids.ndim - 2)), 0)
    assert torch.equal(draw(sketch=gone, sketched=one.flip(0)), draw(sketch=ids, sketched=one.flip(0))), "the last alone"


def test_sketches_of_files_are_learned_from_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the clip itself, so it has the clip's tokens; every fourth clip has none."""
    write_bars(tmp_path / "data")
    for index in range(16):
        if index % 4:
            shutil.copy(tmp_path / "data" / f"{index}.gif", tmp_path / "data" / f"{index}.sketch.gif")
    learned: list[TokenBatch] = []
    real = grid_losses.sketch_of
    monkeypatch.setattr(grid_losses, "sketch_of", lambda nets, batch, bare: (learned.append(batch), real(nets, batch, bare))[1])
    more = {"data.sketch": "files", "base.model": "{width: 16, depth: 1, heads: 2, inner_width: 16, sketch_window: 3}"}
    sets = [f"{key}={value}" for key, value in (CLIPS | more).items()]
    config = pipeline.resolve("nuwa", preset="tiny", data=str(tmp_path / "data"), steps=3, sets=sets)
    session = load(pipeline.train(config, run=tmp_path / "run"), device="cpu")
    assert len(learned) >= 3
    for batch in learned:
        assert batch.sketch is not None
        assert batch.sketch_lengths is not None
        assert batch.lengths is not None
        drawn = torch.tensor([int(key) % 4 > 0 for key in batch.keys])
        assert torch.equal(batch.sketch_lengths, torch.where(drawn, batch.lengths, 0))
        assert torch.equal(batch.sketch[drawn], batch.ids[drawn])
    plain, one, other = (session.sample("left", sketch=sketch)[0].frames for sketch in (None, bar(3, 9, 1), bar(9, 9, -1)))
    assert plain.shape == (9, 16, 16, 3)
    assert not np.array_equal(plain, one)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(("frames", "asked"), [(1, 2), (5, 6), (9, None)])
def test_what_goes_on_from_nothing_is_refused_as_by_a_masked_generator(frames: int, asked: int | None) -> None:
    """Of clips of one or two latent frames no frame follows one that is not the first."""
    for kind in TYPES:
        made = animator("nuwa", kind, "conv", f"data.frames={frames}")
        options = made.config.sample.model_copy(update={"guidance": 1.0})

        def length(*scenes: Scene, made: Animator = made, options: Any = options) -> int:
            return len(made(Chunk([""], torch.tensor([3]), options, scenes=scenes))[0].frames)

        assert length(Scene("", frames), Scene("", frames, 0)) == 2 * frames, "a cut starts anew"
        if asked is None:
            assert length(Scene("", frames), Scene("", 4)) == frames + 4
            continue
        for scenes in ([Scene("", asked)], [Scene("", 1), Scene("", asked, 0)], [Scene("", frames), Scene("", 4)]):
            with pytest.raises(UserError, match=rf"trained on clips of {frames} frames, in which nothing .* train .*data.frames"):
                length(*scenes)


def test_a_clip_no_longer_than_those_of_training_is_told_how_long_it_will_be() -> None:
    """In latent frames, by quarters of an octave: of 3, 2 and 1; what is longer hears 64. Each take hears its own."""
    made, heard = animator("nuwa", "autoregressive", "conv"), list[int]()
    made.nets["generator"].lengths.register_forward_hook(lambda module, given, out: heard.extend(given[0].tolist()))
    options = made.config.sample.model_copy(update={"guidance": 1.0})

    def told(*scenes: Scene) -> list[int]:
        heard.clear()
        made(Chunk([""], torch.tensor([3]), options, scenes=scenes))
        return list(heard)

    assert [told(Scene("", frames)) for frames in (9, 5, 1, 13)] == [[6], [4], [0], [64]]
    assert told(Scene("a", 5), Scene("b", 4)) == [6, 6], "all of the take"
    assert told(Scene("a", 9), Scene("b", 4)) == [64, 64]
    assert told(Scene("a", 9), Scene("b", 5, 0)) == [6, 4]
    made(Chunk([""], torch.tensor([3]), options.model_copy(update={"frames": 5})))
    assert heard[-1] == 4


def test_what_cannot_train_on_a_cpu_is_refused_before_anything_trains(tmp_path: Path) -> None:
    write_bars(tmp_path / "data")
    more = {"base.model": "{width: 16, depth: 1, heads: 2, inner_width: 16, nearby: {execution: blocks}}"}
    sets = [f"{key}={value}" for key, value in (CLIPS | more).items()]
    config = pipeline.resolve("nuwa", preset="tiny", data=str(tmp_path / "data"), steps=1, sets=sets)
    said = r"base.model.nearby.execution blocks .* cannot train on a CPU; set base.model.nearby.execution to auto"
    with pytest.raises(UserError, match=said):
        dry_run(config)
    with pytest.raises(UserError, match=said):
        pipeline.train(config, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    pipeline.train(config, run=tmp_path / "run", stage="tokenizer")
    with pytest.raises(UserError, match=said):
        pipeline.resume(tmp_path / "run")
    assert not (tmp_path / "run" / "base").exists()


def test_frames_that_are_seen_whole_have_no_wavefront() -> None:
    made = animator("nuwa", "autoregressive", "conv", "base.model.nearby.whole=true")
    options = made.config.sample.model_copy(update={"order": "wavefront"})
    with pytest.raises(UserError, match="sees whole frames; use order auto"):
        made(Chunk([""], torch.tensor([0]), options))
    assert len(made(Chunk([""], torch.tensor([0]), made.config.sample))[0].frames) == 9


def test_both_generators_learn_from_the_tokens_of_one_tokenizer(tmp_path: Path) -> None:
    """Trained once, by phenaki; the caches hold the same ids. A run stays with its kind."""
    write_bars(tmp_path / "data")
    runs = []
    for recipe, kind in (("phenaki", "masked"), ("phenaki", "autoregressive"), ("nuwa", "masked")):
        more = {"base.model.kind": kind, "base.model.width": 16, "base.model.depth": 1, "base.model.heads": 2}
        if runs:
            more["base.needs.tokenizer"] = str(runs[0] / "tokenizer")
        sets = [f"{key}={value}" for key, value in (CLIPS | more).items()]
        config = pipeline.resolve(recipe, preset="tiny", data=str(tmp_path / "data"), steps=1, sets=sets)
        runs.append(pipeline.train(config, run=tmp_path / f"{recipe}-{kind}"))
        session = load(runs[-1], device="cpu")
        assert (session.recipe.name, session.config.base.model.kind) == (recipe, kind)
        assert len(session.sample("left", frames=12)[0].frames) == 12
        assert session.draw.loss([bar(1, 9, 1)], ["right"])["loss"] > 0
    caches = [sorted((run / "cache").glob("tokens-*/*.npy")) for run in runs]
    for others in caches[1:]:
        assert [path.read_bytes() for path in others] == [path.read_bytes() for path in caches[0]]
    for run in runs[1:]:
        assert "shards are taken from" in (run / "log.txt").read_text()
    with pytest.raises(UserError, match=r"a run keeps its base\.model\.kind, here autoregressive"):
        pipeline.resume(runs[1], sets=["base.model.kind=masked"])
