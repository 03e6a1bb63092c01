"""The networks that denoise, against formulas written out; their size, layout and precision; and that they learn."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.batches import TextStates
from tessera.compiling import outermost, settle_einops
from tessera.config import EngineConfig
from tessera.engine.state import speed_up
from tessera.generators.diffusion.condition import Condition
from tessera.generators.diffusion.denoisers import (
    CHECKPOINTED,
    COMPILED,
    RECORDED,
    SHARDED,
    build_denoiser,
)
from tessera.generators.diffusion.dit import DiT, DiTConfig
from tessera.generators.diffusion.unet import (
    Grow,
    LastNorm,
    Layer,
    ModulatedBlock,
    PixelAttention,
    Shrink,
    UNet,
    UNetConfig,
)
from tessera.nn.conv import Downsample
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.pair.model import Embedder, EmbedderConfig
from tests.generators.denoiser_toys import (
    CHANNELS,
    DIT,
    EMBEDDING,
    EVERYTHING,
    KINDS,
    TEXT,
    denoiser,
    levels,
    noise,
    stirred,
    told,
)

# ---- against formulas


def test_frozen_nets_of_the_same_blocks_stay_plain() -> None:
    """What embeds pictures, and what makes latents of them, in training as in use."""
    nets = [Embedder(EmbedderConfig(widths=(8, 8)), 3, 8), ImageTokenizer(ImageTokenizerConfig(widths=(8, 16), blocks=(1, 1)), 3)]
    for net in nets:
        assert any(isinstance(module, Downsample) for module in net.modules())
        assert outermost(net, COMPILED) == outermost(net, RECORDED) == []
    net = denoiser()
    shapes = {Shrink, Grow, LastNorm} & {type(module) for module in outermost(net, COMPILED)}
    assert shapes == {Shrink, Grow, LastNorm}


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
    for norm in (block.norm1, block.norm2):
        norm.bias.data.zero_()
    x, vector = torch.randn(2, 8, 4, 6).double(), torch.randn(2, 5).double()

    def standard(x: Tensor, groups: int) -> Tensor:
        parts = x.unflatten(1, (groups, -1))
        centred = parts - parts.mean((2, 3, 4), keepdim=True)
        return (centred / (centred.square().mean((2, 3, 4), keepdim=True) + 1e-5).sqrt()).flatten(1, 2)

    h = F.conv2d(F.silu(standard(x, 2)), block.conv1.weight, block.conv1.bias, padding=1)
    modulation = vector @ block.modulate.weight.T + block.modulate.bias
    h = standard(h, 4) * (1 + modulation[:, :16, None, None]) + modulation[:, 16:, None, None]
    h = F.conv2d(F.silu(h), block.conv2.weight, block.conv2.bias, padding=1)
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
    h = F.silu(F.group_norm(h, net.norm.num_groups, net.norm.weight, net.norm.bias, net.norm.eps))
    torch.testing.assert_close(net(x, level, Condition()), net.out(h), rtol=1e-4, atol=1e-5)


def test_attention_stands_where_the_config_says() -> None:
    config = UNetConfig(
        widths=(8, 8, 8), blocks=(1, 2, 1), attention=(False, True, False), cross=(True, False, False), head_width=8
    )
    for options in ({"text_width": TEXT}, {}):
        net = build_denoiser(config, channels=3, size=(8, 8), **options)
        assert isinstance(net, UNet)
        for path in (net.down, net.up):
            for level, layers in enumerate(path):
                assert len(layers) == config.blocks[level]
                for layer in layers:
                    assert (layer.attention is not None) == config.attention[level]
                    assert (layer.cross is not None) == (config.cross[level] and bool(options))
        assert [layer.attention is not None for layer in net.middle] == [True, False]
        assert [layer.cross is not None for layer in net.middle] == [bool(options), False]


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
    net.turns[0], net.turns[1] = 1.0, 0.0
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
    assert all(
        layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in net.modules() if isinstance(layer, nn.Conv2d)
    )
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
    settle_einops()
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
        stage: Any = SimpleNamespace(compiled=COMPILED, recorded=RECORDED, checkpointed=CHECKPOINTED, shapes="one")
        speed_up(net, stage, EngineConfig(activation_checkpointing=recomputed, compile=False))
        assert any("forward" in vars(layer) for layer in net.modules()) == recomputed
        net(x, levels(), told(x, EVERYTHING)).square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)
    assert isinstance(net, RECORDED)
    assert any(isinstance(layer, SHARDED) for layer in net.modules())


# ---- learning


@pytest.mark.parametrize("kind", ["unet", "dit"])
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
