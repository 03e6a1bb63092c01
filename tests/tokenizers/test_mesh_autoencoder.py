"""The graph tokenizer: meshes that see neither padding nor each other, first values by theory, and learning by heart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from tessera.batches import MeshBatch
from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Context
from tessera.engine.dist import World
from tessera.engine.state import TrainState, place
from tessera.engine.step import Setting, StepReport, train_step
from tessera.nn.quantizers import FSQConfig, ResidualConfig
from tessera.tokenizers.mesh.autoencoder import GraphTokenizer, GraphTokenizerConfig, convolve
from tessera.tokenizers.mesh.bins import BinScores, blurred_divergence
from tessera.tokenizers.mesh.graph_losses import GraphLossConfig, GraphLosses, follow
from tessera.tokenizers.mesh.graph_stage import GraphTokenizerStageConfig, build_stage
from tests.tokenizers.graph_meshes import (
    BINS,
    CPU,
    KINDS,
    LFQ,
    RVQ,
    are_names,
    batch,
    box,
    build,
    meshes_for,
    model,
    pad,
    table,
    told_together,
    turn,
)


@pytest.mark.parametrize("length", [7, 1])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_moved_products_are_a_convolution(kernel: int, length: int) -> None:
    torch.manual_seed(0)
    conv, x = torch.nn.Conv2d(6, 4, (1, kernel)), torch.randn(2, length, 6, requires_grad=True)
    mask = (torch.arange(length) < torch.tensor([[7], [3]]))[..., None].float()
    found = convolve(conv, x, mask)
    wanted = F.conv1d((x * mask).mT, conv.weight[:, :, 0], conv.bias, padding=kernel // 2).mT
    torch.testing.assert_close(found, wanted)
    leaves = (x, conv.weight, conv.bias)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


# ---- meshes see neither padding nor each other


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_one_is_a_batch_of_many(kind: str) -> None:
    net, meshes = build(**KINDS[kind]), meshes_for(kind)
    together = net.reconstruct(*pad(meshes, 70, junk=True))
    ids = net.encode(*pad(meshes, 70, junk=True))
    logits = net.decoder(net.quantizer.decode(ids), together.graph.mask)
    for index, mesh in enumerate(meshes):
        alone, size = net.reconstruct(*pad([mesh])), len(mesh)
        torch.testing.assert_close(together.logits[index, :size], alone.logits[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(together.ids[index, :size], alone.ids[0])
        assert torch.equal(ids[index, :size], net.encode(*pad([mesh]))[0])
        assert not ids[index, size:].any()
        if are_names(mesh, alone.ids[0]):  # nothing had to be told apart
            assert torch.equal(ids[index, :size], alone.ids[0])
            torch.testing.assert_close(logits[index, :size], alone.logits[0], rtol=1e-4, atol=1e-4)
    decoded = net.decode(ids, pad(meshes)[1])
    for index, mesh in enumerate(meshes):
        told = told_together(logits[index, : len(mesh)], ids[index, : len(mesh)])
        chosen = told.gather(-1, decoded[index, : len(mesh), ..., None])[..., 0]
        assert (chosen >= told.amax(-1) - 1e-4).all(), "the likeliest bins by all corners of the same ids, up to rounding"
        assert not decoded[index, len(mesh) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_corners_of_the_same_ids_come_out_together(kind: str) -> None:
    """Whatever was drawn: in a mesh they are one vertex; in different meshes they have nothing to do with each other."""
    net = build(**KINDS[kind])
    corners = net.corners
    few = torch.randint(3, (2, 9, corners, net.num_quantizers), generator=torch.Generator().manual_seed(0))
    few[:, 5:] = few[:, :1]  # behind the second mesh's end, but not the first one's
    decoded = net.decode(few, torch.tensor([9, 5]))
    for row, count in enumerate((9, 5)):
        places: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for key, bins in zip(few[row, :count].flatten(0, 1).tolist(), decoded[row, :count].flatten(0, 1).tolist(), strict=True):
            places.setdefault(tuple(key), set()).add(tuple(bins))
        assert all(len(found) == 1 for found in places.values())
        assert torch.equal(decoded[row, :count], net.decode(few[row : row + 1, :count], torch.tensor([count]))[0])
    assert not decoded[1, 5:].any()
    assert net.decode(few[:0], torch.zeros(0, dtype=torch.long)).shape == (0, 9, corners, 3)
    assert torch.equal(net.decode(few.int(), torch.tensor([9, 5])), decoded)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lfq"])
def test_losses_add_up_over_meshes(kind: str) -> None:
    """Total, weight, parts, sums and gradients of a padded batch are those of its meshes, one by one."""
    net, meshes = build(**KINDS[kind]), meshes_for(kind)
    whole = turn(net, batch(meshes, 70, junk=True))
    singles = [turn(net, batch([mesh])) for mesh in meshes]
    assert whole.weight.item() == sum(map(len, meshes))
    assert whole.total.item() == pytest.approx(sum(loss.total.item() for loss in singles), rel=1e-5)
    for name, part in whole.parts.items():
        assert part.item() == pytest.approx(sum(loss.parts[name].item() for loss in singles), rel=1e-5), name
    for name, stat in whole.stats.items():
        torch.testing.assert_close(stat, torch.stack([loss.stats[name] for loss in singles]).sum(0), rtol=1e-4, atol=1e-4)
    parameters = [p for p in net.parameters() if p.requires_grad]
    once = torch.autograd.grad(whole.total, parameters)
    added = [sum(parts) for parts in zip(*(torch.autograd.grad(loss.total, parameters) for loss in singles), strict=True)]
    for left, right in zip(once, added, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


def test_padding_does_not_enter_the_entropy_of_a_batch() -> None:
    """LFQ's is a function of the micro-batch: not of its padding, nor of a mesh that only fills it up."""
    net, meshes = build(quantizer=LFQ), meshes_for("lfq")
    tight = turn(net, batch(meshes[:2]))
    wide = turn(net, batch([*meshes[:2], meshes[2]], 90, valid=[True, True, False], junk=True))
    assert tight.total.item() == pytest.approx(wide.total.item(), rel=1e-5)
    assert tight.parts.keys() == wide.parts.keys() == {"kl", "bin_accuracy", "triangle_accuracy", "commitment", "entropy"}
    for name in tight.parts:
        assert tight.parts[name].item() == pytest.approx(wide.parts[name].item(), rel=1e-5)
    for name in tight.stats:
        torch.testing.assert_close(tight.stats[name], wide.stats[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fsq", "rvq", "attention"])
def test_a_mesh_without_faces_is_nothing(kind: str) -> None:
    net, mesh = build(**KINDS[kind]), table()
    loss, alone = turn(net, batch([mesh, mesh[:0]])), turn(net, batch([mesh]))
    assert loss.total.item() == pytest.approx(alone.total.item(), rel=1e-5)
    assert loss.weight.item() == 60
    gradients = torch.autograd.grad(loss.total, list(net.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_order_of_faces_changes_no_id() -> None:
    """The encoder is a function of the graph; only the decoder reads the sequence."""
    net, order = build(), torch.randperm(60, generator=torch.Generator().manual_seed(0))
    ids = net.encode(*pad([table()]))
    assert torch.equal(net.encode(*pad([table()[order]]))[0], ids[0, order])


# ---- ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_vertices_and_in_range(kind: str) -> None:
    net, meshes = build(**KINDS[kind]), meshes_for(kind)
    corners, num_faces = pad(meshes)
    ids = net.encode(corners, num_faces)
    assert ids.shape == (*corners.shape[:3], net.num_quantizers)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() <= ids.max() < net.vocab_size
    assert all(are_names(mesh, row[: len(mesh)]) for row, mesh in zip(ids, meshes, strict=True))
    anything = torch.randint(net.vocab_size, ids.shape, generator=torch.Generator().manual_seed(0))
    decoded = net.decode(anything, num_faces)
    assert decoded.shape == corners.shape
    assert 0 <= decoded.min() <= decoded.max() < BINS


@pytest.mark.parametrize("kind", ["fsq", "quads", "bare"])
def test_vertices_that_a_coarse_quantizer_confuses_are_told_apart(kind: str) -> None:
    coarse = ResidualConfig(quantizer=FSQConfig(levels=(7, 7)), num_quantizers=2)
    net, meshes = build(**KINDS[kind] | {"quantizer": coarse}), meshes_for(kind)
    corners, num_faces = pad(meshes)
    raw, ids = net.reconstruct(corners, num_faces).ids, net.encode(corners, num_faces)
    sizes = [slice(len(mesh)) for mesh in meshes]
    assert not all(are_names(mesh, row[size]) for mesh, row, size in zip(meshes, raw, sizes, strict=True))
    assert all(are_names(mesh, row[size]) for mesh, row, size in zip(meshes, ids, sizes, strict=True))
    assert torch.equal(ids[..., :-1], raw[..., :-1]), "only the last id of a vertex gives way"


def test_autocast_leaves_logits_in_full_precision() -> None:
    net, data = build(encoder_attention=1, decoder_attention=1), batch(meshes_for("fsq"))
    with torch.autocast("cpu", torch.bfloat16):
        made = net.reconstruct(data.corners, data.num_faces)
        loss = turn(net, data)
    assert made.logits.dtype == loss.total.dtype == torch.float32
    assert made.latents.dtype == torch.float32
    assert 0 <= made.ids.min() <= made.ids.max() < net.vocab_size


# ---- the loss


def blurred(target: int, bins: int, blur: float) -> np.ndarray:
    weights = np.exp(-0.5 * ((np.arange(bins) - target) / blur) ** 2)
    return weights / weights.sum()


@pytest.mark.parametrize("blur", [0.4, 1.0, 3.0])
def test_the_divergence_against_numpy_also_at_the_borders(blur: float) -> None:
    logits = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) * 3
    wanted = torch.from_numpy(np.stack([blurred(target, 12, blur) for target in range(12)]))
    expected = F.kl_div(logits.double().log_softmax(-1), wanted, reduction="none").sum(-1)
    found = blurred_divergence(logits, torch.arange(12), blur)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert (found > 0).all()
    perfect = blurred_divergence(wanted.clamp(min=1e-30).log().float(), torch.arange(12), blur)
    torch.testing.assert_close(perfect, torch.zeros(12), rtol=0, atol=2e-6)


def test_without_blur_it_is_cross_entropy() -> None:
    logits, targets = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)), torch.randint(7, (4, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(4, 5)
    torch.testing.assert_close(blurred_divergence(logits, targets, 0.0), expected)
    assert blurred_divergence(F.one_hot(targets, 7) * 100.0, targets, 0.0).abs().max() == 0


def test_the_first_loss_is_what_theory_says() -> None:
    """All bins alike: log bins less the entropy of the target, 0.337 nats for a blur of 0.4 away from the borders."""
    torch.manual_seed(0)
    net, mesh = GraphTokenizer(model(), BINS), table()
    loss = turn(net, batch([mesh], 70))
    own = -sum(weight * math.log(weight) for weight in blurred(16, BINS, 0.4) if weight > 0)
    assert own == pytest.approx(0.337, abs=1e-3)
    assert loss.total.item() / 60 == pytest.approx(math.log(BINS) - own, rel=1e-5)
    assert turn(net, batch([mesh]), blur=0).total.item() / 60 == pytest.approx(math.log(BINS), rel=1e-5)


def test_parts_by_hand() -> None:
    net, data = build(), batch([table(), box((4, 4, 4), (27, 20, 9))], valid=[True, False])
    made = net.reconstruct(data.corners, data.num_faces)
    guessed = made.logits.argmax(-1)
    guessed[0, ::3] = data.corners[0, ::3]  # some faces all right
    guessed[0, 1::3, 0] = data.corners[0, 1::3, 0]
    made.logits.data.scatter_(-1, guessed[..., None], 50.0)
    parts = BinScores()(made.logits, data.corners, 0.4)
    right = (guessed == data.corners)[0].numpy()
    np.testing.assert_allclose(parts["triangle_accuracy"][0], right.reshape(60, 9).all(1))
    np.testing.assert_allclose(parts["bin_accuracy"][0], right.reshape(60, 9).mean(1), rtol=1e-6)
    loss = turn(net, data)
    assert loss.weight.item() == 60
    assert loss.stats["latent_count"].item() == 5 * 8  # vertices of the table, each once
    assert loss.stats["codes"].sum(-1).tolist() == [40, 40]
    assert not any(part.requires_grad for part in [*loss.parts.values(), *loss.stats.values()])


def test_validation_measures_and_digests() -> None:
    net, data, losses = build(quantizer=RVQ), batch(meshes_for("rvq")), GraphLosses(GraphLossConfig())
    loss = losses.measure({"tokenizer": net}, data, Context(0, 0, data.positions))
    trained = turn(net, data)
    assert set(loss.parts) == {"kl", "bin_accuracy", "triangle_accuracy", "commitment", "decoded_accuracy"}
    assert all(torch.equal(loss.parts[name], trained.parts[name]) for name in loss.parts if name != "decoded_accuracy")
    numbers = losses.digest(loss.stats)
    made = net.reconstruct(data.corners, data.num_faces)
    real = made.quantized.ids[made.graph.occupied]
    assert numbers["codes_used"] == pytest.approx(np.mean([len(real[:, link].unique()) / 32 for link in range(2)]))


def test_validation_counts_the_faces_that_decoding_gives_back() -> None:
    """Not those that the net knows corner by corner: of a mesh that does not count none, and none behind a mesh's end."""
    stage, state = start(0.4, coordinate_width=16, encoder_width=48, decoder_width=48)
    meshes = [box((4, 4, 4), (27, 27, 27)), table()]
    for _ in range(STEPS):
        step(stage, state, batch(meshes, 64))
    net, losses = stage.nets["tokenizer"].eval(), GraphLosses(GraphLossConfig())
    assert isinstance(net, GraphTokenizer)

    def back(data: MeshBatch) -> float:
        return losses.measure({"tokenizer": net}, data, Context(0, 0, data.positions)).parts["decoded_accuracy"].item()

    assert back(batch(meshes, 64)) == 12 + 60
    assert back(batch(meshes, 64, valid=[True, False], junk=True)) == 12
    net.decoder.bias.data[0, 0, 3] += 1e6  # the first corner of every face would be at 3 in z
    assert back(batch(meshes, 64)) == 0


# ---- gradients and learning


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_parameter(kind: str) -> None:
    net = build(**KINDS[kind])
    turn(net, batch(meshes_for(kind))).total.backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []


STEPS = 180


def start(blur: float = 0.4, engine: EngineConfig | None = None, **changes: Any) -> tuple[Any, TrainState]:
    torch.manual_seed(0)
    optim = OptimConfig(lr=6e-3, warmup_steps=10)
    stage = build_stage(GraphTokenizerStageConfig(model=model(**changes), optim=optim, loss=GraphLossConfig(blur=blur)), BINS)
    return stage, place(stage, 0, engine or EngineConfig(), CPU)


def step(stage: Any, state: TrainState, data: MeshBatch) -> StepReport:
    return train_step(state, stage, [data], Setting(World(0, 1, CPU), STEPS))


@pytest.mark.parametrize(
    ("changes", "blur"),
    [({}, 0.4), ({"quantizer": RVQ}, 0.0), ({"quantizer": LFQ}, 0.4), ({"corners": 4}, 0.4)],
    ids=["fsq", "rvq", "lfq", "quads"],
)
def test_a_cube_and_a_table_are_learned_by_heart(changes: dict[str, Any], blur: float) -> None:
    corners = changes.get("corners", 3)
    stage, state = start(blur, coordinate_width=16, encoder_width=48, decoder_width=48, **changes)
    data = batch([box((4, 4, 4), (27, 27, 27), corners), table(corners)], 64)
    num_faces = int(data.num_faces.sum())
    for _ in range(STEPS):
        numbers = step(stage, state, data).turns[0].sums.numbers
    assert numbers["triangle_accuracy"].item() == num_faces
    net = stage.nets["tokenizer"].eval()
    assert torch.equal(net.decode(net.encode(data.corners, data.num_faces), data.num_faces), data.corners)


def test_codebooks_and_statistics_follow_the_vertices() -> None:
    stage, state = start(quantizer=RVQ)
    data = batch(meshes_for("rvq"), 80, junk=True)
    net = stage.nets["tokenizer"]
    made = net.reconstruct(data.corners, data.num_faces)
    before = net.quantizer.chain[0].codebook.clone()
    step(stage, state, data)
    real = made.latents[made.graph.occupied].detach()
    torch.testing.assert_close(net.latent_mean, real.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.latent_variance, real.var(0, unbiased=False), rtol=1e-4, atol=1e-5)
    assert not torch.equal(before, net.quantizer.chain[0].codebook)
    assert state.averages["tokenizer"].latent_mean.any()


def test_statistics_hold_what_lies_between_batches_too() -> None:
    net = build()
    for index, mean in enumerate([1.0, 3.0] * 200):
        sums = {"latent_count": torch.tensor(10.0), "latent_sum": torch.full((4,), 10 * mean)}
        follow({"tokenizer": net}, sums | {"latent_square": torch.full((4,), 10 * mean**2)}, index)
    torch.testing.assert_close(net.latent_mean, torch.full((4,), 2.0), rtol=0.05, atol=0)
    torch.testing.assert_close(net.latent_variance, torch.full((4,), 1.0), rtol=0.1, atol=0)


def test_recomputed_activations_change_nothing() -> None:
    found = []
    for engine in (EngineConfig(), EngineConfig(activation_checkpointing=True)):
        stage, state = start(engine=engine, encoder_attention=1, decoder_attention=1)
        found.append([step(stage, state, batch(meshes_for("fsq"))).turns[0].sums.numbers["kl"].item() for _ in range(3)])
    assert found[0] == found[1]
    assert found[0][0] > found[0][-1]


def test_dropout_is_random_in_training_only() -> None:
    net, data = build(dropout=0.5), pad([table()])
    assert not torch.equal(net.reconstruct(*data).logits, net.reconstruct(*data).logits)
    assert torch.equal(net.eval().reconstruct(*data).logits, net.reconstruct(*data).logits)


# ---- building


def test_it_builds_without_memory() -> None:
    with torch.device("meta"):
        stage = build_stage(GraphTokenizerStageConfig(), 128)
    net = stage.nets["tokenizer"]
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert net.vocab_size == 16384
    ids, num_faces = torch.zeros(2, 5, 3, 2, dtype=torch.long, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    assert net.decode(ids, num_faces).shape == (2, 5, 3, 3)
    assert stage.best.metric == "decoded_accuracy"


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"corners of shape \[1, 6, 4, 3\]; this tokenizer takes b x f x 3 x 3 bins"):
        build().encode(*pad([box((1, 1, 1), (5, 5, 5), 4)]))
    with pytest.raises(ValueError, match="2000 bins; the graph tokenizer takes 2 to 1024"):
        GraphTokenizer(model(), 2000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinate_width": 7}, "coordinate_width 7 must be even"),
        ({"kernel": 4}, "kernel 4 must be odd"),
        ({"encoder_attention": 1, "heads": 5}, "encoder_width 384 does not split into 5 heads"),
        ({"decoder_attention": 1, "decoder_width": 20}, "decoder_width 20 does not split into 6 heads"),
        ({"corners": 5}, "corners"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GraphTokenizerConfig.model_validate(change)
