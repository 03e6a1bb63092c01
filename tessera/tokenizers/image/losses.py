"""The two turns. The tokenizer's makes the reconstruction and hands it on; the critic's judges that same one.

Every term is a mean over a picture's own values and a sum over pictures, so batches may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera.batches import ImageBatch
from tessera.config import Config
from tessera.contracts import Context, Loss, Nets, frozen
from tessera.nn.perceptual import PerceptualConfig
from tessera.nn.quantizers import Quantized, code_use
from tessera.nn.similarity import psnr, ssim
from tessera.tokenizers.image.critic import CriticConfig, PastLogits
from tessera.tokenizers.image.model import ImageTokenizer, LatentTokenizer

ADAPTIVE_LIMIT = 1e4  # of the ratio of gradient norms, as in Esser et al. 2021
QUANTIZER = "quantizer/"  # in front of the names of the quantizer's own sums


class ImageLossConfig(Config):
    """Terms of the tokenizer's own loss."""

    l1: float = Field(1.0, ge=0)
    """Weight of the mean absolute error."""
    l2: float = Field(1.0, ge=0)
    """Weight of the mean squared error."""
    perceptual: PerceptualConfig | None = None
    """Distance between features of a fixed VGG16, from a local file; null: none."""


@dataclass(frozen=True, slots=True)
class ImageLosses:
    """Both turns and the validation measure, for one configuration."""

    terms: ImageLossConfig
    critic: CriticConfig | None

    def tokenizer_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Reconstruct; from the critic's start on, also please it."""
        tokenizer = tokenizer_of(nets)
        made = tokenizer(batch.images, batch.valid)
        picture = made.images.detach().requires_grad_(True)  # the terms are cut off here: their slope is needed by itself
        parts = self.reconstruction_terms(nets, picture, batch.images)
        pleads = self.pleads(context.step)
        total = self.driven(parts, picture, made.images, self.plea(nets["critic"](picture).flatten(1)) if pleads else None)
        for name, term in made.quantized.terms.items():
            total, parts[name] = total + term, term
        parts["psnr"] = psnr(picture.detach().clamp(-1, 1), batch.images)
        parts |= {name: fact.expand(len(batch.valid)) for name, fact in tokenizer.quantizer.facts().items()}
        stats = tokenizer_sums(tokenizer, made.latents, made.quantized, batch.valid)
        return summed(total, parts, batch.valid, stats, hand=made.images.detach())

    def pleads(self, step: int) -> bool:
        """Whether the tokenizer hears the critic at a step."""
        return self.critic is not None and step >= self.critic.start_step

    def driven(self, parts: dict[str, Tensor], leaf: Tensor, made: Tensor, plea: Tensor | None) -> Tensor:
        """One number a sample whose gradient at what was made is that of the parts and, weighed, of the plea, both taken at a
        leaf of the same value. The plea joins the parts."""
        total = sum_of(parts)
        slope = slope_of(total, leaf)
        if plea is not None:
            push = slope_of(plea, leaf)
            weight = self.plea_weight(slope, push)
            total, slope = total + weight * plea, slope + weight.view(-1, *(1,) * (push.ndim - 1)) * push
            parts |= {"plea": plea, "plea_weight": weight}
        return with_slope(total, slope, made)

    def reconstruction_terms(self, nets: Nets, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Weighted terms, one number a picture each."""
        terms = self.pixel_terms(made, real)
        return terms | {"perceptual": self.perceptual_term(nets, made, real)} if "perceptual" in nets else terms

    def pixel_terms(self, made: Tensor, real: Tensor) -> dict[str, Tensor]:
        """Those that need no net."""
        error = (made - real).flatten(1)
        return {"l1": self.terms.l1 * error.abs().mean(1), "l2": self.terms.l2 * error.square().mean(1)}

    def perceptual_term(self, nets: Nets, made: Tensor, real: Tensor) -> Tensor:
        """The weighted distance of features."""
        weight = 1.0 if self.terms.perceptual is None else self.terms.perceptual.weight
        return weight * nets["perceptual"](made, real)

    def plea(self, logits: Tensor) -> Tensor:
        """The tokenizer's side: b n logits of made pictures -> b (Lim and Ye 2017; Goodfellow et al. 2014, section 3)."""
        assert self.critic is not None
        return (-logits if self.critic.loss == "hinge" else F.softplus(-logits)).mean(1)

    def contest(self, real_logits: Tensor, made_logits: Tensor) -> Tensor:
        """The critic's side: b n logits of each -> b."""
        assert self.critic is not None
        if self.critic.loss == "hinge":
            return F.relu(1 - real_logits).mean(1) + F.relu(1 + made_logits).mean(1)
        return F.softplus(-real_logits).mean(1) + F.softplus(made_logits).mean(1)

    def plea_weight(self, pull: Tensor, push: Tensor) -> Tensor:
        """The adversarial weight of each picture: fixed, or the ratio of the two slopes' norms at its reconstruction.

        Esser et al. 2021 (equation 7) take that ratio at the decoder's last layer, over the batch. At the reconstruction it is
        one picture's own, so it does not depend on how batches are cut, and no term is differentiated twice for it.
        """
        assert self.critic is not None
        if not self.critic.adaptive:
            return push.new_full((len(push),), self.critic.weight)
        ratio = pull.flatten(1).norm(dim=1) / push.flatten(1).norm(dim=1).clamp(min=1e-12)
        return self.critic.weight * ratio.clamp(max=ADAPTIVE_LIMIT)

    def critic_turn(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Judges the pictures that the tokenizer just made; now and then the penalty."""
        critic = nets["critic"]
        parts, seen = self.judged(critic, context.handed["tokenizer"], batch.images, context.step)
        return judged_sums(critic, parts, seen, batch.valid)

    def judged(
        self, critic: nn.Module, made: Tensor, real: Tensor, step: int, mean: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The critic's terms and its mean logits, one number a row of logits each; the penalty is of `mean` of all logits."""
        assert self.critic is not None
        penalty, parts = self.critic.penalty, {}
        if penalty is not None and step % penalty.every == 0:
            made_logits = critic(made).flatten(1)
            real_logits, squared_slope = judge_with_slope(critic, real, mean)
            parts["penalty"] = penalty.weight / 2 * penalty.every * squared_slope
        else:
            made_logits, real_logits = critic(torch.cat([made, real])).flatten(1).chunk(2)
        parts[self.critic.loss] = self.contest(real_logits, made_logits)
        if (past := past_of(critic)) is not None:
            parts["lecam"] = past.penalty(real_logits, made_logits)
        return parts, {"real_logit": real_logits.mean(1), "made_logit": made_logits.mean(1)}

    def measure(self, nets: Nets, batch: ImageBatch, context: Context) -> Loss:
        """Validation: what a user would see, so clamped to the range of pixels. Of the quantizer's terms only the commitment: the
        entropy of a batch is no mean over samples."""
        tokenizer = tokenizer_of(nets)
        made = tokenizer(batch.images, batch.valid)
        parts = self.reconstruction_terms(nets, made.images, batch.images)
        total = sum_of(parts)
        seen = made.images.clamp(-1, 1)
        parts |= {"psnr": psnr(seen, batch.images), "ssim": ssim(seen, batch.images)}
        parts |= {name: term for name, term in made.quantized.terms.items() if name == "commitment"}
        return summed(total, parts, batch.valid, {"codes": tokenizer.quantizer.counts(made.ids, batch.valid)})

    @staticmethod
    def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use from summed counts."""
        return code_use(stats["codes"])


def summed(
    total: Tensor, parts: dict[str, Tensor], valid: Tensor, stats: dict[str, Tensor] | None = None, hand: Tensor | None = None
) -> Loss:
    """Numbers of samples to sums over the valid ones."""
    counted = valid.float()
    return Loss(
        (total * counted).sum(),
        counted.sum(),
        {name: (part.detach() * counted).sum() for name, part in parts.items()},
        stats or {},
        hand,
    )


def judged_sums(critic: nn.Module, parts: dict[str, Tensor], seen: dict[str, Tensor], valid: Tensor) -> Loss:
    """The critic's turn from numbers of samples; with LeCam its mean logits are statistics, too."""
    judged = summed(sum_of(parts), parts | seen, valid)
    sums = {name: judged.parts[name] for name in seen} | {"judged": judged.weight}
    return judged if past_of(critic) is None else replace(judged, stats=sums)


def slope_of(terms: Tensor, picture: Tensor) -> Tensor:
    """Gradient of one number a picture with respect to that picture."""
    return torch.autograd.grad(terms.sum(), picture)[0]


def with_slope(value: Tensor, slope: Tensor, picture: Tensor) -> Tensor:
    """One number a picture whose value and whose gradient at the picture are given."""
    return value.detach() + (slope * (picture - picture.detach())).flatten(1).sum(1)


def judge_with_slope(critic: nn.Module, images: Tensor, mean: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Logits, and the squared gradient of their mean (of each picture, or another one) at each picture, |g|^2.

    The gradient of |g|^2 with respect to the weights is that of 2 <g, d> with d = g held fixed, and <g, d> is a derivative along
    a direction, which the critic computes beside its logits. So no gradient is differentiated: the critic stays compiled, and
    torch's second derivative of a convolution, whose kernel is as large as the picture, is avoided (27 ms for one layer).
    """
    mean = mean or (lambda logits: logits.mean(1))
    with frozen(critic.parameters()):
        leaf = images.detach().requires_grad_(True)
        slope = slope_of(mean(critic(leaf).flatten(1)), leaf)
    logits, along = critic(images, slope).flatten(1).chunk(2)
    product = mean(along)
    return logits, slope.flatten(1).square().sum(1) + 2 * (product - product.detach())


def tokenizer_of(nets: Nets) -> ImageTokenizer:
    """The trained net, by its type."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, ImageTokenizer)
    return tokenizer


def past_of(critic: nn.Module) -> PastLogits | None:
    """What LeCam follows, where it is used."""
    past = critic.past
    assert past is None or isinstance(past, PastLogits)
    return past


def tokenizer_sums(tokenizer: LatentTokenizer, latents: Tensor, quantized: Quantized, valid: Tensor) -> dict[str, Tensor]:
    """What `follow` and the log need: counts of codes, sums over latents, and the quantizer's own under its name."""
    own = tokenizer.quantizer.sums(quantized.prepared, quantized.ids, valid)
    return {
        "codes": tokenizer.quantizer.counts(quantized.ids, valid),
        **latent_sums(latents, valid),
        **{QUANTIZER + name: value for name, value in own.items()},
    }


def follow(nets: Nets, stats: Mapping[str, Tensor], step: int) -> None:
    """`Stage.after`: all that is learned from sums over the whole global batch instead of by gradients."""
    follow_latents(nets, stats, step)
    own = {name.removeprefix(QUANTIZER): value for name, value in stats.items() if name.startswith(QUANTIZER)}
    latent_tokenizer_of(nets).quantizer.follow(own, step)
    if "judged" in stats:  # in steps with a critic's turn, with LeCam
        past = past_of(nets["critic"])
        assert past is not None
        past.follow(stats["real_logit"] / stats["judged"], stats["made_logit"] / stats["judged"])


def latent_tokenizer_of(nets: Nets) -> LatentTokenizer:
    """The trained net, of pictures or of clips."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, LatentTokenizer)
    return tokenizer


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
    """The tokenizer's running mean and deviation of its latents."""
    tokenizer = latent_tokenizer_of(nets)
    mean = stats["latent_sum"] / stats["latent_count"]
    variance = (stats["latent_square"] / stats["latent_count"] - mean.square()).clamp(min=0)
    share = max(0.05, 1 / (step + 1))  # the plain mean of the first twenty steps, then a moving one
    variance += (1 - share) * (mean - tokenizer.latent_mean).square()  # between batches too, or small ones would look narrow
    tokenizer.latent_mean.lerp_(mean.float(), share)
    tokenizer.latent_variance.lerp_(variance.float(), share)


def sum_of(parts: dict[str, Tensor]) -> Tensor:
    """Adds up terms."""
    return torch.stack(list(parts.values())).sum(0)
