"""The masked generator as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import nn

from tessera.config import Config, OptimConfig, UserError
from tessera.contracts import Best, Stage, Turn
from tessera.generators.masked.critic import HeadCriticConfig, TokenCriticConfig, build_critic
from tessera.generators.masked.losses import MaskedLossConfig, MaskedLosses
from tessera.generators.masked.model import Head, Low, MaskedConfig, MaskedTransformer, Trunk
from tessera.nn.adaptive import AdaptiveBlock
from tessera.nn.attention import EncoderBlock
from tessera.text.bytes import ByteEncoder


class MaskedStageConfig(Config):
    """Training of a masked generator."""

    model: MaskedConfig = MaskedConfig()
    """The transformer."""
    loss: MaskedLossConfig = MaskedLossConfig()
    """What is hidden, and how guesses are scored."""
    optim: OptimConfig = OptimConfig(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.03, warmup_steps=500)
    """Optimizer of the generator and of the text encoder that is trained with it."""
    critic: TokenCriticConfig | None = None
    """Trained beside the generator to tell its wrong tokens, for sampling with order critic; null trains none."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are the ones to use."""
    batch_size: int = Field(256, ge=1)
    """Samples per update, over all ranks."""
    steps: int = Field(20_000, ge=1)
    """Updates."""


def build_nets(
    config: MaskedStageConfig, *, vocab_size: int, grid: Sequence[int], text_width: int, encoder: nn.Module | None = None,
    low: Low | None = None,
) -> dict[str, nn.Module]:  # fmt: skip
    """Fresh nets from torch's current seed: the generator, the text encoder that is trained with it, if there is one, and the
    critic, if one is asked for. `low` is the coarser grid that the generator refines."""
    generator = MaskedTransformer(config.model, vocab_size, grid, text_width, low)
    nets: dict[str, nn.Module] = {"generator": generator}
    if encoder is not None:
        nets["text"] = encoder
    if config.critic is not None:
        nets["critic"] = build_critic(config.critic, generator, text_width, low)
    return nets


def build_stage(config: MaskedStageConfig, nets: dict[str, nn.Module]) -> Stage:
    """What `build_nets` made, and how it is trained. A critic has a turn of its own, after the generator's; a head with a weight
    is trained in the generator's, whose features it shapes."""
    critic, generator = config.critic, nets["generator"]
    if config.loss.frames is not None and isinstance(generator, MaskedTransformer) and len(generator.grid) < 3:
        raise UserError(f"loss.frames is for clips, and these tokens have a grid {generator.grid} without time; set it to null")
    joint = critic.weight if isinstance(critic, HeadCriticConfig) else 0.0
    losses = MaskedLosses(config.loss, joint)
    trained = tuple(name for name in nets if name != "critic" or joint)
    turns = [Turn(name="generator", trains=trained, loss=losses.turn, max_grad_norm=config.optim.max_grad_norm)]
    optim = dict.fromkeys(nets, config.optim)
    if critic is not None:
        optim["critic"] = critic.optim
        if not joint:
            limit = critic.optim.max_grad_norm
            turns.append(Turn(name="critic", trains=("critic",), loss=losses.critic_turn, max_grad_norm=limit))
    return Stage(
        nets=nets,
        averaged=tuple(nets),
        ema_decay=config.ema_decay,
        turns=turns,
        optim=optim,
        best=Best("loss", higher_is_better=False),
        measure=losses.measure,
        compiled=(AdaptiveBlock, EncoderBlock),
        recorded=(Trunk, ByteEncoder),
        sharded=(AdaptiveBlock, Head),
        checkpointed=(AdaptiveBlock,),
    )
