"""A recipe of clips without training: what is drawn can be told from a request by hand, and its tokens are mean colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import to_uint8
from tessera.config import Config, VideoDataConfig
from tessera.contracts import Chunk, Recipe
from tessera.media.clips import Clip
from tessera.randomness import mix, mix_text
from tessera.recipes.clips.config import MaskedBaseConfig
from tessera.sampling.session import Session
from tessera.sampling.stored import Stored


class ClipSample(Config):
    """What a request may change."""

    frames: int | None = Field(None, ge=1, le=500)
    """How many."""
    fps: float | None = None
    """Of what is drawn."""
    guidance: float = Field(2.0, ge=0)
    """Moves nothing here."""
    chunk: int = Field(2, ge=1)
    """Clips drawn at once."""


class ClipConfig(Config):
    """Root config."""

    recipe: Literal["flicker"] = "flicker"
    """The recipe's name."""
    data: VideoDataConfig = VideoDataConfig(frames=5, resolution=16)
    """The files."""
    base: MaskedBaseConfig = MaskedBaseConfig()
    """A generator of windows, as far as judging is concerned."""
    sample: ClipSample = ClipSample()
    """How clips are drawn."""


def colour_of(caption: str, seed: int) -> int:
    """The first grey of a clip; every further frame is one lighter."""
    return mix(mix_text(caption), seed) % 200


class Flicker:
    """Frame i of a clip is the grey of its caption and seed, plus i; frames that are given stay."""

    def __init__(self, config: ClipConfig, nets: Mapping[str, Mapping[str, nn.Module]], device: torch.device) -> None:
        self.config = config
        self.chunks: list[Chunk] = []

    def __call__(self, chunk: Chunk) -> list[Clip]:
        self.chunks.append(chunk)
        length = chunk.options.frames or self.config.data.frames
        size, channels = self.config.data.resolution, self.config.data.channels
        made = []
        for row, (caption, seed) in enumerate(zip(chunk.captions, chunk.seeds.tolist(), strict=True)):
            scenes = [(scene.caption, scene.frames) for scene in chunk.scenes or ()] or [(str(caption), length)]
            starts = np.repeat([colour_of(words, seed) for words, _ in scenes], [count for _, count in scenes])
            greys = (starts + np.arange(length)).astype(np.uint8)
            frames = np.broadcast_to(greys[:, None, None, None], (length, size, size, channels)).copy()
            if chunk.frames is not None and chunk.given is not None:
                places = chunk.given.nonzero().flatten().numpy()
                frames[places] = to_uint8(chunk.frames[row]).permute(1, 2, 3, 0).numpy()[places]
            made.append(Clip(frames, 8.0))
        return made

    def loss(self, real: Any, captions: Sequence[str | None]) -> Mapping[str, float]:
        """Not asked."""
        return {}


class Means(nn.Module):
    """Blocks of 8 x 8 pixels to their mean greys: the first frame alone, then so many frames at once."""

    vocab_size = 256
    time_stride = 2

    def encode(self, frames: Tensor) -> Tensor:
        """b c t h w -> b k h w."""
        assert (frames.shape[2] - 1) % self.time_stride == 0
        first, rest = frames[:, :, :1], frames[:, :, 1:]
        means = [nn.functional.avg_pool3d(first, (1, 8, 8))]
        if rest.shape[2]:
            means.append(nn.functional.avg_pool3d(rest, (self.time_stride, 8, 8)))
        return torch.cat(means, 2).mean(1).add(1).mul(127.5).round().long()

    def decode(self, ids: Tensor) -> Tensor:
        """The way back: every block in its mean."""
        return self.decode_more(ids, None)[0]

    def decode_more(self, ids: Tensor, memory: str | None) -> tuple[Tensor, str]:
        """The memory is whether it went on."""
        repeats = torch.full((ids.shape[1],), self.time_stride)
        repeats[0] = 1 if memory is None else self.time_stride
        frames = ids.repeat_interleave(repeats, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
        return (frames.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1, -1), "more"


STORY = [
    {"prompt": "up", "frames": 3},
    {"prompt": "down", "frames": 4, "overlap": 2},
    {"prompt": "cut", "frames": 2, "overlap": 0},
]

FLICKER = Recipe(
    name="flicker", summary="greys in time", medium="clip", config_type=ClipConfig, presets={"tiny": ClipConfig},
    steps=lambda config: (), opens=Flicker,
)  # fmt: skip


def clip_session(path: Path, **data: Any) -> Session:
    """A session of it; `data` are values of its data section."""
    config = ClipConfig(data=VideoDataConfig(**{"frames": 5, "resolution": 16, **data}))
    session = Session(Stored(path, FLICKER, config, {}), torch.device("cpu"))
    session.nets = {"tokenizer": {"tokenizer": Means()}}
    session.steps, session.hashes = {"tokenizer": 2, "base": 3}, {"tokenizer": "a", "base": "b"}
    return session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return clip_session(tmp_path / "run")


def chunks(session: Session) -> list[Chunk]:
    draw: Any = session.draw
    assert isinstance(draw, Flicker)
    return draw.chunks


def grey(value: int, size: int = 16) -> Any:
    return np.full((size, size, 3), value, np.uint8)


def greys(clip: Clip) -> list[int]:
    """The one colour of each frame."""
    assert all(len(np.unique(frame)) == 1 for frame in clip.frames)
    return [int(frame.flat[0]) for frame in clip.frames]


def write_gif(path: Path, values: list[int], milliseconds: int = 100, size: tuple[int, int] = (16, 16)) -> Path:
    frames = [Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8)) for value in values]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, format="GIF")
    return path
