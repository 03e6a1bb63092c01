"""The networks that denoise: shapes, where they start, what each row depends on and what it cannot depend on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tessera.batches import TextStates
from tessera.config import Config, UserError
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.conditioning import LIMIT, EmbeddingConditioning, LevelEmbedding
from tessera.generators.diffusion.denoisers import (
    Denoiser,
    build_denoiser,
)
from tessera.generators.diffusion.dit import DiTConfig
from tessera.generators.diffusion.unet import UNetConfig
from tests.generators.denoiser_toys import (
    CHANNELS,
    EMBEDDING,
    EVERYTHING,
    KINDS,
    SIZE,
    TEXT,
    WORDS,
    denoiser,
    levels,
    noise,
    stirred,
    told,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "text": {"text_width": TEXT},
    "embedding": {"embedding_width": EMBEDDING, "variance": True},
    "low": {"low": True},
    "before": {"self_conditioning": True},
    "everything": {**EVERYTHING, "variance": True},
}


# ---- shapes


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("options", list(OPTIONS))
def test_a_guess_is_as_large_as_the_sample(kind: str, options: str) -> None:
    chosen = OPTIONS[options]
    net, x = denoiser(kind, **chosen), noise()
    guess = net(x, levels(), told(x, chosen))
    assert guess.shape == (3, CHANNELS * (2 if chosen.get("variance") else 1), *SIZE)
    assert guess.dtype == torch.float32
    assert guess.isfinite().all()
    assert guess.flatten(1).std(1).min() > 0.01


@pytest.mark.parametrize("num_levels", [1, 2, 3, 4])
@pytest.mark.parametrize("efficient", [False, True])
def test_a_unet_has_any_number_of_levels_and_takes_any_size_that_fits(num_levels: int, efficient: bool) -> None:
    config = UNetConfig(
        widths=(8,) * num_levels, blocks=(1,) * num_levels, attention=(False,) * num_levels, cross=(True,) * num_levels,
        head_width=8, efficient=efficient,
    )  # fmt: skip
    stride = 2 ** (num_levels - 1 + efficient)
    assert config.stride == stride
    net = stirred(build_denoiser(config, channels=1, size=(4 * stride, 4 * stride), text_width=TEXT))
    for size in ((stride, stride), (3 * stride, stride), (stride, 5 * stride)):
        x = torch.randn(1, 1, *size)
        guess = net(x, torch.zeros(1), told(x, {"text_width": TEXT}))
        assert guess.shape == x.shape
        assert guess.isfinite().all()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"30 x 48 pixels cannot be divided by the U-Net's stride 4; use sides like 28 or 32"):
        build_denoiser(UNetConfig(), channels=3, size=(30, 48))
    with pytest.raises(UserError, match="8 x 9 pixels cannot be divided by the U-Net's stride 2; use sides like 8 or 10"):
        denoiser()(noise(size=(8, 9)), levels(), Condition())
    with pytest.raises(UserError, match="8 x 9 pixels cannot be divided into patches of 2"):
        denoiser("dit", size=(8, 9))
    with pytest.raises(ValueError, match=r"of 8 x 8 pixels; this transformer was built for \(8, 12\)"):
        denoiser("dit")(noise(size=(8, 8)), levels(), Condition())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (2, 2)}, "blocks has 2 entries and widths 3"),
        ({"widths": (96, 100, 384)}, "multiples of 8"),
        ({"blocks": (2, 0, 2)}, "at least 1 a level"),
        ({"widths": (96, 200, 384)}, "width 200 of a level with attention cannot be divided by head_width 64"),
        ({"widths": (96, 192, 200), "attention": (False,) * 3, "cross": (False,) * 3}, "width 200 of a level with attention"),
        ({"head_width": 3}, "multiple"),
    ],
)
def test_configs_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        UNetConfig(**options)


def test_a_section_chooses_by_its_kind() -> None:
    class Section(Config):
        model: Denoiser = UNetConfig()

    assert Section().model == UNetConfig()
    assert Section.model_validate({"model": {"kind": "dit", "depth": 3}}).model == DiTConfig(depth=3)
    with pytest.raises(ValidationError, match="heads whose width is a multiple of 4"):
        Section.model_validate({"model": {"kind": "dit", "width": 60, "heads": 6}})


# ---- the start


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_untrained_net_guesses_0_and_learns_from_its_first_step(kind: str) -> None:
    net, x = build_denoiser(KINDS[kind], channels=CHANNELS, size=SIZE, **EVERYTHING), noise()
    guess = net(x, levels(), told(x, EVERYTHING))
    assert not guess.any()
    (guess - 1).square().sum().backward()
    assert net.out.weight.grad is not None
    assert net.out.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_parameter_is_used(kind: str) -> None:
    for options in OPTIONS.values():
        net, x = denoiser(kind, **options), noise()
        condition = told(x, options)
        if condition.embedding is not None:
            condition = replace(condition, has_embedding=torch.tensor([True, False, True]))
        net(x, levels(), condition).square().sum().backward()
        unused = [name for name, parameter in net.named_parameters() if parameter.grad is None or not parameter.grad.any()]
        assert not unused, options


# ---- what a guess depends on


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_leaks_from_what_is_not_told(kind: str) -> None:
    net, x = denoiser(kind, **EVERYTHING), noise()
    condition = told(x, EVERYTHING)
    assert condition.text is not None
    assert condition.embedding is not None
    states, embedding = condition.text.states.requires_grad_(), condition.embedding.requires_grad_()
    text = replace(condition.text, mask=condition.text.mask & torch.tensor([True, False, True])[:, None])
    has = torch.tensor([False, True, True])
    net(x, levels(), replace(condition, text=text, has_embedding=has)).square().sum().backward()
    assert states.grad is not None
    assert embedding.grad is not None
    assert not states.grad[~text.mask].any(), "behind the end of a caption, and of a row without one"
    assert (states.grad[text.mask].abs().sum(-1) > 0).all()
    assert not embedding.grad[0].any()
    assert (embedding.grad[1:].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_not_told_may_be_anything(kind: str) -> None:
    net, x = denoiser(kind, **EVERYTHING), noise()
    condition = told(x, EVERYTHING)
    untold = torch.tensor([True, False, True])
    less = condition.without(untold, ~untold)
    assert less.text is not None
    assert less.embedding is not None
    assert less.has_embedding is not None
    odd = replace(
        less,
        text=replace(less.text, states=less.text.states.masked_fill(~less.text.mask[..., None], math.nan)),
        embedding=less.embedding.masked_fill(~less.has_embedding[:, None], math.nan),
    )
    guess = net(x, levels(), odd)
    torch.testing.assert_close(guess, net(x, levels(), less))
    guess.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("kind", list(KINDS))
def test_none_is_as_if_no_row_were_told(kind: str) -> None:
    net, x = denoiser(kind, **EVERYTHING), noise()
    condition, every = told(x, EVERYTHING), torch.ones(3, dtype=torch.bool)
    untold = net(x, levels(), condition.without(every, every))
    torch.testing.assert_close(net(x, levels(), replace(condition, text=None, embedding=None)), untold)
    assert (untold - net(x, levels(), condition)).abs().max() > 0.01
    zeros = replace(condition, before=torch.zeros_like(x))
    torch.testing.assert_close(net(x, levels(), replace(condition, before=None)), net(x, levels(), zeros))
    clean = replace(condition, low_level=torch.full((3,), math.inf))
    torch.testing.assert_close(net(x, levels(), replace(condition, low_level=None)), net(x, levels(), clean))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_row_does_not_depend_on_other_rows(kind: str) -> None:
    """With as many rows as an embedding has tokens, too."""
    net, x, level = denoiser(kind, **EVERYTHING), noise(), levels()
    condition = told(x, EVERYTHING)
    other = told(x, EVERYTHING, seed=1)
    mixed = Condition(
        text=TextStates(*(torch.cat([getattr(condition.text, name)[:1], getattr(other.text, name)[1:]])
                          for name in ("states", "mask", "pooled"))),
        **{
            name: torch.cat([getattr(condition, name)[:1], getattr(other, name)[1:]])
            for name in ("embedding", "low", "low_level", "before")
        },
    )  # fmt: skip
    guess = net(x, level, condition)
    changed = net(torch.cat([x[:1], x[1:] * 2]), torch.cat([level[:1], level[1:] + 1]), mixed)
    torch.testing.assert_close(changed[0], guess[0], rtol=1e-5, atol=1e-6)
    assert (changed[1:] - guess[1:]).abs().amax((1, 2, 3)).min() > 0.01


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("part", ["level", "text", "pooled", "embedding", "low", "low_level", "before"])
def test_all_that_is_told_counts(kind: str, part: str) -> None:
    net, x, level = denoiser(kind, **EVERYTHING), noise(), levels()
    condition, other = told(x, EVERYTHING), told(x, EVERYTHING, seed=1)
    assert condition.text is not None
    assert other.text is not None
    guess = net(x, level, condition)
    if part == "level":
        changed = net(x, level + 1, condition)
    elif part == "text":
        changed = net(x, level, replace(condition, text=replace(condition.text, states=other.text.states)))
    elif part == "pooled":
        changed = net(x, level, replace(condition, text=replace(condition.text, pooled=other.text.pooled)))
    else:
        changed = net(x, level, replace(condition, **{part: getattr(other, part)}))
    assert (changed - guess).abs().amax((1, 2, 3)).min() > 1e-3


def test_an_embedding_counts_by_its_direction_and_keeps_its_rows_apart() -> None:
    """Also where it is as wide as the network and there are as many rows as tokens."""
    torch.manual_seed(0)
    layer = EmbeddingConditioning(16, 16, num_tokens=4)
    embedding = torch.randn(4, 16)
    vector, tokens = layer(embedding, None, 4)
    assert tokens.shape == (4, 4, 16)
    alone = layer(7 * embedding[2:3], None, 1)
    torch.testing.assert_close(vector[2], alone[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokens[2], alone[1][0], rtol=1e-4, atol=1e-5)


def test_text_and_embedding_count_in_the_vector_and_in_the_context() -> None:
    net, x = denoiser(text_width=TEXT, embedding_width=EMBEDDING), noise()
    condition = told(x, EVERYTHING)
    vector, context, mask = net.conditioning(levels(), condition)
    assert context is not None
    assert mask is not None
    assert context.shape[:2] == mask.shape == (3, 1 + WORDS + 3), "a null token, the text, tokens of the embedding"
    for untold in (replace(condition, text=None), replace(condition, embedding=None)):
        assert (net.conditioning(levels(), untold)[0] - vector).abs().amax(1).min() > 0.1


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"low": None}, "no `low`"),
        ({"low": torch.zeros(3, CHANNELS, 4, 4)}, r"`low` of the condition is \(3, 3, 4, 4\), the sample \(3, 3, 8, 12\)"),
        ({"before": torch.zeros(3, 1, 8, 12)}, "`before` of the condition"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(condition: dict[str, Any], message: str) -> None:
    x = noise()
    with pytest.raises(ValueError, match=message):
        denoiser(**EVERYTHING)(x, levels(), replace(told(x, EVERYTHING), **condition))


@pytest.mark.parametrize("kind", ["unet", "dit"])
@pytest.mark.parametrize("part", ["text", "embedding", "low", "before"])
def test_what_a_net_was_not_built_for_is_refused(kind: str, part: str) -> None:
    x = noise()
    with pytest.raises(ValueError, match=f"has `{part}`, and this denoiser was built without"):
        denoiser(kind)(x, levels(), Condition(**{part: getattr(told(x, EVERYTHING), part)}))
    with pytest.raises(ValueError, match="built for b 3 h w"):
        denoiser(kind)(torch.zeros(2, 4, *SIZE), levels(2), Condition())


def test_numbers_of_other_kinds_are_taken() -> None:
    """Levels in fp64 and embeddings in fp16, as they may lie on a disk."""
    net, x = denoiser(**EVERYTHING), noise()
    condition = told(x, EVERYTHING)
    assert condition.embedding is not None
    assert condition.low_level is not None
    half = replace(condition, embedding=condition.embedding.half(), low_level=condition.low_level.double())
    guess = net(x, levels().double(), half)
    assert guess.dtype == torch.float32
    torch.testing.assert_close(guess, net(x, levels(), replace(condition, embedding=half.embedding.float())))


def test_levels_are_told_smoothly_and_up_to_a_limit() -> None:
    torch.manual_seed(0)
    embed = LevelEmbedding(64).double()
    level = torch.linspace(-LIMIT, LIMIT, 4001, dtype=torch.float64)
    found = embed(level)
    slopes = (found[1:] - found[:-1]).norm(dim=1) / (level[1] - level[0])
    assert slopes.max() < 2 * found.norm(dim=1).mean(), "of one unit of log-SNR: half of one changes it by less than its length"
    assert slopes.min() > 0.05 * slopes.max(), "and nowhere blind"
    far = embed(torch.tensor([-math.inf, -1e6, math.inf, 25.0]).double())
    torch.testing.assert_close(far, found[[0, 0, -1, -1]])
