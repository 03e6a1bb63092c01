"""The image tokenizer as a function: shapes, ids, samples that do not see each other, and the way there and back."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from pydantic import ValidationError
from torch import Tensor, nn

from tessera.contracts import Tokenizer
from tessera.nn.quantizers import FSQConfig
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig

LEVELS = FSQConfig(levels=(8, 5, 5, 5))


def build(
    num_levels: int = 3, channels: int = 3, blocks: int = 1, dropout: float = 0.0, quantizer: FSQConfig = LEVELS
) -> ImageTokenizer:
    """Trained a little in effect: no weight is left at 0, so that every layer takes part."""
    torch.manual_seed(0)
    config = ImageTokenizerConfig(
        widths=(8, 12, 16, 8, 16)[:num_levels], blocks=(blocks,) * num_levels, dropout=dropout, quantizer=quantizer
    )
    net = ImageTokenizer(config, channels)
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return net


def pictures(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


# ---- shapes and ranges


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("num_levels", [1, 2, 4, 5])
def test_every_size_that_the_stride_divides(num_levels: int, channels: int) -> None:
    net, stride = build(num_levels, channels), 2 ** (num_levels - 1)
    assert net.stride == stride
    sizes = [size for size in range(16, 49) if size % stride == 0]
    shapes = {(size, size) for size in sizes} | {(sizes[0], size) for size in sizes} | {(sizes[-1], sizes[0]), (16, 80)}
    for height, width in sorted(shapes) if num_levels > 2 else [*sorted(shapes)[:4], (16, 48)]:
        x = pictures(2, channels, height, width)
        ids = net.encode(x)
        assert ids.shape == (2, height // stride, width // stride)
        assert ids.dtype == torch.int64
        assert 0 <= ids.min() <= ids.max() < net.vocab_size == 1000
        assert net.decode(ids).shape == x.shape == net(x).images.shape
        assert net.encode_latent(x).shape == (2, 4, height // stride, width // stride)


def test_a_size_that_the_stride_does_not_divide_is_refused() -> None:
    net = build(3)
    for call in (net.forward, net.encode, net.encode_latent):
        with pytest.raises(ValueError, match="16 x 18 pixels cannot be divided by the tokenizer's stride 4"):
            call(pictures(1, 3, 16, 18))


def test_decode_clamps_and_forward_does_not() -> None:
    net, x = build(), pictures(2, 3, 16, 16)
    with torch.no_grad():
        net.decoder.out.weight.mul_(50)
        made, decoded = net(x), net.decode(net.encode(x))
    assert made.images.abs().max() > 1
    assert decoded.abs().max() == 1
    assert torch.equal(made.images.clamp(-1, 1), decoded)


def test_it_starts_at_mid_grey_with_latents_of_about_unit_variance() -> None:
    torch.manual_seed(0)
    net = ImageTokenizer(ImageTokenizerConfig(widths=(64, 64, 64), blocks=(1, 1, 1)), 3)
    x = torch.randn(4, 3, 32, 32)
    assert net(x).images.abs().max() == 0
    assert 0.2 < net.encoder(x).var().item() < 2
    assert (net.encode(x).unique().numel()) > 100  # of 256 tokens: most levels are in use from the start


def test_it_is_a_tokenizer() -> None:
    assert isinstance(build(), Tokenizer)
    assert not [name for name in build().state_dict() if "quantizer" in name]


# ---- samples do not see each other


def test_a_batch_of_one_is_a_batch_of_many() -> None:
    net, x = build(), pictures(5, 3, 16, 24)
    together, ids = net(x), net.encode(x)
    alone = [net(picture[None]) for picture in x]
    torch.testing.assert_close(torch.cat([made.images for made in alone]), together.images, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat([made.ids for made in alone]), together.ids)
    assert torch.equal(ids, together.ids)


@pytest.mark.parametrize("training", [True, False])
def test_no_gradient_from_one_sample_to_another(training: bool) -> None:
    net, x = build().train(training), pictures(3, 3, 16, 16).requires_grad_(True)
    (grad,) = torch.autograd.grad(net(x).images[0].square().sum(), x)
    assert grad[0].abs().max() > 0
    assert grad[1:].abs().max() == 0


# ---- there and back


def test_the_latent_and_the_ids_say_the_same() -> None:
    net, x = build(), pictures(2, 3, 16, 16)
    latent = net.encode_latent(x)
    half = (net.quantizer.levels // 2).view(-1, 1, 1)
    assert latent.abs().max() < 1.002  # the bound's margin of a thousandth
    rounded = (latent * half).round() / half
    torch.testing.assert_close(rounded, rearrange(net.quantizer.decode(net.encode(x)), "b h w d -> b d h w"))
    torch.testing.assert_close(net.decode_latent(rounded), net.decode(net.encode(x)))
    torch.testing.assert_close(net(x).images.clamp(-1, 1), net.decode(net.encode(x)))


def test_autocast_leaves_pixels_in_full_precision() -> None:
    net, x = build(), pictures(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        made = net(x)
        assert made.images.dtype == net.decode(made.ids).dtype == net.encode_latent(x).dtype == torch.float32
    assert 0 <= made.ids.min() <= made.ids.max() < net.vocab_size


def test_dropout_is_random_in_training_only() -> None:
    net, x = build(dropout=0.5), pictures(1, 3, 16, 16)
    assert not torch.equal(net(x).images, net(x).images)
    net.eval()
    assert torch.equal(net(x).images, net(x).images)


def test_another_quantizer_and_a_heavier_decoder() -> None:
    config = ImageTokenizerConfig(widths=(8, 8), blocks=(0, 1), decoder_blocks=(2, 3), quantizer=FSQConfig(levels=(4, 4)))
    net = ImageTokenizer(config, 3)
    num = [sum(type(module).__name__ == "ResidualBlock" for module in part.modules()) for part in (net.encoder, net.decoder)]
    assert num == [1, 5]
    assert net.vocab_size == 16
    assert net.decode(torch.arange(16).view(1, 4, 4)).shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": (1, 1, 1)}, "blocks has 3 entries and widths 2; give one number a level"),
        ({"decoder_blocks": (1,)}, "decoder_blocks has 1 entries and widths 2"),
        ({"widths": (8, 10)}, "must be multiples of 4"),
        ({"widths": (0, 4)}, "must be multiples of 4"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageTokenizerConfig.model_validate({"widths": (8, 8), "blocks": (1, 1), **change})
