"""Which stage limits quality: the same measure of real samples, of their reconstructions and of samples, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Limit = Literal["tokenizer", "generator", "decoder", "prior", "neither", "unknown"]

MIN_POINTS = 0.03  # a smaller loss of joint accuracy is nobody's fault
MIN_APART = 0.1  # a smaller rise of 1-NNA is nobody's fault
MIN_SHARE = 0.5  # a smaller rise of a distance, over the floor, is nobody's fault
ADVICE = {name: f"train the {name} first" for name in ("tokenizer", "generator", "decoder", "prior")}


@dataclass(frozen=True, slots=True)
class Parts:
    """What stands between real samples and drawn ones, and what is made with the first of the two alone."""

    first: Limit = "tokenizer"
    second: Limit = "generator"
    made: str = "tokenizer reconstructions"

    def named(self, limit: Limit) -> Limit:
        """The part that `limiting` means."""
        return {"tokenizer": self.first, "generator": self.second}.get(limit, limit)


TOKENS = Parts()
EMBEDDINGS = Parts("decoder", "prior", "pictures drawn of real embeddings")


@dataclass(frozen=True, slots=True)
class Health:
    """What each stage loses, in the measure's own units, larger being worse, and the sentence. Of a recipe without tokens the
    first loss is the decoder's, and the second the prior's."""

    measure: str
    limit: Limit
    tokenizer_loss: float | None
    generator_loss: float | None
    sentence: str

    def as_dict(self) -> dict[str, object]:
        """Plain JSON."""
        return asdict(self)


def limiting(tokenizer_loss: float, generator_loss: float, least: float) -> Limit:
    """The rule: the stage that loses more, if it loses at least `least`; a tie is the tokenizer's, which the other needs."""
    if max(tokenizer_loss, generator_loss) < least:
        return "neither"
    return "tokenizer" if tokenizer_loss >= generator_loss else "generator"


def judge_accuracy(
    real: float, reconstruction: float | None, samples: float | None, *, things: str = "pictures",
    advice: Mapping[str, str] = ADVICE, measure: str = "oracle", parts: Parts = TOKENS,
) -> Health:  # fmt: skip
    """From accuracies by an oracle, or another measure, higher being better."""
    if reconstruction is None and samples is None:
        return Health(measure, "unknown", None, None, "neither reconstructions nor samples were measured")
    if reconstruction is None:
        lost = real - (samples or 0.0)
        sentence = f"samples score {percent(samples)} where real {things} score {percent(real)}: {points(lost)} points are lost"
        return Health(measure, "unknown", None, None, sentence + "; no reconstructions, so no stage can be named")
    first = real - reconstruction
    if samples is None:
        limit = parts.named(limiting(first, 0.0, MIN_POINTS))
        sentence = f"{parts.made} score {percent(reconstruction)} of real {things}' {percent(real)}"
        return Health(measure, limit, first, None, f"{sentence}: the {parts.first} loses {points(first)} points")
    second = reconstruction - samples
    limit = parts.named(limiting(first, second, MIN_POINTS))
    told = f"{parts.made} score {percent(reconstruction)}, samples {percent(samples)}"
    more = f"{points(second)} more" if second > 0 else "none"
    losses = f"the {parts.first} loses {points(first)} points, the {parts.second} {more}"
    return Health(measure, limit, first, second, f"{told}: {losses}: {advice.get(limit, 'neither limits quality')}")


def judge_distance(
    name: str, floor: float, reconstruction: float | None, samples: float | None, *, things: str = "pictures",
    parts: Parts = TOKENS,
) -> Health:  # fmt: skip
    """From distances to the same real pictures, lower being better; the floor is that of other real pictures."""
    if reconstruction is None and samples is None:
        return Health(name, "unknown", None, None, "neither reconstructions nor samples were measured")
    if reconstruction is None:
        sentence = f"{name} of samples is {samples:.4g}, the real-against-real floor {floor:.4g}"
        return Health(name, "unknown", None, None, sentence + "; no reconstructions, so no stage can be named")
    first, least = reconstruction - floor, MIN_SHARE * floor
    if samples is None:
        sentence = f"{name} of reconstructions is {reconstruction:.4g}, the real-against-real floor {floor:.4g}"
        limit = parts.named(limiting(first, 0.0, least))
        return Health(name, limit, first, None, f"{sentence}: the {parts.first} adds {first:.4g}")
    second = samples - reconstruction
    limit = parts.named(limiting(first, second, least))
    told = f"{name} is {floor:.4g} for real {things}, {reconstruction:.4g} for reconstructions, {samples:.4g} for samples"
    losses = f"the {parts.first} adds {first:.4g}, the {parts.second} {second:.4g}"
    return Health(name, limit, first, second, f"{told}: {losses}: {ADVICE.get(limit, 'neither limits quality')}")


def judge_apart(
    real: float, reconstruction: float | None, samples: float | None, *, advice: Mapping[str, str] = ADVICE
) -> Health:
    """From 1-NNA against the same real shapes: how well a row is told apart from them, where other real shapes are `real`."""
    if reconstruction is None and samples is None:
        return Health("1-NNA", "unknown", None, None, "neither reconstructions nor samples were measured")
    if reconstruction is None:
        sentence = f"1-NNA of samples is {percent(samples)}, of real shapes {percent(real)}"
        return Health("1-NNA", "unknown", None, None, sentence + "; no reconstructions, so no stage can be named")
    first = reconstruction - real
    if samples is None:
        sentence = f"1-NNA of reconstructions is {percent(reconstruction)}, of real shapes {percent(real)}"
        limit = limiting(first, 0.0, MIN_APART)
        return Health("1-NNA", limit, first, None, f"{sentence}: the tokenizer adds {points(first)} points")
    second = samples - reconstruction
    limit = limiting(first, second, MIN_APART)
    told = (
        f"1-NNA is {percent(real)} for real shapes, {percent(reconstruction)} for reconstructions, {percent(samples)} for samples"
    )
    losses = f"the tokenizer adds {points(first)} points, the generator {points(second)}"
    return Health("1-NNA", limit, first, second, f"{told}: {losses}: {advice.get(limit, 'neither limits quality')}")


def percent(share: float | None) -> str:
    """0.774 -> 77 %"""
    return f"{100 * (share or 0.0):.0f} %"


def points(share: float) -> str:
    """0.114 -> 11"""
    return f"{100 * share:.0f}"
