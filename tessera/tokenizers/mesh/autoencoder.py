"""MeshGPT's tokenizer: faces of a mesh <-> a few ids for each of their corners (Siddiqui et al. 2023, section 3.1).

Faces exchange features with those across their sides, say what each of their corners should be, and the corners that are one
vertex agree on the mean, which is quantized. The decoder reads the codes of a face's corners along the sequence of faces.
A mesh never sees the padding behind it, nor another mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from tessera.config import Config
from tessera.nn.attention import EncoderBlock, RMSNorm, linear
from tessera.nn.conv import initialise
from tessera.nn.positions import rotary_turns
from tessera.nn.quantizers import FSQConfig, Quantized, Residual, ResidualConfig
from tessera.tokenizers.mesh.bins import BinScores
from tessera.tokenizers.mesh.graph import (
    Graph,
    at_corners,
    build_graph,
    equal_ids,
    face_mask,
    geometry_features,
    neighbour_mean,
    told_apart,
    vertex_mean,
)

QUANTIZER = "quantizer/"  # in front of the names of the quantizer's own sums
MOST_BINS = 1024  # areas are exact in fp32 up to here


class GraphTokenizerConfig(Config):
    """A graph encoder and a convolutional decoder over faces, around a quantizer of vertices."""

    kind: Literal["graph"] = "graph"
    """The kind of network."""
    corners: Literal[3, 4] = 3
    """Corners of a face. Among quads, the last corner of a triangle repeats its third."""
    coordinate_width: int = Field(64, ge=4)
    """Channels in which one coordinate enters and leaves."""
    encoder_width: int = Field(384, ge=4)
    """Channels of a face in the encoder."""
    encoder_layers: int = Field(4, ge=0)
    """Exchanges between faces that share a side."""
    encoder_attention: int = Field(0, ge=0)
    """Layers of attention among all faces of a mesh, behind the exchanges; quadratic in faces."""
    decoder_width: int = Field(384, ge=4)
    """Channels of a face in the decoder."""
    decoder_blocks: int = Field(16, ge=0)
    """Residual blocks of two convolutions along the faces."""
    decoder_attention: int = Field(0, ge=0)
    """Layers of attention among all faces of a mesh, before the convolutions; quadratic in faces."""
    code_octaves: int = Field(3, ge=0, le=8)
    """The decoder sees codes also as sines and cosines of waves of length 2, 1, 1/2 ...: so many. 0: the codes alone."""
    kernel: int = Field(3, ge=1)
    """Faces that one convolution sees: an odd number."""
    heads: int = Field(6, ge=1)
    """Heads of attention."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the layers of the encoder and the blocks of the decoder."""
    quantizer: ResidualConfig = ResidualConfig(quantizer=FSQConfig(levels=(8, 8, 8, 8, 4)), num_quantizers=2)
    """How vertices become codes; each is num_quantizers ids."""

    @field_validator("coordinate_width")
    @classmethod
    def _even(cls, width: int) -> int:
        if width % 2:
            raise ValueError(f"coordinate_width {width} must be even: half of it are sines, half cosines")
        return width

    @field_validator("kernel")
    @classmethod
    def _odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError(f"kernel {kernel} must be odd, so that a face is amid the faces it sees")
        return kernel

    @model_validator(mode="after")
    def _heads(self) -> GraphTokenizerConfig:
        for part, width in (("encoder", self.encoder_width), ("decoder", self.decoder_width)):
            wanted = self.encoder_attention if part == "encoder" else self.decoder_attention
            if wanted and width % (2 * self.heads):
                raise ValueError(f"{part}_width {width} does not split into {self.heads} heads of even width; change heads")
        return self


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Meshes there and back."""

    logits: Tensor  # b f c 3 bins, fp32
    ids: Tensor  # b f c q, 0 behind a mesh's end
    graph: Graph
    latents: Tensor  # (b f c) d, one a slot of `graph`, as the encoder made them
    quantized: Quantized  # of the slots; its terms have one number a slot


@dataclass(frozen=True, slots=True)
class Judged:
    """All that training needs of a batch, as sums over valid meshes: a recording ends here, so little is handed out of it and the
    host launches next to nothing behind it."""

    weight: Tensor  # faces
    scores: dict[str, Tensor]  # over faces, of `BinScores`, with gradients
    terms: dict[str, Tensor]  # over faces, the quantizer's own, with gradients
    sums: dict[str, Tensor]  # over vertices: what `follow` and the log read


class GraphLayer(nn.Module):
    """x + out(silu(W x + V (mean over neighbours of x) + bias)) on a normalised x (GraphSAGE, Hamilton et al. 2017, with a
    residual). The last product starts at 0, so the layer starts as the identity."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.itself, self.others = linear(width, width, bias=True), linear(width, width)
        self.out = linear(width, width, gain=0)
        self.dropout = dropout

    def forward(self, x: Tensor, edges: Tensor, own: Tensor, degrees: Tensor) -> Tensor:
        """b f d -> b f d"""
        h = self.norm(x)
        h = F.silu(self.itself(h) + self.others(neighbour_mean(h, edges, own, degrees)))
        return x + self.out(F.dropout(h, self.dropout, self.training))


def convolve(conv: nn.Conv2d, x: Tensor, mask: Tensor) -> Tensor:
    """Along the faces, b f d; mask b f 1 hides the padding. As one product, since what torch compiles of a convolution is for one
    length alone: what a face gives to each face that sees it, then moved there and added. Windows of x would be made anew from
    what x is made of, once for each place. Channels are innermost, so that they are written and read in the order of memory."""
    assert conv.bias is not None
    kernel, length = conv.kernel_size[1], x.shape[1]
    given = F.linear(x * mask, torch.cat(conv.weight.squeeze(2).unbind(-1)))  # b f (k o); the weight's gradient is contiguous
    padded = (F.pad(part, (0, 0, kernel // 2, kernel // 2)) for part in given.chunk(kernel, dim=-1))
    return sum((part[:, first : first + length] for first, part in enumerate(padded)), conv.bias.to(given.dtype))


class ConvBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), norms over the channels of a face. Starts as the identity."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.conv1 = initialise(nn.Conv2d(width, width, (1, kernel)))  # `convolve` reads their weights
        self.conv2 = initialise(nn.Conv2d(width, width, (1, kernel)), gain=0)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """b f d, mask b f 1 -> b f d"""
        h = convolve(self.conv1, F.silu(self.norm1(x)), mask)
        h = F.dropout(F.silu(self.norm2(h)), self.dropout, self.training)
        return x + convolve(self.conv2, h, mask)


class FaceAttention(nn.Module):
    """Layers of attention among the faces of a mesh, with rotary positions along their sequence."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """b f d, mask b f bool -> b f d. A mesh of no faces sees its first place: nothing at all would be NaN."""
        if not self.blocks:
            return x
        places = torch.arange(x.shape[1], device=x.device)
        turns, seen = rotary_turns(places[:, None], self.head_width), mask | (places == 0)
        for block in self.blocks:
            x = block(x, seen, turns)
        return x


class Encoder(nn.Module):
    """Corners b f c 3 -> latents of the corners b f c d"""

    def __init__(self, config: GraphTokenizerConfig, bins: int) -> None:
        super().__init__()
        self.bins, width, c = bins, config.encoder_width, config.corners
        self.coordinates = nn.Embedding(bins, config.coordinate_width)
        with torch.no_grad():
            self.coordinates.weight.copy_(smooth_waves(bins, config.coordinate_width))
        self.into = linear(3 * c * config.coordinate_width + c + 4, width, bias=True)
        self.layers = nn.ModuleList(GraphLayer(width, config.dropout) for _ in range(config.encoder_layers))
        self.attention = FaceAttention(width, config.heads, config.encoder_attention)
        self.norm = RMSNorm(width)
        self.out = linear(width, c * config.quantizer.width, bias=True)

    def forward(self, corners: Tensor, mask: Tensor, edges: Tensor, own: Tensor, degrees: Tensor) -> Tensor:
        """The last four as in `Graph`."""
        places = rearrange(self.coordinates(corners), "b f c a d -> b f (c a d)")
        x = self.into(torch.cat([places, geometry_features(corners, self.bins)], dim=-1))
        for layer in self.layers:
            x = layer(x, edges, own, degrees)
        x = self.attention(x, mask)
        return rearrange(self.out(F.silu(self.norm(x))), "b f (c d) -> b f c d", c=corners.shape[2])


class Decoder(nn.Module):
    """Codes of the corners b f c d -> logits b f c 3 bins

    A coordinate leaves as it entered, as a vector that is compared with one of each bin; these start as waves, so that near bins
    are alike. Codes enter with waves of themselves. A plain linear layer at either end must learn sharp functions of smooth
    numbers first: on random boxes of 128 bins, after 400 steps of a small net, held-out KL was 3.3, with the first 2.7, with
    both 2.3; with five octaves and more it was worse, because gradients through short waves point anywhere.
    """

    def __init__(self, config: GraphTokenizerConfig, bins: int) -> None:
        super().__init__()
        self.octaves, width, self.scale = config.code_octaves, config.decoder_width, config.coordinate_width**-0.5
        self.into = linear(config.corners * config.quantizer.width * (1 + 2 * self.octaves), width, bias=True)
        self.attention = FaceAttention(width, config.heads, config.decoder_attention)
        self.blocks = nn.ModuleList(ConvBlock(width, config.kernel, config.dropout) for _ in range(config.decoder_blocks))
        self.norm = RMSNorm(width)
        self.out = linear(width, 3 * config.corners * config.coordinate_width, gain=0)  # starts with all bins alike
        self.bins = nn.Parameter(waves(bins, config.coordinate_width))
        self.bias = nn.Parameter(torch.zeros(config.corners, 3, bins))

    def forward(self, codes: Tensor, mask: Tensor) -> Tensor:
        """mask b f bool."""
        x = self.attention(self.into(with_waves(codes, self.octaves).flatten(2)), mask)
        weights = mask[..., None].to(x.dtype)
        for block in self.blocks:
            x = block(x, weights)
        places = rearrange(self.out(F.silu(self.norm(x))), "b f (c a d) -> b f c a d", a=3, d=self.bins.shape[1])
        return F.linear(places * self.scale, self.bins) + self.bias


def with_waves(codes: Tensor, octaves: int) -> Tensor:
    """... d -> ... d (1 + 2 octaves)"""
    rates = math.pi * 2 ** torch.arange(octaves, device=codes.device, dtype=codes.dtype)
    angles = (codes[..., None, :] * rates[:, None]).flatten(-2)
    return torch.cat([codes, angles.sin(), angles.cos()], dim=-1)


class GraphTokenizer(nn.Module):
    """The trained net. Meshes are bins b f c 3 in the order (z, y, x) with their numbers of faces, b; ids are b f c q.

    Corners that are one vertex have the same ids. Latents are standardised by running statistics as in the image tokenizer.
    """

    latent_mean: Tensor
    latent_variance: Tensor

    def __init__(self, config: GraphTokenizerConfig, bins: int) -> None:
        super().__init__()
        if not 2 <= bins <= MOST_BINS:
            raise ValueError(f"{bins} bins; the graph tokenizer takes 2 to {MOST_BINS}")
        self.bins, self.corners = bins, config.corners
        self.vocab_size, self.num_quantizers = config.quantizer.vocab_size, config.quantizer.num_quantizers
        self.encoder, self.decoder = Encoder(config, bins), Decoder(config, bins)
        self.quantizer: Residual = config.quantizer.build()
        self.scores = BinScores()
        self.register_buffer("latent_mean", torch.zeros(config.quantizer.width))
        self.register_buffer("latent_variance", torch.ones(config.quantizer.width))

    def forward(self, corners: Tensor, num_faces: Tensor, valid: Tensor, blur: float) -> Judged:
        """There and back, compared with what went there, with gradients. valid: b, which meshes count."""
        made = self.reconstruct(corners, num_faces, valid)
        scores = self.scores(made.logits, corners, blur)
        terms = {name: at_corners(term, made.graph).mean(-1) for name, term in made.quantized.terms.items()}
        counted = made.graph.mask & valid[:, None]

        def summed(of_faces: Tensor) -> Tensor:
            return torch.where(counted, of_faces, 0).sum()

        return Judged(
            weight=counted.float().sum(),
            scores={name: summed(score) for name, score in scores.items()},
            terms={name: summed(term) for name, term in terms.items()},
            sums=self.sums(made, valid),
        )

    def reconstruct(self, corners: Tensor, num_faces: Tensor, valid: Tensor | None = None) -> Reconstruction:
        """There and back. valid: b, which meshes the quantizer's terms count; None counts all."""
        graph = self.graph_of(corners, num_faces)
        latents = self.latent(corners, graph)
        quantized = self.quantizer(self.standardise(latents), slot_weights(graph, valid))
        logits = self.decoder(at_corners(quantized.codes, graph), graph.mask).float()
        return Reconstruction(logits, self.ids_at_corners(quantized.ids, graph), graph, latents, quantized)

    @torch.no_grad()
    def sums(self, made: Reconstruction, valid: Tensor) -> dict[str, Tensor]:
        """Over vertices: counts of codes, sums of latents, and the quantizer's own under its name."""
        weights, latents = slot_weights(made.graph, valid), made.latents.float()
        own = self.quantizer.sums(made.quantized.prepared, made.quantized.ids, weights)
        return {
            "codes": self.quantizer.counts(made.quantized.ids, weights),
            "latent_count": weights.sum(),
            "latent_sum": (latents * weights[:, None]).sum(0),
            "latent_square": (latents.square() * weights[:, None]).sum(0),
            **{QUANTIZER + name: value for name, value in own.items()},
        }

    def graph_of(self, corners: Tensor, num_faces: Tensor) -> Graph:
        """Checks the shape; a quad would otherwise be read as something else."""
        if corners.ndim != 4 or corners.shape[2:] != (self.corners, 3):
            raise ValueError(f"corners of shape {list(corners.shape)}; this tokenizer takes b x f x {self.corners} x 3 bins")
        return build_graph(corners, num_faces, self.bins)

    def latent(self, corners: Tensor, graph: Graph) -> Tensor:
        """b f c 3 -> (b f c) d, one a slot of the graph."""
        return vertex_mean(self.encoder(corners, graph.mask, graph.edges, graph.own, graph.degrees), graph)

    def standardise(self, latents: Tensor) -> Tensor:
        """... d -> the same with zero mean and unit deviation over the training data."""
        return (latents.float() - self.latent_mean) * torch.rsqrt(self.latent_variance + 1e-6)

    def ids_at_corners(self, ids: Tensor, graph: Graph) -> Tensor:
        """(b f c) q -> b f c q, 0 behind a mesh's end."""
        return at_corners(ids, graph) * graph.mask[..., None, None]

    def encode(self, corners: Tensor, num_faces: Tensor) -> Tensor:
        """b f c 3, b -> b f c q. Vertices that would have the same ids get others, as near as there are: `decode` takes
        corners of the same ids for one vertex."""
        graph = self.graph_of(corners, num_faces)
        ids = self.quantizer.ids_of(self.standardise(self.latent(corners, graph)))
        rows = ids.view(len(corners), -1, ids.shape[-1])
        apart = told_apart(rows, graph.occupied.view(rows.shape[:2]), self.vocab_size)
        return self.ids_at_corners(apart.flatten(0, 1), graph)

    def decode(self, ids: Tensor, num_faces: Tensor) -> Tensor:
        """b f c q, b -> b f c 3: the likeliest bins, 0 behind a mesh's end. Corners of the same ids are taken for one vertex:
        what the net says of each is added up, and they come out together. (MeshGPT takes each corner's own: they come apart.)"""
        mask = face_mask(num_faces, ids.shape[1])
        logits, slots = self.decoder(self.quantizer.decode(ids), mask), equal_ids(ids, mask, self.vocab_size)
        meshes = [likeliest(*mesh) for mesh in zip(logits, slots, strict=True)]
        return torch.stack(meshes) * mask[..., None, None] if meshes else torch.zeros_like(ids[..., :1]).expand(-1, -1, -1, 3)


def likeliest(logits: Tensor, slots: Tensor) -> Tensor:
    """f c 3 bins, slots f c -> f c 3: the bins that all corners of a slot together say. In fp64: a GPU adds in any order."""
    flat = logits.flatten(0, 1).double()
    return torch.zeros_like(flat).index_add_(0, slots.flatten(), flat).argmax(-1)[slots]


def slot_weights(graph: Graph, valid: Tensor | None) -> Tensor:
    """(b f c): 1 for the slots that are vertices of meshes that count."""
    weights = graph.occupied.float().view(len(graph.mask), -1)
    return (weights if valid is None else weights * valid.float()[:, None]).flatten()


def waves(bins: int, width: int) -> Tensor:
    """bins width: sines and cosines of the bins, of mean square 1 over all. The longest wave has twice as many bins as there are,
    the shortest four."""
    rates = math.pi / bins * wave_numbers(bins, width // 2)
    angles = (torch.arange(bins) + 0.5)[:, None] * rates
    return math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=-1)


def smooth_waves(bins: int, width: int) -> Tensor:
    """`waves` with amplitudes as their lengths: what is made of them at random is a smooth function of the bin."""
    amplitudes = 1 / wave_numbers(bins, width // 2)
    return waves(bins, width) * (amplitudes / amplitudes.square().mean().sqrt()).repeat(2)


def wave_numbers(bins: int, number: int) -> Tensor:
    """From 1 to bins / 2 in equal ratios."""
    return torch.logspace(0, 1, number, base=max(bins / 2, 1))
