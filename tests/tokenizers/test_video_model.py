"""Nothing comes from the future: by equality of prefixes, by gradients that are exactly 0, and by decoding in parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.attention import EncoderBlock
from tessera.nn.positions import rotary_turns
from tessera.nn.quantizers import FSQConfig, LFQConfig, QuantizerConfig, ResidualConfig, VQConfig
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig
from tessera.tokenizers.video.conv import CausalConvConfig, TimeBlock, TimeDownsample, TimeUpsample
from tessera.tokenizers.video.cvivit import CViViTConfig, WindowBlock
from tessera.tokenizers.video.frames import FramesConfig
from tessera.tokenizers.video.model import VideoTokenizer, VideoTokenizerConfig, held, num_frames, num_latent
from tests.tokenizers.clips import KINDS, noise, rouse, tokenizer

every = pytest.mark.parametrize("kind", KINDS)
timed = pytest.mark.parametrize("kind", ["conv", "cvivit"])


def double(kind: str) -> VideoTokenizer:
    return tokenizer(kind).double().eval()


# ---- how many


def test_counts_of_frames_and_latents() -> None:
    assert [num_latent(length, 4) for length in range(1, 11)] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert [num_latent(length, 1) for length in range(1, 4)] == [1, 2, 3]
    assert num_latent(torch.tensor([1, 2, 17]), 4).tolist() == [1, 2, 5]
    for stride, latents in itertools.product((1, 2, 3, 4, 8), range(1, 6)):
        assert num_latent(num_frames(latents, stride), stride) == latents


@timed
@pytest.mark.parametrize("length", [2, 3, 4, 6, 16])
def test_other_lengths_are_refused(kind: str, length: int) -> None:
    near = num_frames(num_latent(length, 4), 4)
    with pytest.raises(ValueError, match=f"a clip of {length} frames .* 1 \\+ 4 n frames; fill it up to {near}"):
        tokenizer(kind).encode(noise(1, length))


@every
def test_other_sizes_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="8 x 10 pixels cannot be divided by the tokenizer's stride 4"):
        tokenizer(kind).encode(torch.zeros(1, 3, 5, 8, 10))


@every
@pytest.mark.parametrize(("length", "latents"), [(1, 1), (5, 2), (17, 5)])
def test_shapes_and_range(kind: str, length: int, latents: int) -> None:
    net, clips = tokenizer(kind), noise(2, length, 8)[..., :4]
    ids = net.encode(clips)
    assert ids.shape == (2, length if kind == "frames" else latents, 2, 1)
    assert ids.min() >= 0
    assert ids.max() < net.vocab_size == 200
    decoded = net.decode(ids)
    assert decoded.shape == clips.shape
    assert decoded.dtype == torch.float32
    assert decoded.abs().max() <= 1
    made = net(clips)
    assert torch.equal(made.ids, ids)
    torch.testing.assert_close(made.frames.clamp(-1, 1), decoded)
    assert net.decode_latent(net.encode_latent(clips)).shape == clips.shape


# ---- causality


@every
@pytest.mark.parametrize("length", [5, 9, 21])
def test_a_prefix_is_encoded_as_in_the_whole(kind: str, length: int) -> None:
    net, clips = double(kind), noise(2, length).double()
    latents, ids = net.latent(clips), net.encode(clips)
    for count in range(1, latents.shape[1]):  # the first: a picture
        end = num_frames(count, net.time_stride)
        start = clips[:, :, :end]
        torch.testing.assert_close(net.latent(start), latents[:, :count], rtol=0, atol=1e-10)
        assert torch.equal(net.encode(start), ids[:, :count])
        torch.testing.assert_close(net.decode(ids[:, :count]), net.decode(ids)[:, :, :end], rtol=0, atol=1e-10)


@every
def test_gradients_reach_no_later_frame(kind: str) -> None:
    """And they do reach what a latent frame holds."""
    net = double(kind)
    stride = net.time_stride
    clips = noise(1, num_frames(4, stride)).double().requires_grad_(True)
    latents = net.latent(clips)
    for index in range(4):
        (slope,) = torch.autograd.grad(latents[:, index].sum(), clips, retain_graph=True)
        own = slope.abs().sum((0, 1, 3, 4))
        last = stride * index
        assert not own[last + 1 :].any()
        assert own[max(0, last - stride + 1) : last + 1].all()
    codes = torch.randn(1, 3, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    frames, _ = net.decoder(codes)
    for index in range(clips.shape[2]):
        (slope,) = torch.autograd.grad(frames[:, :, index].sum(), codes, retain_graph=True)
        own = slope.abs().sum((0, 1, 3, 4))
        last = (index + stride - 1) // stride
        assert not own[last + 1 :].any()
        assert own[last] > 0


@every
def test_what_lies_behind_a_clips_end_does_not_count(kind: str) -> None:
    net, clips, lengths = double(kind), noise(3, 13).double(), torch.tensor([1, 6, 9])
    other = clips.clone()
    for row, length in enumerate(lengths):
        other[row, :, length:] = torch.randn(3, 13 - int(length), 8, 8)
    one, two = (net.latent(held(x, lengths)) for x in (clips, other))
    for row, length in enumerate(lengths):
        assert torch.equal(
            held(other, lengths)[row, :, length:], clips[row, :, length - 1 : length].expand(-1, 13 - int(length), -1, -1)
        )
        torch.testing.assert_close(one[row], two[row], rtol=0, atol=0)


# ---- decoding in parts


@every
@pytest.mark.parametrize("parts", [(6,), (1, 1, 1, 1, 1, 1), (2, 4), (1, 3, 2), (5, 1)])
def test_parts_in_a_row_are_the_whole(kind: str, parts: tuple[int, ...]) -> None:
    net = double(kind)
    ids = torch.randint(0, net.vocab_size, (2, 6, 2, 3), generator=torch.Generator().manual_seed(0))
    memory, made = None, []
    for part in ids.split(list(parts), dim=1):
        frames, memory = net.decode_more(part, memory)
        assert frames.shape[2] == (net.time_stride * part.shape[1] if made else num_frames(part.shape[1], net.time_stride))
        made.append(frames)
    torch.testing.assert_close(torch.cat(made, dim=2), net.decode(ids), rtol=0, atol=1e-10)


@timed
def test_the_memory_does_not_grow(kind: str) -> None:
    net = tokenizer(kind).eval()
    ids = torch.randint(0, net.vocab_size, (1, 12, 2, 2), generator=torch.Generator().manual_seed(0))
    memory, sizes = None, []
    with torch.no_grad():
        for part in ids.split(2, dim=1):
            _, memory = net.decode_more(part, memory)
            sizes.append(sum(kept.untyped_storage().nbytes() for kept in memory))
    assert sizes[0] > 0
    assert len(set(sizes)) == 1
    first = [kept.clone() for kept in memory or ()]
    net.decode_more(ids[:, :1], memory)  # the same memory may be gone on from twice
    assert all(torch.equal(a, b) for a, b in zip(first, memory or (), strict=True))


# ---- frame by frame


@pytest.mark.parametrize("quantizer", [FSQConfig(levels=(4, 4)), VQConfig(codes=32, width=4)], ids=lambda q: q.kind)
def test_frames_are_the_image_tokenizers_pictures(quantizer: QuantizerConfig) -> None:
    """With its weights, under its names."""
    image_config = ImageTokenizerConfig(widths=(8, 8, 12), blocks=(1, 0, 2), decoder_blocks=(0, 2, 1), quantizer=quantizer)
    torch.manual_seed(0)
    image = ImageTokenizer(image_config, 3)
    rouse(image)
    image.latent_mean.fill_(0.3)
    image.latent_variance.fill_(0.2)
    net = VideoTokenizer(FramesConfig.of(image_config), 3)
    net.load_state_dict(image.state_dict())  # strict: the same names and shapes
    net, image = net.double().eval(), image.double().eval()
    clips = noise(2, 5, 16).double()
    ids, made = net.encode(clips), net(clips)
    assert ids.shape == (2, 5, 4, 4)
    assert len(ids.unique()) > 4
    for index in range(5):
        frame = clips[:, :, index]
        assert torch.equal(ids[:, index], image.encode(frame))
        one, there_and_back = image.decode(ids[:, index]), image(frame)
        torch.testing.assert_close(net.decode(ids)[:, :, index].double(), one.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(made.latents[:, index], there_and_back.latents, rtol=0, atol=1e-10)
        torch.testing.assert_close(made.frames[:, :, index].float(), there_and_back.images, rtol=0, atol=1e-6)
        torch.testing.assert_close(net.encode_latent(clips)[:, :, index], image.encode_latent(frame), rtol=0, atol=1e-10)


def test_frames_need_no_memory() -> None:
    net = tokenizer("frames")
    _, memory = net.decode_more(net.encode(noise(1, 3)))
    assert memory == ()


# ---- layers, written out


def pictures(clips: Tensor) -> Tensor:
    return clips.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_along_time_are_conv3d(stride: int) -> None:
    torch.manual_seed(0)
    layer = TimeBlock(8) if stride == 1 else TimeDownsample(8)
    torch.nn.init.normal_(layer.conv.weight)
    torch.nn.init.normal_(layer.norm.weight)
    clips = torch.randn(2, 8, 7, 3, 5)
    found, _ = layer(pictures(clips), 2)
    normed = torch.stack([torch.nn.functional.silu(layer.norm(clips[:, :, t])) for t in range(7)], dim=2)
    padded = torch.cat([normed[:, :, :1], normed[:, :, :1], normed], dim=2)
    wanted = torch.nn.functional.conv3d(padded, layer.conv.weight[..., None], layer.conv.bias, stride=(stride, 1, 1))
    torch.testing.assert_close(found, pictures(wanted + clips[:, :, ::stride]), rtol=1e-4, atol=1e-4)


def test_layers_along_time_start_without_mixing() -> None:
    clips = torch.randn(2, 5, 8, 3, 3)
    x = clips.flatten(0, 1)
    assert torch.equal(TimeBlock(8)(x, 2)[0], x)
    assert torch.equal(TimeDownsample(8)(x, 2)[0], clips[:, ::2].flatten(0, 1))
    assert torch.equal(TimeUpsample(8)(x, 2)[0], clips[:, [0, 1, 1, 2, 2, 3, 3, 4, 4]].flatten(0, 1))


def test_doubling_by_hand() -> None:
    """Frames 2j - 1 and 2j come from the two halves of the convolution at frame j."""
    torch.manual_seed(0)
    layer, clips = TimeUpsample(4), torch.randn(1, 4, 3, 2, 2)
    torch.nn.init.normal_(layer.conv.weight)
    found = layer(pictures(clips), 1)[0]
    normed = torch.stack([torch.nn.functional.silu(layer.norm(clips[:, :, t])) for t in range(3)], dim=2)
    padded = torch.cat([normed[:, :, :1], normed[:, :, :1], normed], dim=2)
    early, late = torch.nn.functional.conv3d(padded, layer.conv.weight[..., None], layer.conv.bias).chunk(2, dim=1)
    for place, (half, frame) in enumerate([(late, 0), (early, 1), (late, 1), (early, 2), (late, 2)]):
        torch.testing.assert_close(found[place], (half + clips)[0, :, frame], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_attention_sees_its_window_and_no_more(window: int) -> None:
    """A block changes nothing between places but by attention, so what reaches place i shows what it sees."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 16, requires_grad=True)
    seen, _ = WindowBlock(16, 2, window)(x, rotary_turns(torch.zeros(6, 1), 8))
    for place in range(6):
        (slope,) = torch.autograd.grad(seen[:, place].sum(), x, retain_graph=True)
        wanted = [0 <= place - other < window for other in range(6)]
        assert (slope.abs().sum((0, 2)) > 0).tolist() == wanted


@pytest.mark.parametrize("block", [WindowBlock(16, 2, 3), EncoderBlock(16, 2)], ids=["time", "frame"])
def test_queries_keys_and_values_are_of_normalised_tokens(block: WindowBlock | EncoderBlock) -> None:
    """What attention adds does not grow with what it reads."""
    nn.init.zeros_(block.feed_forward.down.weight)
    x, turns = torch.randn(2, 5, 16, dtype=torch.float64), rotary_turns(torch.arange(5)[:, None], 8)

    def added(x: Tensor) -> Tensor:
        return (block(x, turns)[0] if isinstance(block, WindowBlock) else block(x, None, turns)) - x

    block.double()
    torch.testing.assert_close(added(1000 * x), added(x), rtol=1e-6, atol=1e-6)
    assert added(x).abs().max() > 0.01


def test_a_window_as_long_as_the_clip_is_plain_causal_attention() -> None:
    torch.manual_seed(0)
    block, x, turns = WindowBlock(16, 2, 6), torch.randn(2, 6, 16), rotary_turns(torch.randn(6, 1), 8)
    query, key, value = block.attention.project(block.norm1(x), None, turns)
    logits = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    h = x + block.attention.join(logits.softmax(-1) @ value)
    torch.testing.assert_close(block(x, turns)[0], h + block.feed_forward(block.norm2(h)), rtol=1e-4, atol=1e-5)


# ---- quantizers and configs


CHAIN = ResidualConfig(quantizer=VQConfig(codes=16, width=4), num_quantizers=3)


@every
@pytest.mark.parametrize(
    "quantizer", [FSQConfig(levels=(4, 4)), LFQConfig(bits=6), VQConfig(codes=32, width=4), CHAIN], ids=lambda q: q.kind
)
def test_every_quantizer(kind: str, quantizer: QuantizerConfig) -> None:
    net = tokenizer(kind, quantizer)
    ids = net.encode(noise(2, 5))
    assert ids.shape == (2, 5 if kind == "frames" else 2, 2, 2, *((3,) if isinstance(quantizer, ResidualConfig) else ()))
    assert ids.max() < net.vocab_size == quantizer.vocab_size
    first, memory = net.decode_more(ids[:, :1])
    rest, _ = net.decode_more(ids[:, 1:], memory)
    torch.testing.assert_close(torch.cat([first, rest], dim=2), net.decode(ids), rtol=1e-4, atol=1e-5)


class Holder(Config):
    model: VideoTokenizerConfig = CausalConvConfig()


def test_the_kind_chooses_the_backbone() -> None:
    assert isinstance(Holder.model_validate({"model": {"kind": "cvivit", "patch": 4}}).model, CViViTConfig)
    assert isinstance(Holder.model_validate({"model": {"kind": "frames"}}).model, FramesConfig)
    found = Holder.model_validate({"model": {"kind": "conv", "time_downsamples": 1}}).model
    assert isinstance(found, CausalConvConfig)
    assert (found.stride, found.time_stride) == (8, 2)
    assert (Holder().model.stride, Holder().model.time_stride) == (8, 4)
    assert (FramesConfig().stride, FramesConfig().time_stride) == (8, 1)


@pytest.mark.parametrize(("downsamples", "stride"), [(0, 1), (1, 2), (2, 4)])
def test_halvings_of_time(downsamples: int, stride: int) -> None:
    torch.manual_seed(0)
    config = CausalConvConfig(widths=(4, 4, 4), blocks=(1, 1, 0), decoder_blocks=(0, 1, 1), time_downsamples=downsamples)
    net, clips = VideoTokenizer(config, 1), torch.randn(1, 1, 9, 8, 8)
    assert net.encode(clips).shape == (1, num_latent(9, stride), 2, 2)
    assert net.decode(net.encode(clips)).shape == clips.shape


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="time_downsamples 3 is more than the 2 halvings"):
        CausalConvConfig(widths=(8, 8, 8), blocks=(1, 1, 1), time_downsamples=3)
    with pytest.raises(ValueError, match="width 20 does not split into 2 heads"):
        CViViTConfig(width=20, heads=2)


def test_the_default_is_of_the_promised_size() -> None:
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in VideoTokenizer(config, 3).parameters())
            for config in (CausalConvConfig(), CViViTConfig(), FramesConfig())
        ]
    assert all(10e6 < size < 20e6 for size in sizes), sizes
