"""Captions of every script and length to states."""

from __future__ import annotations

import pytest
import torch

from tessera.text.bytes import ByteEncoder, ByteTextConfig, read_bytes

CONFIG = ByteTextConfig(length=16, width=32, depth=2, heads=2)


def text_of(ids: torch.Tensor) -> str:
    return bytes((ids[ids > 0] - 1).tolist()).decode()


@pytest.mark.parametrize(
    ("caption", "kept"),
    [
        ("a red cat", "a red cat"),
        ("", ""),
        (None, ""),
        ("exactly sixteen!", "exactly sixteen!"),
        ("longer than sixteen bytes", "longer than sixt"),
        ("красный кот", "красный "),
        ("猫猫猫猫猫猫", "猫猫猫猫猫"),
        ("\0 nul", "\0 nul"),
    ],
)
def test_bytes_come_back_and_are_cut_at_whole_characters(caption: str | None, kept: str) -> None:
    text = read_bytes([caption], 16)
    assert text_of(text.ids[0]) == kept
    assert text.mask.sum().item() == len(kept.encode())


def test_half_a_surrogate_pair_is_no_crash() -> None:
    assert read_bytes(["broken \ud83d"], 16).mask.sum() == 8


def test_a_caption_does_not_see_the_others_of_its_batch() -> None:
    torch.manual_seed(0)
    net = ByteEncoder(CONFIG).double().eval()
    captions = ["a cat", "", "something longer", "猫"]
    together = net(read_bytes(captions, 16))
    for index, caption in enumerate(captions):
        alone = net(read_bytes([caption], 16))
        torch.testing.assert_close(alone.states[0], together.states[index], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(alone.pooled[0], together.pooled[index], rtol=1e-9, atol=1e-9)
    assert together.states.isfinite().all()
    assert together.pooled[1].eq(0).all()
    assert not together.mask[1].any()


def test_order_matters_and_padding_does_not() -> None:
    torch.manual_seed(0)
    net = ByteEncoder(CONFIG).double().eval()
    one, two = net(read_bytes(["red on blue"], 16)), net(read_bytes(["blue on red"], 16))
    assert not torch.allclose(one.pooled, two.pooled, atol=1e-3)
    longer = ByteEncoder(CONFIG.model_copy(update={"length": 24})).double().eval()
    longer.load_state_dict({**net.state_dict(), "place": torch.cat([net.place, torch.ones(8, 32)])})
    torch.testing.assert_close(longer(read_bytes(["red on blue"], 24)).pooled, one.pooled, rtol=1e-9, atol=1e-9)


def test_captions_taken_away_look_empty() -> None:
    torch.manual_seed(0)
    states = ByteEncoder(CONFIG)(read_bytes(["a", "b"], 16)).without(torch.tensor([True, False]))
    assert states.mask.any(1).tolist() == [False, True]
    assert states.pooled.abs().sum(1).gt(0).tolist() == [False, True]
