"""A run or an export of a recipe of clips under evaluation: its session as a `ClipSubject`, its data as the material."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.batches import num_latent
from tessera.contracts import Scene
from tessera.data.clip_sources import as_clip_source
from tessera.engine.dist import World
from tessera.evals.clip_evaluate import Clips, ClipSubject, evaluate_clips
from tessera.evals.clip_material import ClipMaterial, load_clips
from tessera.evals.evaluate import Evaluation, Say
from tessera.media.clips import Frames
from tessera.nn.quantizers.codes import code_counts
from tessera.recipes.clips.scenes import goes_on
from tessera.sampling.request import make_request
from tessera.sampling.session import Session


def judge_clips(session: Session, root: Any, data: Any, world: World, say: Say) -> Evaluation:
    """By clips as validation sees them; `root` is the run's config with what the user set."""
    config, look = root.evaluate, {"channels": root.data.channels, "background": root.data.background}
    source = None if data is None else as_clip_source(data, **look)
    material = load_clips(root.data, most_train=config.train_samples, most_held_out=2 * config.n, seed=config.seed, source=source)
    return evaluate_clips(subject_of(session, root.sample, material), material, config, world=world, say=say)


def subject_of(session: Session, options: Any, material: ClipMaterial) -> ClipSubject:
    """What of a session can be judged: a tokenizer alone, or all of it."""
    about = {"model": session.path.name, "stages": dict(session.steps), "sample": options.model_dump(mode="json")}

    def reconstruct(clips: Clips) -> Clips:
        return [clip.frames for clip in session.reconstruct(*clips)]

    def count(clips: Clips) -> Tensor:
        return count_codes(session, clips)

    if not session.draws:
        return ClipSubject(reconstruct=reconstruct, count_codes=count, about=about)

    def sample(captions: Sequence[str], lengths: Sequence[int], seed: int) -> Clips:
        return draw_lengths(session, options, captions, lengths, seed)

    def tell(stories: Sequence[Sequence[Scene]], seed: int) -> Clips:
        return [tell_story(session, options, scenes, seed + index) for index, scenes in enumerate(stories)]

    def held_out_loss() -> Mapping[str, float]:
        return session.draw.loss(list(material.held_out.clips), material.held_out.captions)

    tokenizer: Any = session.tokenizer
    stride = tokenizer.time_stride  # a scene that is shorter may add no token
    longer = goes_on(num_latent(session.config.data.frames, stride))
    return ClipSubject(
        sample=sample, reconstruct=reconstruct, count_codes=count, tell=tell if longer else None,
        least_scene=stride, held_out_loss=held_out_loss, about=about,
    )  # fmt: skip


def draw_lengths(session: Session, options: Any, captions: Sequence[str], lengths: Sequence[int], seed: int) -> list[Frames]:
    """Rows of one length are drawn together; each has a seed of its own, so what is drawn does not hang on the others."""
    made: dict[int, Frames] = {}
    for length in sorted(set(lengths)):
        rows = [index for index, own in enumerate(lengths) if own == length]
        request = make_request(options.model_copy(update={"frames": length}), [captions[row] for row in rows], seed=seed)
        drawn = session.draw_rows([(captions[row], seed + row) for row in rows], request)
        made |= {row: clip.frames for row, clip in zip(rows, drawn, strict=True)}
    return [made[row] for row in range(len(captions))]


def tell_story(session: Session, options: Any, scenes: Sequence[Scene], seed: int) -> Frames:
    """All scenes as one clip; drawn alone, since each story has scenes of its own."""
    request = make_request(options.model_copy(update={"chunk": 1, "frames": None}), [], seed=seed, scenes=scenes)
    (clip,) = session.serve(request)
    frames: Frames = clip.frames
    return frames


def count_codes(session: Session, clips: Clips) -> Tensor:
    """How often each code occurs in the tokens of clips, without what only fills up the shorter ones; v, or q v where a place has
    several codes."""
    tokenizer: Any = session.tokenizer
    ids = session.encode(*clips)  # b k h w, or b k h w q
    reach = torch.tensor([num_latent(len(clip), tokenizer.time_stride) for clip in clips])
    own = ids[torch.arange(ids.shape[1]) < reach[:, None]]  # m h w (q)
    links = own[..., None] if own.ndim == 3 else own
    counts = torch.stack([code_counts(link.contiguous(), tokenizer.vocab_size) for link in links.unbind(-1)])
    return counts[0] if own.ndim == 3 else counts
