"""The two turns on clips: the image tokenizer's terms on frames, and one on how frames change.

Every term is a mean over a clip's own frames (and over a frame's own values), and a sum over clips; what lies behind a clip's end
is in none. So batches may be cut anywhere and filled up with anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from tessera.batches import VideoBatch, num_latent
from tessera.contracts import Context, Loss, Nets
from tessera.nn.quantizers import code_use
from tessera.nn.similarity import psnr, ssim
from tessera.randomness import mix, uniform
from tessera.tokenizers.image.losses import ImageLossConfig, ImageLosses, judged_sums, sum_of, summed, tokenizer_sums
from tessera.tokenizers.video.critic import ClipCriticConfig, FrameCriticConfig, frames_of
from tessera.tokenizers.video.model import VideoReconstruction, VideoTokenizer, held

SEEN = 1  # the stream of numbers that choose frames


class VideoLossConfig(ImageLossConfig):
    """Terms of the tokenizer's own loss."""

    l1: float = Field(0.1, ge=0)
    """Weight of the mean absolute error. Little: where most of a frame is background, its many small errors would outweigh those
    of what moves, and learning takes longer."""
    temporal: float = Field(0.1, ge=0)
    """Weight of the mean absolute error of the change from frame to frame, which punishes flicker."""
    seen_frames: int | None = Field(4, ge=1)
    """Random frames of each clip, anew at each step, that the perceptual distance and a critic of frames see; null: all."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Some frames of each clip."""

    rows: Tensor | None  # b n: places of the frames among all of the batch, (b t); None: all frames
    weights: Tensor  # b n: 1, or 0 where a clip has fewer

    @classmethod
    def choose(cls, mask: Tensor, num: int | None, context: Context) -> Sight:
        """num different frames of each clip (mask b t), a function of step and sample; None: all."""
        size, length = mask.shape
        if num is None or num >= length:
            return cls(None, mask.float())
        scores = uniform(mix(context.seed, context.step) >> 1, context.positions, length, SEEN)
        chosen = torch.where(mask, scores, -1).topk(num, dim=1).indices
        return cls(chosen + length * torch.arange(size, device=mask.device)[:, None], mask.gather(1, chosen).float())

    def of(self, clips: Tensor) -> Tensor:
        """b c t h w -> (b n) c h w"""
        pictures = frames_of(clips)
        return pictures if self.rows is None else pictures.index_select(0, self.rows.flatten())


@dataclass(frozen=True, slots=True)
class VideoLosses:
    """Both turns and the validation measure, for one configuration."""

    terms: VideoLossConfig
    critic: FrameCriticConfig | ClipCriticConfig | None

    @property
    def pictures(self) -> ImageLosses:
        """The same terms for pictures."""
        return ImageLosses(self.terms, self.critic)

    def tokenizer_turn(self, nets: Nets, batch: VideoBatch, context: Context) -> Loss:
        """Reconstruct; from the critic's start on, also please it."""
        tokenizer, real = tokenizer_of(nets), held(batch.frames, batch.lengths)
        there = latents_there(batch, tokenizer)
        made = tokenizer(real, there & batch.valid[:, None])
        clip = made.frames.detach().requires_grad_(True)  # the terms are cut off here: their slope is needed by itself
        sight = Sight.choose(batch.mask, self.terms.seen_frames, context)
        parts = self.reconstruction_terms(nets, clip, real, batch.mask, sight)
        plea = self.plea(nets, clip, batch.mask, sight) if self.pictures.pleads(context.step) else None
        total = self.pictures.driven(parts, clip, made.frames, plea)
        for name, term in made.quantized.terms.items():
            parts[name] = clip_mean(term, there)
            total = total + parts[name]
        parts["psnr"] = clip_mean(psnr(frames_of(clip.detach().clamp(-1, 1)), frames_of(real)), batch.mask)
        parts |= {name: fact.expand(len(batch.valid)) for name, fact in tokenizer.quantizer.facts().items()}
        return summed(total, parts, batch.valid, latent_stats(tokenizer, made, there, batch.valid), hand=made.frames.detach())

    def reconstruction_terms(self, nets: Nets, made: Tensor, real: Tensor, mask: Tensor, sight: Sight) -> dict[str, Tensor]:
        """Weighted terms, one number a clip each."""
        by_frame = self.pictures.pixel_terms(frames_of(made), frames_of(real))
        terms = {name: clip_mean(term, mask) for name, term in by_frame.items()}
        terms["temporal"] = self.terms.temporal * unsteadiness(made, real, mask)
        if "perceptual" in nets:
            distances = self.pictures.perceptual_term(nets, sight.of(made), sight.of(real))
            terms["perceptual"] = clip_mean(distances, sight.weights)
        return terms

    def plea(self, nets: Nets, made: Tensor, mask: Tensor, sight: Sight) -> Tensor:
        """The adversarial term of each clip, unweighted."""
        seen, weights = self.shown(made, mask, sight)
        return clip_mean(self.pictures.plea(nets["critic"](seen).flatten(1)), weights)

    def shown(self, clips: Tensor, mask: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """What the critic sees of clips, and the weights, b n, of its rows of logits, (b n)."""
        return (clips, mask.float()) if isinstance(self.critic, ClipCriticConfig) else (sight.of(clips), sight.weights)

    def critic_turn(self, nets: Nets, batch: VideoBatch, context: Context) -> Loss:
        """Judges the clips that the tokenizer just made, or the same frames of them that it was judged by."""
        critic, sight = nets["critic"], Sight.choose(batch.mask, self.terms.seen_frames, context)
        made, _ = self.shown(context.handed["tokenizer"], batch.mask, sight)
        real, weights = self.shown(held(batch.frames, batch.lengths), batch.mask, sight)

        def mean(logits: Tensor) -> Tensor:
            """The penalty is of what the critic sees as one: a clip, or a frame."""
            by_row = logits.mean(1)
            return clip_mean(by_row, weights) if isinstance(self.critic, ClipCriticConfig) else by_row

        parts, seen = self.pictures.judged(critic, made, real, context.step, mean)
        parts, seen = ({name: clip_mean(value, weights) for name, value in some.items()} for some in (parts, seen))
        return judged_sums(critic, parts, seen, batch.valid)

    def measure(self, nets: Nets, batch: VideoBatch, context: Context) -> Loss:
        """Validation, of all frames, clamped to the range of pixels: what a user would see."""
        tokenizer, mask = tokenizer_of(nets), batch.mask
        real, there = held(batch.frames, batch.lengths), latents_there(batch, tokenizer)
        made = tokenizer(real, there & batch.valid[:, None])
        parts = self.reconstruction_terms(nets, made.frames, real, mask, Sight.choose(mask, None, context))
        total, seen = sum_of(parts), made.frames.clamp(-1, 1)
        likeness = {"psnr": psnr(frames_of(seen), frames_of(real)), "ssim": ssim(frames_of(seen), frames_of(real))}
        parts |= {name: clip_mean(value, mask) for name, value in likeness.items()}
        parts |= {name: clip_mean(term, there) for name, term in made.quantized.terms.items() if name == "commitment"}
        moving = (batch.lengths > 1) & batch.valid
        stats = {
            "codes": tokenizer.quantizer.counts(made.quantized.ids, (there & batch.valid[:, None]).flatten()),
            "flicker": (unsteadiness(seen, real, mask).detach() * moving).sum(),
            "moving": moving.float().sum(),
        }
        return summed(total, parts, batch.valid, stats)

    @staticmethod
    def digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
        """Codebook use from summed counts; of validation the flicker, over clips of two frames or more, if there are any."""
        numbers = code_use(stats["codes"])
        if "moving" in stats and stats["moving"] > 0:
            numbers["flicker"] = float(stats["flicker"] / stats["moving"])
        return numbers


def unsteadiness(made: Tensor, real: Tensor, mask: Tensor) -> Tensor:
    """b: mean absolute difference between how made and how real frames change, over pairs of a clip's frames; 0 of one frame."""
    change = (made - real).diff(dim=2).abs().mean((1, 3, 4))
    return clip_mean(change, mask[:, 1:])


def clip_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Numbers of frames, b t or (b t), to their weighted means, b; a number of a clip stands for all its frames. No weight: 0."""
    weights = weights.float()
    return (values.reshape(len(weights), -1) * weights).sum(1) / weights.sum(1).clamp(min=1)


def latents_there(batch: VideoBatch, tokenizer: VideoTokenizer) -> Tensor:
    """b k bool: the latent frames that belong to each clip."""
    most = num_latent(batch.frames.shape[2], tokenizer.time_stride)
    return torch.arange(most, device=batch.lengths.device) < num_latent(batch.lengths, tokenizer.time_stride)[:, None]


def latent_stats(tokenizer: VideoTokenizer, made: VideoReconstruction, there: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Sums over the latent frames that belong to valid clips."""
    return tokenizer_sums(tokenizer, made.latents.flatten(0, 1), made.quantized, (there & valid[:, None]).flatten())


def tokenizer_of(nets: Nets) -> VideoTokenizer:
    """The trained net, by its type."""
    tokenizer = nets["tokenizer"]
    assert isinstance(tokenizer, VideoTokenizer)
    return tokenizer
