"""The stages in the order in which they train, and what each reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tessera.batches import MeshBatch
from tessera.config import Layer, UserError, build, layer_of
from tessera.contracts import Context, Nets, Preview, Stage, Train
from tessera.data.loader import Feed
from tessera.data.mesh_cache import MeshCache, write_meshes
from tessera.data.meshes import MeshLoader
from tessera.data.sources import Source
from tessera.generators.autoregressive.sample import Sampler, Writer
from tessera.generators.autoregressive.stage import build_nets
from tessera.generators.autoregressive.stage import build_stage as build_autoregressive
from tessera.media.images import encode_png
from tessera.media.meshes import Mesh
from tessera.media.rendering import render
from tessera.media.sheets import sheet
from tessera.recipes.captions import settle_captions, training_text
from tessera.recipes.meshgpt.config import GraphConfig, MeshGPTConfig
from tessera.recipes.meshgpt.tokens import mesh_of, meshes_of, module_of, sequences, tokens_of
from tessera.recipes.needs import found_at
from tessera.recording import Lean
from tessera.text.encoders import NoTextConfig, NoTextReader, PrecomputedTextConfig, build_encoder, encode_text, text_width
from tessera.tokenizers.mesh.graph_stage import build_stage as build_graph

PICTURE = 128  # pixels of a preview's side


def steps(config: MeshGPTConfig) -> Sequence[Train]:
    """Tokenizer, where there is something to train, and base."""
    return [*([tokenizer_step(config)] if isinstance(config.tokenizer, GraphConfig) else []), base_step(config)]


def adopt(config: MeshGPTConfig, read: Callable[[str], Any]) -> MeshGPTConfig:
    """A tokenizer that comes from elsewhere brings its own architecture."""
    if config.base.needs.tokenizer is None:
        return config
    origin, other = found_at(read, config.base.needs.tokenizer)
    if other.recipe != config.recipe or not isinstance(other.tokenizer, GraphConfig):
        raise UserError(f"{origin} holds no graph autoencoder of meshes; name RUN/tokenizer of a run with tokenizer.kind=graph")
    if other.data.bins != config.data.bins:
        raise UserError(f"{origin} was trained with data.bins={other.data.bins}, here it is {config.data.bins}; set it the same")
    changes = {
        "tokenizer": {"kind": "graph", "model": other.tokenizer.model.model_dump(mode="json")},
        "base": {"needs": {"tokenizer": origin}},
    }
    made = build(MeshGPTConfig, [layer_of(config, "config"), Layer.of(changes, "the tokenizer that needs.tokenizer names")])
    assert isinstance(made, MeshGPTConfig)
    return made


def settle(config: MeshGPTConfig, source: Source, stages: Collection[str]) -> MeshGPTConfig:
    """What only the data knows of how captions are read."""
    text = settle_captions(config.text, source)
    return config if text == config.text else config.model_copy(update={"text": text})


def tokenizer_step(config: MeshGPTConfig) -> Train:
    """Stage 1, with learned codes."""
    stage = config.tokenizer
    assert isinstance(stage, GraphConfig)

    def serves() -> Nets:
        module = module_of(config)
        assert module is not None
        return {"tokenizer": module}

    return Train(
        name="tokenizer",
        batch_size=stage.batch_size,
        steps=stage.steps,
        build=lambda: replace(build_graph(stage, config.data.bins), preview=partial(preview_reconstructions, config)),
        serves=serves,
        feed=lambda nets, feed: MeshLoader(feed, MeshCache(write_meshes(feed)), NoTextReader(), quads=config.quads),
        origin=config.base.needs.tokenizer,
        origin_key="base.needs.tokenizer",
    )


def base_step(config: MeshGPTConfig) -> Train:
    """The generator."""
    tokens = tokens_of(config)

    def make_nets() -> dict[str, nn.Module]:
        return build_nets(
            config.base, vocab_size=tokens.vocab_size, group=tokens.group, text_width=text_width(config.text),
            encoder=build_encoder(config.text),
        )  # fmt: skip

    def build_base() -> Stage:
        return replace(build_autoregressive(config.base, make_nets(), sequences(tokens)), preview=partial(preview_base, config))

    def feed(nets: Nets, feed: Feed) -> MeshLoader:
        return MeshLoader(feed, MeshCache(write_meshes(feed)), training_text(config.text, feed), quads=config.quads)

    return Train(
        name="base",
        batch_size=config.base.batch_size,
        steps=config.base.steps,
        build=build_base,
        serves=make_nets,
        feed=feed,
        needs={"tokenizer": "tokenizer"} if isinstance(config.tokenizer, GraphConfig) else {},
        captioned=not isinstance(config.text, (NoTextConfig, PrecomputedTextConfig)),
    )


# --- previews


def preview_reconstructions(config: MeshGPTConfig, raw: Nets, averaged: Nets, batch: MeshBatch, context: Context) -> Preview:
    """Three rows: the meshes, and what averaged and raw weights make of them."""
    rows: dict[str, Sequence[Mesh]] = {"real": quantised(config, batch)}
    for name, nets in (("ema", averaged), ("raw", raw)):
        tokens = tokens_of(config)
        ids = tokens.encode(nets, batch.corners, batch.num_faces)
        rows[name] = meshes_of(tokens, nets, ids, batch.num_faces, config.data.bins)
    return Preview("png", contact_sheet(rows, batch.captions), facts_of(rows, batch))


def preview_base(config: MeshGPTConfig, raw: Nets, averaged: Nets, batch: MeshBatch, context: Context) -> Preview:
    """Two rows: the fixed samples, and what the generator draws from their captions."""
    tokens, generator = tokens_of(config), averaged["generator"]
    text = encode_text(averaged, batch.text)
    writer = Writer(Lean(generator), config.sample, tokens.constraint)  # type: ignore[arg-type]
    seeds = torch.arange(len(batch.keys), device=batch.corners.device)
    lengths = torch.full_like(seeds, config.sample.faces)
    ids, faces = Sampler(writer)(text, seeds, config.sample.max_faces or config.data.max_faces, lengths=lengths)
    rows: dict[str, Sequence[Mesh]]
    rows = {"real": quantised(config, batch), "drawn": meshes_of(tokens, averaged, ids, faces, config.data.bins)}
    return Preview("png", contact_sheet(rows, batch.captions), facts_of(rows, batch) | {"seeds": seeds.tolist()})


def quantised(config: MeshGPTConfig, batch: MeshBatch) -> list[Mesh]:
    """The batch as it is trained on."""
    corners, bins = batch.corners.cpu().numpy(), config.data.bins
    return [mesh_of(own[:count], bins) for own, count in zip(corners, batch.num_faces.tolist(), strict=True)]


def contact_sheet(rows: Mapping[str, Sequence[Mesh]], captions: Sequence[str | None]) -> bytes:
    """Named rows of meshes with captions below, as a png."""
    pictures = [[render(mesh, PICTURE) for mesh in meshes] for meshes in rows.values()]
    return encode_png(sheet(pictures, row_names=list(rows), captions=[caption or "" for caption in captions]))


def facts_of(rows: Mapping[str, Sequence[Mesh]], batch: MeshBatch) -> dict[str, Any]:
    """For the JSON beside a preview."""
    faces = {name: [len(mesh.faces) for mesh in meshes] for name, meshes in rows.items()}
    return {"keys": list(batch.keys), "captions": list(batch.captions), "faces": faces}
