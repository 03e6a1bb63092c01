"""Scenes of clips: what goes on from what, and in latent frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.batches import num_latent
from tessera.config import UserError
from tessera.contracts import Chunk, Scene
from tessera.generators.masked.windows import Span
from tessera.recipes.clips.config import ClipsConfig


def scenes_of(chunk: Chunk, config: ClipsConfig) -> Sequence[Scene]:
    """Those that were asked for, or one, whose caption differs from row to row."""
    if chunk.scenes is not None:
        return chunk.scenes
    return [Scene("", chunk.options.frames or config.data.frames)]


def takes_of(scenes: Sequence[Scene]) -> list[list[Scene]]:
    """Scenes that go on from each other; a hard cut begins another take."""
    takes: list[list[Scene]] = []
    for scene in scenes:
        if not takes or scene.overlap == 0:
            takes.append([replace(scene, overlap=0)])
        else:
            takes[-1].append(scene)
    return takes


def spans_of(takes: Sequence[Sequence[Scene]], time_stride: int) -> list[Span]:
    """In latent frames. Scenes within a take end with a latent, up to a time stride late; the take ends where it should."""
    spans = []
    for take in takes:
        asked = done = 0
        for scene in take:
            asked += scene.frames
            latents = num_latent(asked, time_stride) - done
            if latents < 1:
                raise UserError(
                    f"the scene {scene.caption!r} ({scene.frames} of {time_stride} frames that a token holds) is too short to be "
                    f"drawn; ask for at least {time_stride} frames"
                )
            done += latents
            spans.append(Span(latents, None if scene.overlap is None else latents_in(scene.overlap, time_stride)))
    return spans


def goes_on(latents: int) -> bool:
    """Whether more can be drawn than a training clip's latents. The first is unlike all others, so two of them do not teach what
    follows one that is not the first."""
    return latents > 2


def no_going_on(config: ClipsConfig) -> str:
    """What to say where a longer one is asked for, and cannot be drawn."""
    return (
        f"this model was trained on clips of {config.data.frames} frames, in which nothing can go on from anything; ask for at "
        f"most so many at a time (a scene with overlap 0 starts anew), or train with more: data.frames"
    )


def latents_in(frames: int, time_stride: int) -> int:
    """So many frames at a clip's end, in whole latents."""
    return -(-frames // time_stride)
