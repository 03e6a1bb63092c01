"""A CLIP model from the user's disk as the pair: pictures and captions in, vectors on one sphere out. Nothing is downloaded.

`transformers` is imported when a model is loaded, not before: it takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tessera.config import Config, UserError
from tessera.text.frozen import TOKENIZER_FILES, explained, quiet, refuse_made_up

MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's models, RGB in [0, 1]
EXPECTED = (
    "expected a folder that `save_pretrained` wrote, with config.json, weights, preprocessor_config.json and "
    + TOKENIZER_FILES["clip"]
)


class ClipConfig(Config):
    """A frozen CLIP model, both towers, from a folder of yours."""

    kind: Literal["clip"] = "clip"
    """The kind of pair."""
    path: str = Field(min_length=1)
    """Folder that `save_pretrained` wrote (config.json, weights, tokenizer)."""


@dataclass(frozen=True, slots=True, eq=False)
class FrozenClip:
    """Both towers of a CLIP model. A row never depends on the others that go through with it."""

    width: int
    resolution: int
    fingerprint: str  # another one when the weights or the way of reading pictures differ
    model: Any
    tokenizer: Any
    mean: Tensor  # 3 1 1
    deviation: Tensor  # 3 1 1

    @torch.inference_mode()
    def pictures(self, images: Tensor) -> Tensor:
        """b c h w in [-1, 1] of any size, of which the middle square counts, grey or RGB -> b e of length 1, fp32"""
        side = min(images.shape[-2:])
        top, left = ((length - side) // 2 for length in images.shape[-2:])
        images = images[..., top : top + side, left : left + side].float()
        if images.shape[-1] != self.resolution:
            images = F.interpolate(images, size=(self.resolution, self.resolution), mode="bicubic", antialias=True).clamp(-1, 1)
        pixels = ((images + 1) / 2 - self.mean.to(images.device)) / self.deviation.to(images.device)
        with torch.autocast(images.device.type, enabled=False):
            pooled = self.model.vision_model(pixel_values=pixels).pooler_output
            return F.normalize(self.model.visual_projection(pooled), dim=-1)

    @torch.inference_mode()
    def captions(self, captions: Sequence[str | None]) -> Tensor:
        """b captions -> b e of length 1, fp32, on the model's device; an absent or blank one is 0."""
        told = torch.tensor([bool(caption and caption.strip()) for caption in captions], device=self.model.device)
        texts, most = [(caption or "").strip() for caption in captions], self.model.config.text_config.max_position_embeddings
        with quiet():
            pieces = self.tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
        with torch.autocast(self.model.device.type, enabled=False):
            ids, mask = (pieces[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
            pooled = self.model.text_model(input_ids=ids, attention_mask=mask).pooler_output
            return F.normalize(self.model.text_projection(pooled), dim=-1) * told[:, None]


def load_clip(path: Path | str, device: torch.device) -> FrozenClip:
    """Reads the model, whole, in fp32 and in eval mode."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"{path} has no config.json; {EXPECTED}")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("a CLIP model needs the package transformers, which is missing; pip install 'tessera-gen[text]'")
    mean, deviation = _pixel_facts(folder)
    with quiet(), explained(f"the CLIP model at {path}", EXPECTED):
        import transformers

        facts = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if facts.model_type != "clip":
            raise UserError(f"{path} is a {facts.model_type!r} model, expected one with both towers of CLIP; {EXPECTED}")
        loaded: Any = transformers.CLIPModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        model, report = loaded
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        resolution, width = int(facts.vision_config.image_size), int(facts.projection_dim)
        if resolution < 1:
            raise ValueError(f"vision_config.image_size is {resolution}")
    if lacking := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise UserError(f"{path} lacks {len(lacking)} weights of the model ({', '.join(lacking[:3])}); expected a whole one")
    refuse_made_up(tokenizer, path, "clip")
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    found = hashlib.sha256(repr([resolution, mean, deviation]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return FrozenClip(
        width, resolution, found.hexdigest(), model.requires_grad_(False).eval().to(device), tokenizer,
        torch.tensor(mean).view(3, 1, 1), torch.tensor(deviation).view(3, 1, 1),
    )  # fmt: skip


def clip_width(path: Path | str) -> int:
    """Channels of its embeddings, without reading its weights."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        raise UserError(f"{path} has no config.json; {EXPECTED}")
    try:
        width = int(json.loads(file.read_text(encoding="utf8"))["projection_dim"])
        if width < 1:
            raise ValueError(f"{width} channels")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file} does not say projection_dim ({type(error).__name__}); {EXPECTED}") from None
    return width


def _pixel_facts(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that the model was trained on."""
    path = folder / "preprocessor_config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
        mean, deviation = (_three_numbers(facts, name, usual) for name, usual in (("image_mean", MEAN), ("image_std", DEVIATION)))
        if min(deviation) <= 0:
            raise ValueError(f"image_std {list(deviation)}, which is not above 0")
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be used: {error}; expected an object with image_mean and image_std, three numbers each, as the model "
            "was trained with"
        ) from None
    return mean, deviation


def _three_numbers(facts: Any, name: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    """One for each channel; ValueError says what is there instead."""
    if not isinstance(facts, dict):
        raise ValueError(f"it holds {facts!r:.60}")
    found = facts.get(name, usual)
    numbers = isinstance(found, (list, tuple)) and all(isinstance(value, (int, float)) for value in found)
    if not numbers or len(found) != 3 or not all(map(math.isfinite, found)):
        raise ValueError(f"{name} is {found!r:.60}")
    return tuple(map(float, found))
