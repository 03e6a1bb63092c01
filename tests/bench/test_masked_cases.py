"""The masked generator's cases run at a small size, and are what they say they are at the full one."""

from __future__ import annotations

import pytest
import torch

from tessera.bench import CASES, masked
from tessera.bench.masked import LARGE, Size, Unmasked, captions, digits, fitted, generator, tokens, variant
from tessera.config import UserError
from tessera.generators.masked.model import MaskedTransformer
from tessera.generators.masked.stage import build_nets

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the full size runs there")
SMALL = Size((4, 4), 2, 65_536, (7, 64))


@pytest.mark.parametrize("name", ["image.maskgit.train", "image.maskgit.sample", "image.maskgit.400m"])
def test_a_case_runs_at_a_small_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "DRAW", masked.DRAW.model_copy(update={"steps": 2}))
    row = CASES[name](None)
    assert row["reduced"]
    assert row["items_per_s"] > 0
    assert row["tflop_per_s"] >= 0
    assert row["tokens"] == 16
    assert row["variant"] == ""


@pytest.mark.parametrize("words", ["eager unmasked", "blocks heads64 whole"])
def test_variants_run(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_BENCH", words)
    assert CASES["image.maskgit.train"](None)["variant"] == " ".join(sorted(words.split()))


def test_an_unknown_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_BENCH", "blocs")
    with pytest.raises(UserError, match="'blocs'; did you mean 'blocks'"):
        variant()


def test_the_large_one_has_400_million_parameters() -> None:
    with torch.device("meta"):
        nets = build_nets(LARGE, vocab_size=65_536, grid=(32, 32), text_width=512)
    assert 380e6 < sum(p.numel() for p in nets["generator"].parameters()) < 420e6


def test_unmasked_is_the_same_where_the_mask_hides_nothing() -> None:
    config = fitted(masked.PEER, frozenset())
    nets = [generator(config, SMALL, frozenset(words)) for words in ((), ("unmasked",))]
    for net in nets:
        torch.nn.init.normal_(net.condition.bias, generator=torch.Generator().manual_seed(0))  # gates start at 0
    assert all(isinstance(block.cross, Unmasked) for block in nets[1].blocks)
    ids, text = tokens(2, SMALL).ids.flatten(1), captions(2, SMALL)
    first, second = (net(ids, text) for net in nets)
    torch.testing.assert_close(first, second)
    dropped = text.without(torch.tensor([True, False]))
    with_mask, without = (net(ids, dropped)[0] for net in nets)
    assert not torch.allclose(with_mask, without)


def test_a_whole_vocabulary_and_two_digits() -> None:
    def made(whole: bool) -> MaskedTransformer:
        return generator(fitted(masked.PEER, frozenset()), SMALL, frozenset({"whole"} if whole else ()))

    assert made(True).digits == (65_536,)
    assert made(False).digits == (256, 256)
    with pytest.raises(ZeroDivisionError), digits(True):
        _ = 1 / 0
    assert made(False).digits == (256, 256)
