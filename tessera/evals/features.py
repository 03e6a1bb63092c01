"""Named extractors: media in, features n d out. A distance is only comparable with one of the same extractor, so its name and the
hash of its weights stand in every result.

`inception` wraps the well-known Inception file where the caller has one; only measures on it are called FID, KID and IS.
Otherwise a small net is fitted to the *training* split: it predicts the words of the captions (`words-1a2b3c4d`), or without
captions how a picture was turned and blurred (`turns-1a2b3c4d`; Gidaris et al. 2018); features are its last hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera.config import UserError
from tessera.contracts import Context, Loss, Nets
from tessera.evals.clip_nets import ClipNet, run_tower
from tessera.evals.distances import Features
from tessera.evals.nets import FitBatch, Fitting, PictureNet, Pictures, fit_net, shrink, side_for, weights_hash
from tessera.evals.words import telling_words, which_words
from tessera.randomness import uniform

WIDTH = 64  # of the features: small, so that a few hundred samples fill a covariance
NUM_TURNS = 8  # four quarter turns, sharp or blurred
KINDS: Mapping[str, type[PictureNet] | type[ClipNet]] = {
    "words": PictureNet, "turns": PictureNet, "clip-words": ClipNet, "clip-turns": ClipNet,
}  # fmt: skip
INCEPTION = "inception"
_CHUNK = 64  # pictures that go through Inception at once


@dataclass(frozen=True, slots=True)
class Extractor:
    """Media -> features, with a name that pins its weights."""

    name: str
    sha256: str
    extract: Callable[[Any], Features]
    net: nn.Module | None = None  # of the fitted kinds: what `save_extractor` writes
    classify: Callable[[Any], Features] | None = None  # pictures -> n v, chances of classes; None: it knows no classes

    def measure_name(self, kind: str) -> str:
        """`kind` is FD, KD or IS. On Inception these are FID, KID and IS; on any other net that would be a false claim."""
        if self.name == INCEPTION:
            return {"FD": "FID", "KD": "KID", "IS": "IS"}[kind]
        return f"{kind}-{self.name}"


class FeatureNet(nn.Module):
    """A trunk whose output are the features, and a linear head for the task it is fitted by."""

    def __init__(self, trunk: PictureNet | ClipNet, num_targets: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.width, num_targets)

    def forward(self, x: Tensor) -> Tensor:
        """b c h w, or b c t h w of clips -> b targets"""
        return self.head(F.silu(self.trunk(x)))


def fit_extractor(pictures: Pictures, captions: Sequence[str | None], fitting: Fitting) -> Extractor:
    """From pictures and captions of the training split; by words where captions differ in two or more, else by turns."""
    if not len(pictures):
        raise ValueError("an extractor is fitted to training pictures; got none")
    channels, side = pictures.shape[3], side_for(pictures.shape[1])
    words = telling_words(captions)
    by_words = len(words) >= 2
    targets = torch.from_numpy(which_words(captions, words)) if by_words else torch.zeros(len(pictures), 1)
    net = fit_net(
        lambda: FeatureNet(PictureNet(channels, side, WIDTH), len(words) if by_words else NUM_TURNS),
        words_loss if by_words else turns_loss,
        shrink(pictures, side),
        targets,
        fitting,
    )
    return fitted("words" if by_words else "turns", net)


def fitted(kind: str, net: nn.Module) -> Extractor:
    """A fitted net, named by its kind and its weights."""
    assert isinstance(net, FeatureNet)
    trunk, digest = net.trunk, weights_hash(net)
    classify = partial(word_chances, net) if kind == "words" else None
    return Extractor(f"{kind}-{digest[:8]}", digest, lambda media: run_tower(trunk, media), net, classify)


@torch.no_grad()
def word_chances(net: FeatureNet, pictures: Pictures) -> Features:
    """n v: the chance of each word, where one of the caption's is drawn. The net tells of every word whether it is there."""
    features = torch.from_numpy(run_tower(net.trunk, pictures)).to(net.head.weight.device)
    there = net.head(F.silu(features)).double().sigmoid()
    return (there / there.sum(1, keepdim=True)).cpu().numpy()


def words_loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
    """Binary cross-entropy for every word, summed."""
    logits = nets["net"](batch.images)
    total = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="sum")
    return Loss(total, torch.tensor(float(len(logits)), device=logits.device))


def turns_loss(nets: Nets, batch: FitBatch, context: Context) -> Loss:
    """Cross-entropy of which quarter turn, and whether blurred; drawn for each place in the stream."""
    drawn = (uniform(context.seed, context.positions, 1)[:, 0] * NUM_TURNS).long()
    logits = nets["net"](turned(batch.images, drawn))
    return Loss(F.cross_entropy(logits, drawn, reduction="sum"), torch.tensor(float(len(logits)), device=logits.device))


def turned(images: Tensor, drawn: Tensor) -> Tensor:
    """b c h w, each turned by drawn % 4 quarters and, from 4 on, blurred by a 3 x 3 mean."""
    versions = [torch.rot90(images, quarters, (2, 3)) for quarters in range(4)]
    versions += [F.avg_pool2d(version, 3, stride=1, padding=1, count_include_pad=False) for version in versions]
    return torch.stack(versions, 1)[torch.arange(len(images), device=images.device), drawn]


def save_extractor(extractor: Extractor, path: Path) -> None:
    """As safetensors, so that a second run, or another machine, is measured with the same one."""
    if not isinstance(extractor.net, FeatureNet):
        raise ValueError(f"the extractor {extractor.name} was not fitted here; keep the file it came from")
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in extractor.net.state_dict().items()}
    trunk = extractor.net.trunk
    facts = {"kind": extractor.name.rpartition("-")[0], "channels": str(trunk.channels), "side": str(trunk.side)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=facts)


def load_extractor(path: Path, device: torch.device, medium: Literal["picture", "clip"] = "picture") -> Extractor:
    """What `save_extractor` wrote, under the same name."""
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        trunk_type = KINDS[facts["kind"]]
        net = FeatureNet(trunk_type(int(facts["channels"]), int(facts["side"]), WIDTH), len(tensors["head.bias"]))
        net.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"evaluate.extractor: {path} is no extractor that an evaluation has saved ({type(error).__name__}: {error}); "
            "name the extractor.safetensors of another evaluation, or set evaluate.extractor=null"
        ) from None
    if (trunk_type is ClipNet) != (medium == "clip"):
        raise UserError(f"evaluate.extractor: {path} is an extractor of another medium; name one of {medium}s")
    return fitted(facts["kind"], net.to(device).eval().requires_grad_(False))


def inception_extractor(module: nn.Module, sha256: str) -> Extractor:
    """Around the loaded TorchScript file that StyleGAN's authors publish (inception-2015-12-05.pt): uint8 b 3 h w in, chances of
    1008 classes out, or 2048 features with return_features=True. It scales pictures to 299 x 299 itself, and scaling them here as
    well would change the number. The caller loads it: TorchScript is a program, and nothing that tessera reads by itself can run
    code."""
    module.eval()
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def run(pictures: Pictures, **how: bool) -> Features:
        colours = pictures.repeat(3, axis=3) if pictures.shape[3] == 1 else pictures[..., :3]
        parts = torch.from_numpy(np.ascontiguousarray(colours.transpose(0, 3, 1, 2))).split(_CHUNK)
        return torch.cat([module(part.to(device), **how).float().cpu() for part in parts]).numpy()

    classify = partial(run, no_output_bias=True)  # as the score was first computed
    return Extractor(INCEPTION, sha256, partial(run, return_features=True), classify=classify)
