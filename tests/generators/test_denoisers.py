"""The networks that denoise: shapes, what each row depends on and what it cannot, against formulas written out; and that they
learn."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.config import Config, EngineConfig, UserError
from tessera.engine.state import speed_up
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.conditioning import LIMIT, EmbeddingConditioning, LevelEmbedding
from tessera.generators.diffusion.denoisers import (
    CHECKPOINTED,
    COMPILED,
    RECORDED,
    SHARDED,
    Denoiser,
    build_denoiser,
)  # fmt: skip
from tessera.generators.diffusion.dit import DiT, DiTConfig
from tessera.generators.diffusion.unet import Layer, ModulatedBlock, PixelAttention, UNet, UNetConfig
from tests.generators.denoiser_toys import (
    CHANNELS,
    DIT,
    EMBEDDING,
    EVERYTHING,
    KINDS,
    SIZE,
    TEXT,
    denoiser,
    levels,
    noise,
    stirred,
    told,
)  # fmt: skip

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
    with pytest.raises(ValueError, match=f"`?{part}`?, and this denoiser was built without"):
        denoiser(kind)(x, levels(), Condition(**{part: getattr(told(x, EVERYTHING), part)}))
    with pytest.raises(ValueError, match="built for b 3 h w"):
        denoiser(kind)(torch.zeros(2, 4, *SIZE), levels(2), Condition())


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


# ---- against formulas


@pytest.mark.parametrize("crossing", [False, True])
def test_pixels_attend_as_written_out(crossing: bool) -> None:
    torch.manual_seed(0)
    layer = stirred(PixelAttention(12, 3, 7 if crossing else None)).double()
    for norm in (layer.norm, layer.attention.query_norm, layer.attention.key_norm):
        norm.weight.data.normal_(1, 0.3)
    x, context, mask = (
        torch.randn(2, 12, 2, 3).double(),
        torch.randn(2, 4, 7).double(),
        torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0]]) > 0,
    )
    found = layer(x, context, mask) if crossing else layer(x)

    def rms(vector: Tensor, weight: Tensor) -> Tensor:
        return vector / (vector.square().mean() + torch.finfo(torch.float64).eps).sqrt() * weight

    attention = layer.attention
    for row in range(2):
        pixels = [rms(x[row, :, i, j], layer.norm.weight) for i in range(2) for j in range(3)]
        seen = [context[row, k] for k in range(4) if mask[row, k]] if crossing else pixels
        for place, pixel in enumerate(pixels):
            heads = []
            for head in range(3):
                part = slice(4 * head, 4 * head + 4)
                query = rms(attention.query.weight[part] @ pixel, attention.query_norm.weight)
                keys = [rms(attention.key_value.weight[:12][part] @ other, attention.key_norm.weight) for other in seen]
                values = [attention.key_value.weight[12:][part] @ other for other in seen]
                scores = torch.stack([query @ key / 2 for key in keys]).exp()
                heads.append(sum(score * value for score, value in zip(scores / scores.sum(), values, strict=True)))
            wanted = x[row, :, place // 3, place % 3] + attention.out.weight @ torch.cat(heads)
            torch.testing.assert_close(found[row, :, place // 3, place % 3], wanted)


def test_a_block_is_scaled_and_shifted_as_written_out() -> None:
    torch.manual_seed(0)
    block = stirred(ModulatedBlock(8, 16, 5, dropout=0.0)).double()
    x, vector = torch.randn(2, 8, 4, 6).double(), torch.randn(2, 5).double()

    def standard(x: Tensor, groups: int) -> Tensor:
        parts = x.unflatten(1, (groups, -1))
        centred = parts - parts.mean((2, 3, 4), keepdim=True)
        return (centred / (centred.square().mean((2, 3, 4), keepdim=True) + 1e-5).sqrt()).flatten(1, 2)

    h = F.conv2d(F.silu(standard(x, 2)), block.conv1.weight, block.conv1.bias, padding=1)
    modulation = vector @ block.modulate.weight.T + block.modulate.bias
    h = standard(h, 4) * (1 + modulation[:, :16, None, None]) + modulation[:, 16:, None, None]
    h = F.conv2d(F.silu(h), block.conv2.weight, block.conv2.bias, padding=1)
    # group norms of a fresh block have weight 1; their biases were stirred
    for norm in (block.norm1, block.norm2):
        norm.bias.data.zero_()
    torch.testing.assert_close(block(x, vector), h + F.conv2d(x, block.shortcut.weight, block.shortcut.bias))


@pytest.mark.parametrize("efficient", [False, True])
def test_a_unet_goes_down_and_up_as_written_out(efficient: bool) -> None:
    torch.manual_seed(0)
    config = UNetConfig(
        widths=(8, 16), blocks=(1, 2), attention=(False, True), cross=(False, False), head_width=8, efficient=efficient
    )
    net = stirred(build_denoiser(config, channels=3, size=(8, 8)))
    assert isinstance(net, UNet)
    x, level = noise(2, (8, 8)), levels(2)
    vector = F.silu(net.conditioning.level(level))

    def run(layer: nn.Module, x: Tensor, beside: Tensor | None = None) -> Tensor:
        return layer(x if beside is None else torch.cat([x, beside / math.sqrt(2)], 1), vector, None, None)

    stem = net.stem(x)
    first = run(net.down[0][0], net.shrink[0](stem) if efficient else stem)
    second = run(net.down[1][0], net.shrink[1](first))
    third = run(net.down[1][1], second)
    h = run(net.middle[1], run(net.middle[0], third))
    h = net.grow[1](run(net.up[1][1], run(net.up[1][0], h, third), second))
    h = run(net.up[0][0], h, first)
    h = torch.cat([net.grow[0](h) if efficient else h, stem / math.sqrt(2)], 1)
    torch.testing.assert_close(net(x, level, Condition()), net.out(F.silu(net.norm(h))), rtol=1e-4, atol=1e-5)


def test_patches_are_cut_and_laid_as_convolutions_would() -> None:
    """A transformer without layers between: a convolution of the patches, a transposed one back."""
    net = denoiser("dit")
    assert isinstance(net, DiT)
    net.blocks = nn.ModuleList()
    x, width = noise(), DIT.width
    kernel = net.embed.weight.view(width, CHANNELS, 2, 2)
    h = F.conv2d(x, kernel, net.embed.bias, stride=2) + net.places[0].T[None, :, :, None] + net.places[1].T[None, :, None, :]
    scale, shift = net.modulate(F.silu(net.conditioning.level(levels())))[:, :, None, None].chunk(2, 1)
    h = h / (h.square().mean(1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * (1 + scale) + shift
    back = F.conv_transpose2d(h, net.out.weight.T.reshape(width, CHANNELS, 2, 2), stride=2)
    back = back + net.out.bias.view(1, CHANNELS, 2, 2).tile(1, 1, 4, 6)
    torch.testing.assert_close(net(x, levels(), Condition()), back, rtol=1e-4, atol=1e-5)


def test_a_transformer_knows_where_patches_are() -> None:
    """With the learned places gone, rotation alone makes a guess depend on how patches lie to each other."""
    net = denoiser("dit", size=(8, 8))
    assert isinstance(net, DiT)
    for places in net.places:
        places.data.zero_()
    x, level = noise(1, (8, 8)), levels(1)
    turned = net(x.unflatten(2, (4, 2)).flip(2).flatten(2, 3), level, Condition())  # rows of patches from bottom to top
    upright = net(x, level, Condition()).unflatten(2, (4, 2)).flip(2).flatten(2, 3)
    assert (turned - upright).abs().max() > 1e-3
    net.angles.zero_()
    turned = net(x.unflatten(2, (4, 2)).flip(2).flatten(2, 3), level, Condition())
    upright = net(x, level, Condition()).unflatten(2, (4, 2)).flip(2).flatten(2, 3)
    torch.testing.assert_close(turned, upright, rtol=1e-4, atol=1e-5)


# ---- size, memory, speed


def test_parameters_are_as_many_as_the_formulas_say() -> None:
    with torch.device("meta"):
        options: dict[str, Any] = {"channels": 3, "size": (64, 64), "text_width": 256, "embedding_width": 512}
        unet, dit = (build_denoiser(config, **options) for config in (UNetConfig(), DiTConfig()))
        bare = build_denoiser(DiTConfig(), channels=3, size=(64, 64))
    assert all(tensor.is_meta for net in (unet, dit) for tensor in (*net.parameters(), *net.buffers()))
    counts = [sum(parameter.numel() for parameter in net.parameters()) for net in (unet, dit, bare)]
    width, depth, heads, inner = 384, 12, 6, 1024
    attention, feed_forward = 4 * width**2 + 2 * width // heads, 3 * width * inner
    ends = (12 + 1) * width + 2 * 32 * width + (width + 1) * 2 * width + (width + 1) * 12
    level = (128 + 1) * width + (width + 1) * width
    told = (2 * 256 + 1) * width + (512 + 1) * 5 * width
    assert counts[2] == ends + level + (width + 1) * 6 * width + depth * (attention + feed_forward + 6 * width)
    assert counts[1] == ends + level + told + (width + 1) * 9 * width + depth * (2 * attention + feed_forward + 9 * width)
    assert 20e6 < counts[0] < 40e6
    assert 20e6 < counts[1] < 40e6


@pytest.mark.parametrize("kind", ["unet", "efficient"])
def test_pictures_stay_channels_last_and_no_block_of_an_efficient_net_sees_the_full_size(kind: str) -> None:
    net, x = denoiser(kind, size=(16, 24), **EVERYTHING), noise(size=(16, 24))
    sizes = []

    def look(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert inputs[0].is_contiguous(memory_format=torch.channels_last)
        sizes.append(tuple(output.shape[-2:]))

    for layer in net.modules():
        if isinstance(layer, Layer):
            layer.register_forward_hook(look)
    net(x, levels(), told(x, EVERYTHING))
    full, half, quarter = (16, 24), (8, 12), (4, 6)
    fine, coarse = (half, quarter) if kind == "efficient" else (full, half)
    assert sizes == [fine, coarse, coarse, coarse, coarse, coarse, coarse, fine]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_whole_network_is_one_graph(kind: str) -> None:
    """torch.compile finds nothing that it would have to leave to Python, and computes the same."""
    net, x = denoiser(kind, **EVERYTHING), noise()
    whole = torch.compile(net, backend="eager", fullgraph=True)
    condition = told(x, EVERYTHING)
    with torch.no_grad():
        torch.testing.assert_close(whole(x, levels(), condition), net(x, levels(), condition), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_under_autocast_a_guess_is_close_and_gradients_are_fp32(kind: str) -> None:
    net, x = denoiser(kind, **EVERYTHING), noise()
    condition = told(x, EVERYTHING)
    wanted = net(x, levels(), condition)
    with torch.autocast("cpu", torch.bfloat16):
        guess = net(x, levels(), condition)
    assert guess.dtype == torch.float32
    assert (guess - wanted).square().mean().sqrt() < 0.05 * wanted.std()
    guess.square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("kind", list(KINDS))
def test_recomputing_layers_changes_no_gradient(kind: str) -> None:
    found = []
    for recomputed in (False, True):
        net, x = denoiser(kind, **EVERYTHING), noise()
        stage: Any = SimpleNamespace(compiled=COMPILED, recorded=RECORDED, checkpointed=CHECKPOINTED, varied=False)
        speed_up(net, stage, EngineConfig(activation_checkpointing=recomputed, compile=False))
        assert any("forward" in vars(layer) for layer in net.modules()) == recomputed
        net(x, levels(), told(x, EVERYTHING)).square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)
    assert isinstance(net, RECORDED)
    assert any(isinstance(layer, SHARDED) for layer in net.modules())


# ---- learning


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_learns_what_text_embedding_and_low_picture_say(kind: str) -> None:
    """The sample is noise. Red comes from the text, green from the embedding, blue from the smaller picture."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"text_width": TEXT, "embedding_width": EMBEDDING, "low": True}
    net, rng = build_denoiser(KINDS[kind], channels=CHANNELS, size=(8, 8), **options), torch.Generator().manual_seed(1)
    text, embedding = torch.randn(2, TEXT, generator=rng), torch.randn(2, EMBEDDING, generator=rng)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    losses = []
    for _ in range(50):
        red, green = (torch.randint(0, 2, (16,), generator=rng) for _ in range(2))
        low = torch.randn(16, CHANNELS, 1, 1, generator=rng).expand(-1, -1, 8, 8)
        mask = torch.ones(16, 1, dtype=torch.bool)
        condition = Condition(TextStates(text[red][:, None], mask, text[red]), embedding[green], low=low)
        colours = torch.stack([2.0 * red - 1, 2.0 * green - 1, low[:, 2, 0, 0]], dim=1)[:, :, None, None]
        guess = net(torch.randn(16, CHANNELS, 8, 8, generator=rng), torch.zeros(16), condition)
        loss = (guess - colours).square().mean((0, 2, 3))
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    first, last = losses[0], torch.stack(losses[-8:]).mean(0)
    assert (last < 0.25 * first).all(), (first, last)
