"""The two turns: first values by theory, weights and penalties by hand, and no dependence on how batches are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.batches import ImageBatch
from tessera.contracts import Context, Loss
from tessera.nn.perceptual import PerceptualConfig, VGG16Distance
from tessera.nn.similarity import psnr, ssim
from tessera.tokenizers.image.critic import Critic, CriticConfig, LeCamConfig, PenaltyConfig
from tessera.tokenizers.image.losses import ADAPTIVE_LIMIT, ImageLossConfig, ImageLosses, follow, follow_latents, judge_with_slope
from tessera.tokenizers.image.model import ImageTokenizer, ImageTokenizerConfig

MODEL = ImageTokenizerConfig(widths=(8, 8), blocks=(1, 1))
CRITIC = CriticConfig(widths=(8, 8), start_step=10, warmup_steps=4)


def nets(fresh: bool = False) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {"tokenizer": ImageTokenizer(MODEL, 3), "critic": Critic(CRITIC, 3)}
    for parameter in [p for net in made.values() for p in net.parameters() if not fresh]:
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return made


def batch(num: int = 4, size: int = 16, valid: Sequence[bool] | None = None) -> ImageBatch:
    images = torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(2)) * 2 - 1
    mask = torch.ones(num, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return ImageBatch(images, mask, torch.arange(num), tuple(map(str, range(num))), (None,) * num)


def cut(whole: ImageBatch, start: int, stop: int) -> ImageBatch:
    part = slice(start, stop)
    return ImageBatch(whole.images[part], whole.valid[part], whole.positions[part], whole.keys[part], whole.captions[part])


def losses(critic: CriticConfig | None = CRITIC, l1: float = 1.0, l2: float = 1.0) -> ImageLosses:
    return ImageLosses(ImageLossConfig(l1=l1, l2=l2), critic)


def at(step: int, handed: dict[str, Any] | None = None) -> Context:
    return Context(step, 0, torch.arange(4), handed or {})


# ---- the first values follow from zeros


def test_the_first_losses_are_what_theory_says() -> None:
    fresh, data = nets(fresh=True), batch()
    loss = losses(l1=0.7, l2=0.3).tokenizer_turn(fresh, data, at(10))
    assert loss.parts["l1"].item() == pytest.approx(0.7 * data.images.abs().mean().item() * 4, rel=1e-6)
    assert loss.parts["l2"].item() == pytest.approx(0.3 * data.images.square().mean().item() * 4, rel=1e-6)
    assert loss.parts["plea"].item() == 0
    assert loss.total.item() == pytest.approx((loss.parts["l1"] + loss.parts["l2"]).item(), rel=1e-6)
    assert loss.weight.item() == 4
    judged = losses().critic_turn(fresh, data, at(10, {"tokenizer": loss.hand}))
    assert judged.parts["hinge"].item() == judged.total.item() == 2 * 4
    assert judged.parts["real_logit"].item() == judged.parts["made_logit"].item() == 0


def test_values_of_a_used_net_by_hand() -> None:
    used, data = nets(), batch()
    loss = losses().tokenizer_turn(used, data, at(10))
    made = used["tokenizer"](data.images)
    plea = -used["critic"](made.images).flatten(1).mean(1)
    error = (made.images - data.images).flatten(1)
    by_hand = error.abs().mean(1) + error.square().mean(1) + 0.1 * plea
    assert loss.total.item() == pytest.approx(by_hand.sum().item(), rel=1e-5)
    assert loss.parts["psnr"].item() == pytest.approx(psnr(made.images.clamp(-1, 1), data.images).sum().item(), rel=1e-5)
    assert torch.equal(loss.stats["codes"], torch.bincount(made.ids.flatten(), minlength=1000).float())
    real, fake = used["critic"](data.images).flatten(1), used["critic"](made.images).flatten(1)
    hinge = (1 - real).clamp(min=0).mean(1) + (1 + fake).clamp(min=0).mean(1)
    judged = losses().critic_turn(used, data, at(10, {"tokenizer": loss.hand}))
    assert judged.total.item() == pytest.approx(hinge.sum().item(), rel=1e-5)


def test_what_is_handed_on_is_the_reconstruction_without_its_graph() -> None:
    used, data = nets(), batch()
    loss = losses().tokenizer_turn(used, data, at(0))
    assert torch.equal(loss.hand, used["tokenizer"](data.images).images)
    assert not loss.hand.requires_grad
    assert all(not part.requires_grad for part in [*loss.parts.values(), *loss.stats.values()])


@pytest.mark.parametrize(("step", "pleads"), [(0, False), (9, False), (10, True), (11, True)])
def test_the_tokenizer_hears_the_critic_from_its_start_on(step: int, pleads: bool) -> None:
    loss = losses().tokenizer_turn(nets(), batch(), at(step))
    assert ("plea" in loss.parts) is pleads


def test_without_a_critic_there_is_no_plea() -> None:
    assert "plea" not in losses(None).tokenizer_turn(nets(), batch(), at(10**6)).parts


def test_the_perceptual_term_is_added() -> None:
    with_eyes = nets() | {"perceptual": VGG16Distance().eval().requires_grad_(False)}
    plain = losses(None).tokenizer_turn(nets(), batch(), at(0))
    seen = losses(None).tokenizer_turn(with_eyes, batch(), at(0))
    assert seen.parts["perceptual"].item() > 0
    assert seen.total.item() == pytest.approx(plain.total.item() + seen.parts["perceptual"].item(), rel=1e-5)


@pytest.mark.parametrize("turn", ["tokenizer", "critic", "measure"])
def test_half_precision_stays_inside_the_nets(turn: str) -> None:
    """Sums for the log are taken in full precision: the parts of a turn add up to its total."""
    used, data, terms = nets(), batch(), losses()
    hand = {"tokenizer": used["tokenizer"](data.images).images.detach()}
    call = {"tokenizer": terms.tokenizer_turn, "critic": terms.critic_turn, "measure": terms.measure}[turn]
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(used, data, at(0, hand))
    full = call(used, data, at(0, hand))
    added = sum(part.item() for name, part in loss.parts.items() if name in ("l1", "l2", "hinge"))
    assert added == pytest.approx(loss.total.item(), rel=1e-5)
    assert loss.total.item() == pytest.approx(full.total.item(), rel=0.03)
    assert all(value.dtype == torch.float32 for value in [loss.total, loss.weight, *loss.parts.values(), *loss.stats.values()])


# ---- the adaptive weight


ADAPTIVE = CRITIC.model_copy(update={"adaptive": True, "weight": 0.3})


def test_the_adaptive_weight_is_the_ratio_of_gradient_norms() -> None:
    used, data = nets(), batch()
    loss = losses(ADAPTIVE).tokenizer_turn(used, data, at(10))
    made = used["tokenizer"](data.images).images.detach()
    ratios = []
    for index in range(4):
        picture, real = made[index : index + 1].clone().requires_grad_(True), data.images[index : index + 1]
        error = picture - real
        (pull,) = torch.autograd.grad(error.abs().mean() + error.square().mean(), picture)
        (push,) = torch.autograd.grad(-used["critic"](picture).mean(), picture)
        ratios.append((pull.norm() / push.norm()).item())
    assert loss.parts["plea_weight"].item() == pytest.approx(0.3 * sum(ratios), rel=1e-4)


def test_an_adaptive_plea_pulls_with_its_share() -> None:
    """The gradient of weight * plea at the reconstruction has 0.3 times the norm of the other terms', picture by picture."""
    used, data = nets(), batch()
    made = used["tokenizer"](data.images).images.detach().requires_grad_(True)
    terms = sum(losses().reconstruction_terms(used, made, data.images).values(), torch.zeros(4))
    plea = -used["critic"](made).flatten(1).mean(1)
    (pull,) = torch.autograd.grad(terms.sum(), made)
    (push,) = torch.autograd.grad(plea.sum(), made)
    weight = losses(ADAPTIVE).plea_weight(pull, push)
    assert not weight.requires_grad
    torch.testing.assert_close(weight * push.flatten(1).norm(dim=1), 0.3 * pull.flatten(1).norm(dim=1))


def test_the_adaptive_weight_is_limited_where_the_critic_is_flat() -> None:
    fresh = nets(fresh=True)  # logits 0 everywhere, gradients too
    loss = losses(ADAPTIVE).tokenizer_turn(fresh, batch(), at(10))
    assert loss.parts["plea_weight"].item() == pytest.approx(0.3 * ADAPTIVE_LIMIT * 4)
    assert bool(torch.isfinite(loss.total))


@pytest.mark.parametrize("critic", [CRITIC, ADAPTIVE, None], ids=["fixed", "adaptive", "none"])
def test_gradients_are_those_of_the_terms_written_out(critic: CriticConfig | None) -> None:
    used, data = nets(), batch(valid=(True, True, False, True))
    loss = losses(critic).tokenizer_turn(used, data, at(10))
    made = used["tokenizer"](data.images).images
    error = (made - data.images).flatten(1)
    plain = error.abs().mean(1) + error.square().mean(1)
    if critic is not None:
        plea = -used["critic"](made).flatten(1).mean(1)
        (pull,) = torch.autograd.grad(plain.sum(), made, retain_graph=True)
        (push,) = torch.autograd.grad(plea.sum(), made, retain_graph=True)
        plain = plain + losses(critic).plea_weight(pull, push).detach() * plea
    total = (plain * data.valid).sum()
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    parameters = list(used["tokenizer"].parameters())
    ours, theirs = (torch.autograd.grad(value, parameters) for value in (loss.total, total))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---- cutting


@pytest.mark.parametrize("critic", [CRITIC, ADAPTIVE], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("edges", [(0, 1, 4), (0, 2, 3, 4), (0, 1, 2, 3, 4)])
def test_a_batch_may_be_cut_anywhere(critic: CriticConfig, edges: tuple[int, ...]) -> None:
    penalised = critic.model_copy(update={"penalty": PenaltyConfig(weight=2.0, every=5)})
    used, terms = nets(), losses(penalised)

    def both(data: ImageBatch) -> tuple[Loss, Loss]:
        first = terms.tokenizer_turn(used, data, at(10))
        return first, terms.critic_turn(used, data, at(10, {"tokenizer": first.hand}))

    def gradients(pairs: Sequence[tuple[Loss, Loss]]) -> list[Tensor]:
        made: list[Tensor] = []
        for turn, net in enumerate(("tokenizer", "critic")):
            total = torch.stack([pair[turn].total for pair in pairs]).sum()
            made += torch.autograd.grad(total, list(used[net].parameters()), retain_graph=True)
        return made

    whole = [both(batch())]
    parts = [both(cut(batch(), start, stop)) for start, stop in itertools.pairwise(edges)]
    for turn in (0, 1):
        assert sum(pair[turn].weight.item() for pair in parts) == 4
        for name, value in whole[0][turn].parts.items():
            assert sum(pair[turn].parts[name].item() for pair in parts) == pytest.approx(value.item(), rel=1e-4, abs=1e-5), name
        for name, value in whole[0][turn].stats.items():
            torch.testing.assert_close(
                torch.stack([pair[turn].stats[name] for pair in parts]).sum(0), value, rtol=1e-4, atol=1e-4
            )
    for a, b in zip(gradients(whole), gradients(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---- what is not valid does not count


@pytest.mark.parametrize("valid", [(True, False, True, False), (False, False, False, True)])
def test_validation_sees_only_what_is_valid(valid: tuple[bool, ...]) -> None:
    used, padded = nets(), batch(valid=valid)
    kept = replace(padded, images=padded.images[padded.valid], valid=padded.valid[padded.valid])
    masked, alone = losses().measure(used, padded, at(3)), losses().measure(used, kept, at(3))
    assert masked.weight.item() == alone.weight.item() == sum(valid)
    assert masked.total.item() == pytest.approx(alone.total.item(), rel=1e-5)
    for name, value in alone.parts.items():
        assert masked.parts[name].item() == pytest.approx(value.item(), rel=1e-4), name
    assert torch.equal(masked.stats["codes"], alone.stats["codes"])


def test_validation_by_hand() -> None:
    used, data = nets(), batch()
    with torch.no_grad():
        used["tokenizer"].decoder.out.weight.mul_(30)  # type: ignore[union-attr,operator]
        loss, made = losses().measure(used, data, at(10)), used["tokenizer"](data.images).images
    seen = made.clamp(-1, 1)
    assert made.abs().max() > 1
    assert loss.parts["psnr"].item() == pytest.approx(psnr(seen, data.images).sum().item(), rel=1e-5)
    assert loss.parts["ssim"].item() == pytest.approx(ssim(seen, data.images).sum().item(), rel=1e-5)
    assert loss.parts["l1"].item() == pytest.approx((made - data.images).abs().flatten(1).mean(1).sum().item(), rel=1e-5)
    assert "plea" not in loss.parts
    assert losses().digest(loss.stats)["codes_used"] > 0


# ---- running statistics of the latents


def test_latents_are_followed_by_hand() -> None:
    used, data = nets(), batch(valid=(True, False, True, True))
    tokenizer = used["tokenizer"]
    assert isinstance(tokenizer, ImageTokenizer)
    latents = tokenizer.latent(data.images[data.valid]).detach().flatten(0, 2)
    stats = losses().tokenizer_turn(used, data, at(0)).stats
    follow_latents(used, stats, 0)  # the first batch counts in full
    torch.testing.assert_close(tokenizer.latent_mean, latents.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tokenizer.latent_variance, latents.var(0, unbiased=False), rtol=1e-3, atol=1e-5)
    seen = tokenizer.standardise(latents)
    torch.testing.assert_close(seen.mean(0), torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen.var(0, unbiased=False), torch.ones(4), rtol=1e-2, atol=1e-2)
    before = tokenizer.latent_mean.clone()
    follow_latents(used, {**stats, "latent_sum": stats["latent_sum"] + stats["latent_count"]}, 3)  # a quarter of the new
    torch.testing.assert_close(tokenizer.latent_mean, before + 0.25, rtol=1e-4, atol=1e-5)


# ---- the penalty


def test_the_penalty_is_r1_by_hand() -> None:
    used, data = nets(), batch()
    penalised = losses(CRITIC.model_copy(update={"penalty": PenaltyConfig(weight=3.0, every=4)}))
    hand = {"tokenizer": used["tokenizer"](data.images).images.detach()}
    due, not_due = penalised.critic_turn(used, data, at(8, hand)), penalised.critic_turn(used, data, at(9, hand))
    assert "penalty" not in not_due.parts
    parameters = list(used["critic"].parameters())
    by_hand = torch.zeros(())
    for picture in data.images:
        leaf = picture[None].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(used["critic"](leaf).mean(), leaf, create_graph=True)
        by_hand = by_hand + 3.0 / 2 * 4 * slope.square().sum()
    assert due.parts["penalty"].item() == pytest.approx(by_hand.item(), rel=1e-4)
    assert due.total.item() == pytest.approx(not_due.total.item() + by_hand.item(), rel=1e-4)
    ours = torch.autograd.grad(due.total - not_due.total, parameters, allow_unused=True)
    theirs = torch.autograd.grad(by_hand, parameters, allow_unused=True)
    for a, b, parameter in zip(ours, theirs, parameters, strict=True):
        zero = torch.zeros_like(parameter)  # the last bias has no second derivative
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-3, atol=1e-5)


def test_derivatives_along_a_direction_and_the_penalty_against_torch() -> None:
    torch.manual_seed(0)
    critic = Critic(CriticConfig(widths=(8, 16, 16)), 3)
    nn.init.normal_(critic.out.weight)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    logits, along = critic(x, direction).detach().chunk(2)
    assert torch.equal(logits, critic(x))
    _, wanted = torch.autograd.functional.jvp(critic, x, direction)  # by a second derivative
    torch.testing.assert_close(along, wanted, rtol=1e-4, atol=1e-4)
    leaf = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(leaf).flatten(1).mean(1).sum(), leaf, create_graph=True)
    squared = judge_with_slope(critic, x)[1]
    torch.testing.assert_close(squared, slope.square().flatten(1).sum(1), rtol=1e-5, atol=1e-9)
    assert all(p.requires_grad for p in critic.parameters())


# ---- the critic


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("widths", "size"), [((4, 8), 16), ((8, 8, 16, 16, 16), 16), ((8, 12, 24), 20)])
def test_the_critic_takes_any_size_and_starts_at_zero(widths: tuple[int, ...], size: int, channels: int) -> None:
    logits = Critic(CriticConfig(widths=widths), channels)(torch.randn(2, channels, size, size + 8))
    halvings = len(widths) - 1
    assert logits.shape == (2, 1, size >> halvings, (size + 8) >> halvings)
    assert logits.abs().max() == 0


# ---- other contests


BCE = CRITIC.model_copy(update={"loss": "bce"})


def test_the_first_logistic_losses_are_what_theory_says() -> None:
    fresh, data = nets(fresh=True), batch()
    loss = losses(BCE).tokenizer_turn(fresh, data, at(10))
    assert loss.parts["plea"].item() == pytest.approx(4 * math.log(2), rel=1e-6)
    judged = losses(BCE).critic_turn(fresh, data, at(10, {"tokenizer": loss.hand}))
    assert judged.parts["bce"].item() == judged.total.item() == pytest.approx(4 * 2 * math.log(2), rel=1e-6)
    assert "hinge" not in judged.parts


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_logistic_loss_by_hand(adaptive: bool) -> None:
    used, data = nets(), batch()
    critic = BCE.model_copy(update={"adaptive": adaptive})
    loss = losses(critic).tokenizer_turn(used, data, at(10))
    made = used["tokenizer"](data.images).images.detach().requires_grad_(True)
    real, fake = used["critic"](data.images).flatten(1), used["critic"](made).flatten(1)
    plea = -fake.sigmoid().log().mean(1)
    error = (made - data.images).flatten(1)
    plain = error.abs().mean(1) + error.square().mean(1)
    (pull,) = torch.autograd.grad(plain.sum(), made, retain_graph=True)
    (push,) = torch.autograd.grad(plea.sum(), made, retain_graph=True)
    weight = 0.1 * (pull.flatten(1).norm(dim=1) / push.flatten(1).norm(dim=1) if adaptive else torch.ones(4))
    assert loss.parts["plea_weight"].item() == pytest.approx(weight.sum().item(), rel=1e-4)
    assert loss.total.item() == pytest.approx((plain + weight * plea).sum().item(), rel=1e-5)
    judged = losses(critic).critic_turn(used, data, at(10, {"tokenizer": loss.hand}))
    by_hand = -real.sigmoid().log().mean(1) - (1 - fake.sigmoid()).log().mean(1)
    assert judged.total.item() == pytest.approx(by_hand.sum().item(), rel=1e-5)


def test_lecam_by_hand() -> None:
    config = CRITIC.model_copy(update={"lecam": LeCamConfig(weight=0.2, decay=0.75)})
    used, data = nets(), batch(valid=(True, True, False, True))
    torch.manual_seed(0)
    critic = Critic(config, 3)
    critic.load_state_dict(used["critic"].state_dict() | {"past.real": torch.tensor(0.5), "past.made": torch.tensor(-0.25)})
    used["critic"] = critic
    hand = used["tokenizer"](data.images).images.detach()
    plain = losses().critic_turn(used | {"critic": nets()["critic"]}, data, at(10, {"tokenizer": hand}))
    judged = losses(config).critic_turn(used, data, at(10, {"tokenizer": hand}))
    real, fake = critic(data.images).flatten(1), critic(hand).flatten(1)
    by_hand = 0.2 * ((real + 0.25).square().mean(1) + (fake - 0.5).square().mean(1))
    assert judged.parts["lecam"].item() == pytest.approx(by_hand[data.valid].sum().item(), rel=1e-5)
    assert judged.total.item() == pytest.approx(plain.total.item() + by_hand[data.valid].sum().item(), rel=1e-5)
    first = losses(config).tokenizer_turn(used, data, at(10))
    follow(used, {**first.stats, **judged.stats}, 10)
    assert critic.past is not None
    assert critic.past.real.item() == pytest.approx(0.75 * 0.5 + 0.25 * real[data.valid].mean().item(), rel=1e-5)
    assert critic.past.made.item() == pytest.approx(-0.75 * 0.25 + 0.25 * fake[data.valid].mean().item(), rel=1e-5)
    kept = critic.past.real.clone()
    follow(used, first.stats, 11)  # a step without the critic's turn
    assert torch.equal(critic.past.real, kept)
    assert not plain.stats


def test_without_lecam_the_critic_saves_nothing_more() -> None:
    assert not [name for name in Critic(CRITIC, 3).state_dict() if "past" in name]


def test_the_perceptual_term_is_weighed(tmp_path: Path) -> None:
    eyes = VGG16Distance().eval().requires_grad_(False)
    terms = ImageLossConfig(perceptual=PerceptualConfig(path=tmp_path / "vgg16.safetensors", weight=0.25))
    full = losses(None).reconstruction_terms({"perceptual": eyes}, batch().images.flip(0), batch().images)
    part = ImageLosses(terms, None).reconstruction_terms({"perceptual": eyes}, batch().images.flip(0), batch().images)
    torch.testing.assert_close(part["perceptual"], 0.25 * full["perceptual"])
