"""Clips in use: frames that a request gives, at their places in the clip that is drawn; and clips to tokens and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from tessera.batches import from_uint8, num_frames, num_latent, to_uint8
from tessera.config import UserError, VideoDataConfig
from tessera.media.clip_facts import DEFAULT_FPS, Look
from tessera.media.clips import AvMissing, Clip, ClipFacts, Frames, UnreadableClip, read_clip
from tessera.media.frame_folders import frame_files, frame_numbers
from tessera.media.framing import filled, frames_from, letterbox, room_from, side_of
from tessera.media.images import Pixels, fit
from tessera.recipes.clips.given import latents_of
from tessera.recipes.clips.scenes import takes_of
from tessera.recipes.precision import full_precision
from tessera.sampling.request import Request

CHUNK_FRAMES = 256  # that go through a tokenizer at once, if they are of several clips

Footage: TypeAlias = "Path | str | Clip | Image.Image | npt.NDArray[Any]"  # a picture is a clip of one frame


def asked_frames(request: Request, data: VideoDataConfig) -> int:
    """How many a request asks for; by default those of a training clip."""
    asked: int | None = request.options.frames
    return data.frames if asked is None else asked


def frames_before_cut(request: Request, data: VideoDataConfig) -> int:
    """How many come before the first hard cut, to which given frames and sketches belong; all where there is none."""
    return sum(scene.frames for scene in takes_of(request.scenes)[0]) if request.scenes else asked_frames(request, data)


def given_frames(
    request: Request, data: VideoDataConfig, time_stride: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """What a request gives of a clip: frames 1 c t h w in [-1, 1], all others black, and which ones are given, t bool. They reach
    to the end of the last given latent frame, for a clip may be much longer."""
    if request.image is None and not request.keyframes:
        return None
    total = asked_frames(request, data)
    known: dict[int, Pixels] = {}
    if request.image is not None:
        known = dict(enumerate(prepare(request.image, data, most=total).frames))
        if len(known) == total:
            raise UserError(
                f"the clip is to have {counted(total)}, and the image has as many or more, so nothing would be drawn; "
                f"ask for more: --frames N, or sample.frames"
            )
    known |= single_frames(request.keyframes, total, data, "keyframe", known)
    if len(known) == total:
        raise UserError(f"all {total:,} frames are given, so nothing would be drawn; leave some out, or ask for more frames")
    return placed(known, frames_before_cut(request, data), data, time_stride, device)


@torch.no_grad()
def sketch_ids(request: Request, data: VideoDataConfig, tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """A request's sketch, taken and cut as clips are and never traced: 1 k h w ids on the device, and which of its latent frames
    are there, k bool."""
    total, end = asked_frames(request, data), frames_before_cut(request, data)
    if isinstance(request.sketch, tuple):
        known = single_frames(request.sketch, total, data, "sketch")
    else:
        known = first_strokes(request.sketch, total, data)
    if max(known) >= end:
        raise UserError(
            f"frame {max(known)} is sketched, and a hard cut comes before it: a sketch can reach up to frame {end - 1}; "
            f"give one of at most {counted(end)}, or leave the cut out"
        )
    return latents_of(*placed(known, end, data, tokenizer.time_stride, device), tokenizer, "sketch")


def first_strokes(sketch: Footage, total: int, data: VideoDataConfig) -> dict[int, Pixels]:
    """Frame by frame those of a clip of so many, however fast the sketch is shown. Pictures in a folder have the places that
    their numbers say, counted from the lowest. One behind the clip is refused, but where every frame before it is there: such a
    folder is a longer clip."""
    places = list(range(total))
    if isinstance(sketch, (str, Path)) and Path(sketch).is_dir():
        with readable():
            files, numbers = frame_files(sketch), frame_numbers(sketch)
        places = [place for place in numbers if place < total]
        if len(places) < min(len(numbers), total):
            place = numbers[len(places)]
            raise UserError(
                f"{files[len(places)]} is for frame {place} of the sketch, by its number, and the clip has {counted(total)}: "
                f"0 to {total - 1}; ask for more (--frames {place + 1}), leave it out, or renumber the pictures one by one"
            )
    every = data.model_copy(update={"fps": None, "stride": 1})
    return dict(zip(places, prepare(sketch, every, most=len(places)).frames, strict=False))


def single_frames(
    pairs: Sequence[tuple[int, Any]], total: int, data: VideoDataConfig, name: str, known: Collection[int] = ()
) -> dict[int, Pixels]:
    """Pictures at their places in a clip of so many frames, some of which are known already."""
    found: dict[int, Pixels] = {}
    for place, picture in pairs:
        at = place + total if place < 0 else place
        if not 0 <= at < total:
            raise UserError(
                f"a {name} is for frame {place}, and the clip has {counted(total)}: "
                f"0 to {total - 1}, or from the end -1 to -{total}"
            )
        if at in known or at in found:
            raise UserError(f"frame {at} of {total:,} is given twice, once by the {name} {place}; leave one of them out")
        found[at] = one_frame(picture, data, name)
    return found


def placed(
    known: Mapping[int, Pixels], end: int, data: VideoDataConfig, time_stride: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Frames at their places in a clip, or up to its first cut: 1 c t h w in [-1, 1], all others black, and which ones are known,
    t bool. They reach to the end of the last latent frame of which one is known; those behind the cut are others' to refuse."""
    reach = max(1 + max(known), min(end, num_frames(num_latent(1 + max(known), time_stride), time_stride)))
    frames = torch.zeros(reach, data.resolution, data.resolution, data.channels, dtype=torch.uint8)
    given = torch.zeros(reach, dtype=torch.bool)
    for at, pixels in known.items():
        frames[at], given[at] = torch.from_numpy(pixels.copy()), True
    return batch_of(frames.numpy()[None], device), given.to(device)


def counted(frames: int) -> str:
    """`1 frame`, `17 frames`."""
    return f"{frames:,} frame{'s'[: frames != 1]}"


def batch_of(frames: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    """b t h w c -> b c t h w in [-1, 1]."""
    return from_uint8(torch.from_numpy(frames).permute(0, 4, 1, 2, 3).to(device))


# ---- reading


def prepare(footage: Footage, data: VideoDataConfig, most: int | None = None, fps: float = DEFAULT_FPS) -> Clip:
    """A clip as the model sees it, or its first frames: taken, cut and scaled as those of training are. `fps` is that of arrays
    and pictures, which do not say."""
    clip, size = read(footage, data, most, fps), data.resolution
    boxed = data.fit == "letterbox"
    cut = (letterbox(frame, size, data.background) if boxed else fit(frame, size) for frame in clip.frames)
    return Clip(np.stack(list(cut)), clip.fps)


def one_frame(picture: Footage, data: VideoDataConfig, kind: str) -> Pixels:
    """A picture as the model sees it: h w c."""
    frames = prepare(picture, data, most=2).frames
    if len(frames) != 1:
        name = f" {picture}" if isinstance(picture, (str, Path)) else ""
        raise UserError(f"a {kind}'s image{name} has several frames; expected a picture")
    return frames[0]


def read(footage: Footage, data: VideoDataConfig, most: int | None, fps: float) -> Clip:
    """A file, a `Clip`, a PIL image or an array, with the channels of the data. Of a file those frames are taken that training
    would take, by data.fps or data.stride; arrays and `Clip`s, such as drawn ones, stay as they are."""
    look = Look(data.channels, data.background, side_of(data.resolution, data.zoom, cropped=data.fit == "crop"))
    if isinstance(footage, Image.Image):
        return Clip(look.of_picture(footage)[None], fps)
    if not isinstance(footage, (str, Path)):
        rate, array = (footage.fps, footage.frames) if isinstance(footage, Clip) else (fps, footage)
        return Clip(np.stack([look.of_array(frame) for frame in checked_frames(array)[:most]]), rate)
    with readable():
        return read_clip(
            footage, lambda facts: first_frames(facts, data, most), channels=look.channels, background=look.background,
            min_side=look.min_side,
        )  # fmt: skip


@contextmanager
def readable() -> Iterator[None]:
    """What cannot be read is the user's error."""
    try:
        yield
    except UnreadableClip as error:
        raise UserError(f"{error}; expected a picture, an animation (gif, apng, webp), a video or a folder of frames") from None
    except AvMissing as error:
        raise UserError(str(error)) from None


def first_frames(facts: ClipFacts, data: VideoDataConfig, most: int | None) -> list[int]:
    """All frames that the data's rate or stride takes, or the first ones."""
    count = int(room_from(facts, data.fps, data.stride)[0])
    return frames_from(facts, 0, count if most is None else min(count, most), data.fps, data.stride)


def checked_frames(array: Any) -> Frames:
    """A uint8 array of frames x height x width x 1, 3 or 4, or the user's error; a picture is one frame."""
    found = f"{array.dtype} shaped {list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
    if isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.size:
        whole = array[None, :, :, None] if array.ndim == 2 else array[None] if array.ndim == 3 else array
        if whole.ndim == 4 and whole.shape[3] in (1, 3, 4):
            return whole
    raise UserError(
        f"a clip is {found}; expected a file, a Clip, a PIL image or uint8: frames x height x width x 1, 3 or 4 channels"
    )


# ---- tokens


def encode_clips(tokenizer: Any, clips: Sequence[Frames], device: torch.device) -> Tensor:
    """Clips t h w c -> b k h w ids on the CPU. All are filled up to the longest, and that to whole latent frames, with their last
    frames again: ids of what was there are the same, since a latent frame knows nothing of later ones."""
    stride = tokenizer.time_stride
    length = num_frames(num_latent(max(len(frames) for frames in clips), stride), stride)
    whole = np.stack([filled(frames, length) for frames in clips])
    with full_precision(device):
        parts = np.split(whole, range(size := max(1, CHUNK_FRAMES // length), len(whole), size))
        return torch.cat([tokenizer.encode(batch_of(part, device)).cpu() for part in parts])


def decode_clips(tokenizer: Any, ids: Tensor, fps: float, device: torch.device) -> list[Clip]:
    """b k h w ids -> clips of 1 + stride * (k - 1) frames. Long ones are decoded part by part."""
    made: list[Clip] = []
    steps = max(1, CHUNK_FRAMES // tokenizer.time_stride)  # latent frames at once
    with full_precision(device):
        for rows in ids.long().split(max(1, steps // ids.shape[1])):
            memory, parts = None, []
            for part in rows.to(device).split(steps, dim=1):
                frames, memory = tokenizer.decode_more(part, memory)
                parts.append(to_uint8(frames).cpu())
            made += [Clip(clip, fps) for clip in torch.cat(parts, 2).permute(0, 2, 3, 4, 1).numpy()]  # t h w c
    return made
