"""How many ranks there are changes no result: one against two and three on the same global batch, by gloo on a CPU.

Sums are added up in another order, so equality is to rounding, not to the bit: gradients to 1e-6, losses to 1e-5, relative.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.processes import check, made_once, read_metrics, run, train_arguments

HERE = Path(__file__).parent
PLAIN = {  # no dropout, which is each rank's own; a rate that does not depend on the number of steps; both turns soon
    "tokenizer__model__dropout": 0,
    "tokenizer__optim__schedule": "constant",
    "tokenizer__critic__start_step": 2,
    "tokenizer__critic__warmup_steps": 1,
    "engine__validate_every_steps": 5,
    "engine__preview_every_steps": 5,
    "engine__save_every_steps": 5,
}


class Trained:
    """A run of one or more ranks, with what each of them recorded."""

    def __init__(self, path: Path, records: Path) -> None:
        self.path, self.metrics = path, read_metrics(path)
        self.ranks: list[dict[str, Any]] = [json.loads(file.read_text()) for file in sorted(records.iterdir())]

    def losses(self) -> dict[tuple[int, str], float]:
        """(step, turn) -> loss."""
        lines = [line for line in self.metrics if line["kind"] == "train"]
        return {(line["step"], name): line[name] for line in lines for name in line if name.endswith("/loss")}

    def keys(self) -> dict[str, list[str]]:
        """step -> the keys of the global batch, in rank order."""
        return {step: [key for rank in self.ranks for key in rank["keys"][step]] for step in self.ranks[0]["keys"]}


def train(
    workshop: Path, shapes: Path, ranks: int, steps: int, batch_size: int, micro: int | None = None, quantizer: str = ""
) -> Trained:
    """A run of `steps`, made once; with another quantizer in the place of FSQ where one is named."""
    path = workshop / f"{ranks} ranks {steps} steps {batch_size} of {micro}{quantizer and ' other'}"
    records = path.with_name(f"{path.name} records")
    sets = {**PLAIN, "tokenizer__steps": steps, "tokenizer__batch_size": batch_size, "engine__micro_batch_size": micro or "null"}
    arguments = [str(records), *train_arguments(shapes, path, **sets)]
    if quantizer:
        levels = next(
            index for index, argument in enumerate(arguments) if argument.startswith("tokenizer.model.quantizer.levels")
        )
        arguments[levels] = f"tokenizer.model.quantizer={quantizer}"
    made_once(path, lambda: check(run(arguments, workshop, ranks=ranks, script=HERE / "record.py")))
    return Trained(path, records)


def first_step(workshop: Path, shapes: Path, ranks: int) -> Path:
    """Where `first_step.py` left what it measured on so many ranks."""
    path = workshop / f"first step of {ranks} ranks"

    def make() -> None:
        path.mkdir()
        check(run([str(path), str(shapes)], workshop, ranks=ranks, script=HERE / "first_step.py"))

    return made_once(path, make)


def assert_same_losses(trained: Trained, alone: Trained) -> None:
    expected = alone.losses()
    for place, loss in trained.losses().items():
        assert loss == pytest.approx(expected[place], rel=1e-5), place


def assert_ranks_agree(trained: Trained, ranks: int) -> None:
    """Bit for bit; and nothing of the process group outlives it, or it might abort the process at its end."""
    assert len(trained.ranks) == ranks
    assert len({rank["hash"] for rank in trained.ranks}) == 1
    assert not [name for rank in trained.ranks for name in rank["threads"] if "gloo" in name]


@pytest.mark.parametrize("case", ["even", "uneven", "uneven in micro-batches"])
@pytest.mark.parametrize("turn", ["tokenizer", "critic"])
def test_first_gradient(turn: str, case: str, workshop: Path, shapes: Path) -> None:
    """Of all parameters of a turn together: one of them alone may be a small difference of large sums."""
    whole = case.removesuffix(" in micro-batches")
    one = load_file(first_step(workshop, shapes, 1) / f"{whole}.safetensors")[turn].double()
    two = load_file(first_step(workshop, shapes, 2) / f"{case}.safetensors")[turn].double()
    assert one.norm() > 1
    assert (two - one).norm() <= 1e-6 * one.norm()


def test_validation(workshop: Path, shapes: Path) -> None:
    """Of five samples, in batches of 8, of 4 and 4, and of 2 and 2: the last ones are padded."""
    one, two = (first_step(workshop, shapes, ranks) for ranks in (1, 2))
    expected = json.loads((one / "even.json").read_text())
    for path in (two / "even.json", two / "uneven in micro-batches.json"):
        assert json.loads(path.read_text()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("batch_size", "micro"), [(8, None), (7, None), (7, 2)])
def test_five_steps(batch_size: int, micro: int | None, workshop: Path, shapes: Path) -> None:
    alone = train(workshop, shapes, 1, 10 if batch_size == 8 else 5, batch_size)
    two = train(workshop, shapes, 2, 5, batch_size, micro)
    assert_same_losses(two, alone)
    assert_ranks_agree(two, 2)
    assert two.keys() == {step: keys for step, keys in alone.keys().items() if int(step) <= 5}
    assert len(two.losses()) == 5 + 4, "the critic's turn begins at the second step"


def test_five_steps_of_a_codebook(workshop: Path, shapes: Path) -> None:
    """It moves and restarts its codes by sums over all ranks and micro-batches."""
    chain = "{kind: residual, num_quantizers: 2, quantizer: {kind: vq, codes: 32, width: 4}}"
    alone, two = (train(workshop, shapes, ranks, 5, 7, micro, chain) for ranks, micro in ((1, None), (2, 2)))
    assert_same_losses(two, alone)
    assert_ranks_agree(two, 2)
    assert max(line.get("tokenizer/codes_restarted", 0) for line in alone.metrics) > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_on_another_number_of_ranks(ranks: int, workshop: Path, shapes: Path, tmp_path: Path) -> None:
    alone = train(workshop, shapes, 1, 10, 8)
    shutil.copytree(train(workshop, shapes, 2, 5, 8).path, tmp_path / "run")
    command = [str(tmp_path / "records"), "resume", str(tmp_path / "run"), "--set", "tokenizer.steps=10"]
    check(run(command, tmp_path, ranks=ranks, script=HERE / "record.py"))
    resumed = Trained(tmp_path / "run", tmp_path / "records")
    assert resumed.losses().keys() == alone.losses().keys()
    assert_same_losses(resumed, alone)
    assert_ranks_agree(resumed, ranks)
    assert resumed.keys() == {step: keys for step, keys in alone.keys().items() if int(step) > 5}
