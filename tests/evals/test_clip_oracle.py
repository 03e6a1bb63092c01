"""Rows of the oracle of clips: what is counted, and that time is looked at."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tessera.data.synth.digits import DigitsOptions, caption, draw, oracle_reader, plan_digits, sample_scene
from tessera.data.synth.digits_oracle import DigitsOracle
from tessera.evals.clip_oracle import readable_clips, reference_rows, tally
from tessera.media.clips import Frames

LEFT, UP = "a red 7 moves left slowly", "a red 7 moves up fast"
BOTH = "a red 7 moves left slowly and a blue 3 moves up fast"


class Scripted:
    """Right where the clip's first number says so: 1 direction, 2 digit."""

    def judge(self, clip: Frames, asked: str) -> Mapping[str, bool]:
        bits = int(clip.flat[0])
        return {"digit": bits >= 2, "direction": bits % 2 == 1, "joint": bits == 3}


def test_tally_counts_by_hand() -> None:
    clips = [np.full((2, 1, 1, 3), value, np.uint8) for value in (3, 1, 2, 0)]
    found = tally(clips, [LEFT, BOTH, UP, LEFT], Scripted())
    assert (found.all.num, found.all.right, found.all.asked["digit"]) == (4, {"digit": 2, "direction": 2, "joint": 1}, 4)
    told = found.as_dict()
    assert (told["direction"], told["joint"], told["n"]) == (0.5, 0.25, 4)
    assert told["directions"] == {
        "left": {"direction": 2 / 3, "joint": 1 / 3, "n": 3},
        "up": {"direction": 0.5, "joint": 0.0, "n": 2},
    }
    assert tally([], [], Scripted()).as_dict()["n"] == 0


def test_reference_rows_show_that_time_is_read() -> None:
    pytest.importorskip("sklearn")
    plan = plan_digits(3, DigitsOptions())
    scenes = [sample_scene(plan, "heldout", index) for index in range(12)]
    clips, captions = [draw(scene, plan.options) for scene in scenes], [caption(scene) for scene in scenes]
    rows = reference_rows(clips, captions, DigitsOracle(oracle_reader(), 17), 0)
    shares = {name: row.as_dict() for name, row in rows.items()}
    assert shares["real"]["joint"] >= 0.9
    assert shares["shuffled"]["joint"] == 0
    same = ("count", "digit", "colour")
    for name, lost in (("still", ("direction", "speed", "joint")), ("reversed", ("direction", "joint"))):
        assert all(shares[name][word] == 0 for word in lost)
        assert all(shares[name][word] == shares["real"][word] for word in same)
    assert shares["reversed"]["speed"] == shares["real"]["speed"] == 1


def test_what_the_oracle_cannot_judge_is_said() -> None:
    clip = np.zeros((5, 8, 8, 3), np.uint8)
    assert readable_clips([clip], [LEFT]) is None
    assert "a dog" in (readable_clips([clip], ["a dog"]) or "")
    assert "None" in (readable_clips([clip], [None]) or "")
    assert "5 x 8 x 4 x 3" in (readable_clips([clip[:, :, :4]], [LEFT]) or "")
