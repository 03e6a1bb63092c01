"""A CLIP model from the user's disk as the pair: pictures and captions in, vectors on one sphere out. Nothing is downloaded.

`transformers` is imported when a model is loaded, not before: it takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from tessera.config import Config, UserError
from tessera.text.frozen import quiet

MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of OpenAI's models, RGB in [0, 1]
EXPECTED = "expected a folder that `save_pretrained` wrote, with config.json, weights, tokenizer and preprocessor_config.json"


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
    try:
        with quiet():
            import transformers

            facts = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if facts.model_type != "clip":
                raise UserError(f"{path} is a {facts.model_type!r} model, expected one with both towers of CLIP; {EXPECTED}")
            loaded: Any = transformers.CLIPModel.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
            model, report = loaded
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        mean, deviation = _pixel_facts(folder)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the CLIP model at {path} cannot be read: {' '.join(str(error).split())[:300]}; {EXPECTED}") from None
    if lacking := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise UserError(f"{path} lacks {len(lacking)} weights of the model ({', '.join(lacking[:3])}); expected a whole one")
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    resolution = int(facts.vision_config.image_size)
    found = hashlib.sha256(repr([resolution, mean, deviation]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return FrozenClip(
        int(facts.projection_dim), resolution, found.hexdigest(), model.requires_grad_(False).eval().to(device), tokenizer,
        torch.tensor(mean).view(3, 1, 1), torch.tensor(deviation).view(3, 1, 1),
    )  # fmt: skip


def clip_width(path: Path | str) -> int:
    """Channels of its embeddings, without reading its weights."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        raise UserError(f"{path} has no config.json; {EXPECTED}")
    try:
        return int(json.loads(file.read_text(encoding="utf8"))["projection_dim"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} does not say projection_dim ({type(error).__name__}); {EXPECTED}") from None


def _pixel_facts(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels that the model was trained on."""
    path = folder / "preprocessor_config.json"
    facts = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    mean = tuple(map(float, facts.get("image_mean", MEAN)))
    deviation = tuple(map(float, facts.get("image_std", DEVIATION)))
    if len(mean) != 3 or len(deviation) != 3 or min(deviation) <= 0:
        raise ValueError(f"{path.name} has image_mean {mean} and image_std {deviation}; expected three numbers each")
    return mean, deviation
