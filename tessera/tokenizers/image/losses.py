"""The two turns. The tokenizer's makes the reconstruction and hands it on; the critic's judges that same one.

Every term is a mean over a picture's own values and a sum over pictures, so batches may be cut anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import ImageBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets
from tessera.nn.quantizers import code_counts, code_use
from tessera.nn.similarity import psnr, ssim
from tessera.tokenizers.image.critic import CriticConfig
from tessera.tokenizers.image.model import ImageTokenizer

ADAPTIVE_LIMIT = 1e4  # of the ratio of gradient norms, as in Esser et al. 2021


class ImageLossConfig(Config):
    """Terms of the tokenizer's own loss."""

    l1: float = Field(1.0, ge=0)
    """Weight of the mean absolute error."""
    l2: float = Field(1.0, ge=0)
    """Weight of the mean squared error."""


@dataclass(frozen=True, slots=True)
class ImageLosses:
    """Both turns and the validation measure, for one configuration."""

    terms: ImageLossConfig
    critic: CriticConfig | None
    vocab_size: int

    def tokenizer_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Reconstruct; from the critic's start on, also please it."""
        made = nets["tokenizer"](batch.images)
        picture = made.images.detach().requires_grad_(True)  # the terms are cut off here: their slope is needed by itself
        parts = self.reconstruction_terms(nets, picture, batch.images)
        total = sum_of(parts)
        slope = slope_of(total, picture)
        if self.critic is not None and context.step >= self.critic.start_step:
            plea = -nets["critic"](picture).flatten(1).mean(1)
            push = slope_of(plea, picture)
            weight = self.plea_weight(slope, push)
            total, slope = total + weight * plea, slope + weight.view(-1, 1, 1, 1) * push
            parts |= {"plea": plea, "plea_weight": weight}
        parts["psnr"] = psnr(picture.detach().clamp(-1, 1), batch.images)
        stats = {"codes": code_counts(made.ids, self.vocab_size, batch.valid), **latent_sums(made.latents, batch.valid)}
        return summed(with_slope(total, slope, made.images), parts, batch, stats, hand=made.images.detach())

    def reconstruction_terms(self, nets: Nets, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Weighted terms, one number a picture each."""
        error = (made - real).flatten(1)
        terms = {"l1": self.terms.l1 * error.abs().mean(1), "l2": self.terms.l2 * error.square().mean(1)}
        if "perceptual" in nets:
            terms["perceptual"] = nets["perceptual"](made, real)
        return terms

    def plea_weight(self, pull: Tensor, push: Tensor) -> Tensor:
        """The adversarial weight of each picture: fixed, or the ratio of the two slopes' norms at its reconstruction.

        Esser et al. 2021 (equation 7) take that ratio at the decoder's last layer, over the batch. At the reconstruction it is
        one picture's own, so it does not depend on how batches are cut, and no term is differentiated twice for it.
        """
        assert self.critic is not None
        if not self.critic.adaptive:
            return torch.full_like(push[:, 0, 0, 0], self.critic.weight)
        ratio = pull.flatten(1).norm(dim=1) / push.flatten(1).norm(dim=1).clamp(min=1e-12)
        return self.critic.weight * ratio.clamp(max=ADAPTIVE_LIMIT)

    def critic_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Hinge loss on the pictures that the tokenizer just made; now and then the penalty."""
        assert self.critic is not None
        critic, made = nets["critic"], context.handed["tokenizer"]
        penalty, parts = self.critic.penalty, {}
        if penalty is not None and context.step % penalty.every == 0:
            made_logits = critic(made).flatten(1)
            real_logits, squared_slope = judge_with_slope(critic, batch.images)
            parts["penalty"] = penalty.weight / 2 * penalty.every * squared_slope
        else:
            made_logits, real_logits = critic(torch.cat([made, batch.images])).flatten(1).chunk(2)
        parts["hinge"] = F.relu(1 - real_logits).mean(1) + F.relu(1 + made_logits).mean(1)
        total = sum_of(parts)
        parts |= {"real_logit": real_logits.mean(1), "made_logit": made_logits.mean(1)}
        return summed(total, parts, batch)

    def measure(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Validation: what a user would see, so clamped to the range of pixels."""
        made = nets["tokenizer"](batch.images)
        parts = self.reconstruction_terms(nets, made.images, batch.images)
        total = sum_of(parts)
        seen = made.images.clamp(-1, 1)
        parts |= {"psnr": psnr(seen, batch.images), "ssim": ssim(seen, batch.images)}
        return summed(total, parts, batch, {"codes": code_counts(made.ids, self.vocab_size, batch.valid)})

    @staticmethod
    def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use from summed counts."""
        return code_use(stats["codes"])


def summed(
    total: Tensor, parts: dict[str, Tensor], batch: ImageBatch, stats: dict[str, Tensor] | None = None, hand: Tensor | None = None
) -> Loss:
    """Numbers of pictures to sums over the valid ones."""
    valid = batch.valid.float()
    return Loss(
        (total * valid).sum(),
        valid.sum(),
        {name: (part.detach() * valid).sum() for name, part in parts.items()},
        stats or {},
        hand,
    )


def slope_of(terms: Tensor, picture: Tensor) -> Tensor:
    """Gradient of one number a picture with respect to that picture."""
    return torch.autograd.grad(terms.sum(), picture)[0]


def with_slope(value: Tensor, slope: Tensor, picture: Tensor) -> Tensor:
    """One number a picture whose value and whose gradient at the picture are given."""
    return value.detach() + (slope * (picture - picture.detach())).flatten(1).sum(1)


def judge_with_slope(critic: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the squared gradient of their mean at each picture, |g|^2.

    The gradient of |g|^2 with respect to the weights is that of 2 <g, d> with d = g held fixed, and <g, d> is a derivative along
    a direction, which the critic computes beside its logits. So no gradient is differentiated: the critic stays compiled, and
    torch's second derivative of a convolution, whose kernel is as large as the picture, is avoided (27 ms for one layer).
    """
    with frozen(critic):
        leaf = images.detach().requires_grad_(True)
        slope = slope_of(critic(leaf).flatten(1).mean(1), leaf)
    logits, along = critic(images, slope).flatten(1).chunk(2)
    product = along.mean(1)
    return logits, slope.flatten(1).square().sum(1) + 2 * (product - product.detach())


@contextlib.contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """Without gradients of its parameters."""
    held = [p for p in net.parameters() if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def latent_sums(latents: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Count, sum and sum of squares of each latent channel, for `follow_latents`."""
    latents = latents.detach().float()
    weights = valid.float().view(-1, 1, 1, 1)
    return {
        "latent_count": valid.float().sum() * latents[0, ..., 0].numel(),
        "latent_sum": (latents * weights).sum((0, 1, 2)),
        "latent_square": (latents.square() * weights).sum((0, 1, 2)),
    }


def follow_latents(nets: Nets, stats: Mapping[str, Tensor], step: int) -> None:
    """`Stage.after`: the tokenizer's running mean and deviation of its latents, from sums over the whole global batch."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, ImageTokenizer)
    mean = stats["latent_sum"] / stats["latent_count"]
    variance = (stats["latent_square"] / stats["latent_count"] - mean.square()).clamp(min=0)
    share = max(0.05, 1 / (step + 1))  # the plain mean of the first twenty steps, then a moving one
    variance += (1 - share) * (mean - tokenizer.latent_mean).square()  # between batches too, or small ones would look narrow
    tokenizer.latent_mean.lerp_(mean.float(), share)
    tokenizer.latent_variance.lerp_(variance.float(), share)


def sum_of(parts: dict[str, Tensor]) -> Tensor:
    """Adds up terms."""
    return torch.stack(list(parts.values())).sum(0)
