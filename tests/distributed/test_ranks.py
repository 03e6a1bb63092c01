"""How many ranks there are changes no result: one against two and three on the same global batch, by gloo on a CPU.

Sums are added up in another order, so equality is to rounding, not to the bit: gradients to 1e-6 (of clips 1e-5), losses to 1e-5,
relative.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tessera.data.synth.furniture import write_furniture
from tests.data.clip_makers import noise, save_gif
from tests.distributed.survey import measure
from tests.processes import check, made_once, read_metrics, run, train_arguments

HERE = Path(__file__).parent
slow = pytest.mark.slow
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

    def __init__(self, path: Path, records: Path, stage: str = "tokenizer") -> None:
        self.path, self.metrics = path, read_metrics(path, stage)
        read = [json.loads(file.read_text()) for file in sorted(records.iterdir())]
        self.ranks: list[dict[str, Any]] = [rank["stages"][stage] | {"threads": rank["threads"]} for rank in read]

    def losses(self) -> dict[tuple[int, str], float]:
        """(step, turn) -> loss."""
        lines = [line for line in self.metrics if line["kind"] == "train"]
        return {(line["step"], name): line[name] for line in lines for name in line if name.endswith("/loss")}

    def keys(self) -> dict[str, list[str]]:
        """step -> the keys of the global batch, in rank order."""
        return {step: [key for rank in self.ranks for key in rank["keys"][step]] for step in self.ranks[0]["keys"]}


def train(
    workshop: Path, shapes: Path, ranks: int, steps: int, batch_size: int, micro: int | None = None, quantizer: str = "",
    **more: str | int,
) -> Trained:  # fmt: skip
    """A run of `steps`, made once; with another quantizer in the place of FSQ where one is named."""
    name = f"{ranks} ranks {steps} steps {batch_size} of {micro}{quantizer and ' other'} {' '.join(map(str, more.values()))}"
    path = workshop / name.strip()
    records = path.with_name(f"{path.name} records")
    sets = {
        **PLAIN,
        "tokenizer__steps": steps,
        "tokenizer__batch_size": batch_size,
        "engine__micro_batch_size": micro or "null",
    } | more
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
    furniture = workshop / "furniture"
    made_once(furniture, lambda: write_furniture(furniture, 24, 0))
    clips = workshop / "clips"
    made_once(clips, lambda: write_clips(clips))

    def make() -> None:
        path.mkdir()
        data = [str(folder) for folder in (shapes, furniture, clips, shapes, clips)]
        check(run([str(path), *data], workshop, ranks=ranks, script=HERE / "first_step.py"))

    return made_once(path, make)


def write_clips(path: Path) -> None:
    """Of 1 to 9 frames, so that windows of 5 are whole, cut and short, on each rank others."""
    path.mkdir()
    for number in range(24):
        save_gif(path / f"{number:02d}.gif", noise(number, 1 + number * 5 % 9))
        (path / f"{number:02d}.txt").write_text(f"clip {number}")


def assert_same_losses(trained: Trained, alone: Trained) -> None:
    expected = alone.losses()
    for place, loss in trained.losses().items():
        assert loss == pytest.approx(expected[place], rel=1e-5), place


def assert_ranks_agree(trained: Trained, ranks: int, *, sliced: bool = False) -> None:
    """Bit for bit; and nothing of the process group outlives it, or it might abort the process at its end. Slices keep it in
    caches of torch's, where ten of ten runs ended well."""
    assert len(trained.ranks) == ranks
    assert len({rank["hash"] for rank in trained.ranks}) == 1
    assert sliced or not [name for rank in trained.ranks for name in rank["threads"] if "gloo" in name]


MICRO = "uneven in micro-batches"
TURNS = [
    ("tokenizer", "tokenizer"),
    ("tokenizer", "critic"),
    ("tokenizer of two grids", "tokenizer"),
    ("base", "generator"),
    ("base", "critic"),
    ("superres", "generator"),
    ("mesh tokenizer", "tokenizer"),
    ("mesh base", "generator"),
    ("video tokenizer", "tokenizer"),
    ("video tokenizer", "critic"),
    ("video base", "generator"),
    ("video base", "critic"),
    ("video base, token by token", "generator"),
    ("embedder", "embedder"),
    ("prior", "generator"),
    ("decoder", "generator"),
    ("upsampler", "generator"),
]


@pytest.mark.parametrize(
    ("stage", "turn", "case"),
    [(*turn, case) for turn in TURNS for case in ("even", "uneven", MICRO) if (turn[0], case) != ("embedder", MICRO)],
)
def test_first_gradient(stage: str, turn: str, case: str, workshop: Path, shapes: Path) -> None:
    """Of all parameters of a turn together: one of them alone may be a small difference of large sums. Those of clips are sums
    over more, and larger ones: 4e-6 apart, and 4e-15 in fp64. What the pair tells apart is within a micro-batch of all ranks."""
    whole = case.removesuffix(" in micro-batches")
    one = load_file(first_step(workshop, shapes, 1) / f"{stage} {whole}.safetensors")[turn].double()
    two = load_file(first_step(workshop, shapes, 2) / f"{stage} {case}.safetensors")[turn].double()
    assert one.norm() > 1
    assert (two - one).norm() <= (1e-5 if stage.startswith("video") else 1e-6) * one.norm()


@pytest.mark.parametrize("stage", dict.fromkeys(stage for stage, _ in TURNS))
def test_validation(stage: str, workshop: Path, shapes: Path) -> None:
    """Of five samples, in batches of 8, of 4 and 4, and of 2 and 2 (of the pair 3 and 3): the last ones are padded. What misleads
    a prior is another caption of the same batch."""
    one, two = (first_step(workshop, shapes, ranks) for ranks in (1, 2))
    expected = json.loads((one / f"{stage} even.json").read_text())
    expected.pop("cosine_misled", None)
    for path in (two / f"{stage} even.json", two / f"{stage} {'uneven' if stage == 'embedder' else MICRO}.json"):
        found = json.loads(path.read_text())
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("batch_size", "micro"), [pytest.param(8, None, marks=slow), pytest.param(7, None, marks=slow), (7, 2)])
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


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=slow)])
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


# ---- later stages

GENERATORS = {
    "base__steps": 5,
    "base__critic": "{kind: net, model: {width: 16, depth: 1, heads: 2}}",
    "superres": "{resolution: 32, batch_size: 7, steps: 5, model: {width: 16, depth: 1, heads: 2, self_conditioning: true}}",
    "sample": "{steps: 2, superres: {steps: 2}}",
}


def train_generators(workshop: Path, shapes: Path, ranks: int, micro: str = "null", parallel: str = "replicate") -> Path:
    """A run whose tokenizer one rank has trained, so that all see the same tokens; so many ranks made its caches and went on.
    Records lie beside it."""
    first = workshop / "tokenizer for generators"
    sets = {**PLAIN, **GENERATORS, "tokenizer__steps": 3}
    made_once(first, lambda: check(run(train_arguments(shapes, first, **sets), workshop)))
    path = workshop / f"generators {ranks} {micro} {parallel}"

    def make() -> None:
        shutil.copytree(first, path)
        command = ["resume", str(path), "--set", f"engine.micro_batch_size={micro}", f"engine.parallel={parallel}"]
        records = path.with_name(f"{path.name} records")
        check(run([str(records), *command], workshop, ranks=ranks, script=HERE / "record.py"))

    return made_once(path, make)


@pytest.mark.parametrize(("micro", "parallel"), [("null", "replicate"), ("2", "shard")])
@pytest.mark.parametrize("stage", ["base", "superres"])
def test_five_steps_of_a_generator(stage: str, micro: str, parallel: str, workshop: Path, shapes: Path) -> None:
    paths = [train_generators(workshop, shapes, 1), train_generators(workshop, shapes, 2, micro, parallel)]
    alone, two = (Trained(path, path.with_name(f"{path.name} records"), stage) for path in paths)
    assert len(two.losses()) == (10 if stage == "base" else 5), "the critic of base has a turn of its own"
    assert_same_losses(two, alone)
    assert_ranks_agree(two, 2, sliced=parallel == "shard")
    assert two.keys() == alone.keys()


def test_caches_of_two_ranks_are_those_of_one(workshop: Path, shapes: Path) -> None:
    one, two = (train_generators(workshop, shapes, ranks) / "cache" for ranks in (1, 2))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 8, "ids, faults, samples and manifest of two grids"
    assert sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file()) == files
    assert all((one / file).read_bytes() == (two / file).read_bytes() for file in files)


# ---- sharded


@pytest.mark.parametrize(
    ("ranks", "micro", "recompute"),
    [pytest.param(2, None, "false", marks=slow), (2, 2, "true"), pytest.param(3, None, "false", marks=slow)],
)
def test_slices_give_the_same_losses(ranks: int, micro: int | None, recompute: str, workshop: Path, shapes: Path) -> None:
    alone = train(workshop, shapes, 1, 10, 8)
    more = {"engine__parallel": "shard", "engine__activation_checkpointing": recompute}
    sliced = train(workshop, shapes, ranks, 5, 8, micro, **more)
    assert_same_losses(sliced, alone)
    assert_ranks_agree(sliced, ranks, sliced=True)
    assert len(sliced.losses()) == 5 + 4
    for rank in sliced.ranks:
        assert rank["held"] < 0.85, "the tokenizer's weights are slices, the critic's are whole"
    wanted = {(line["step"], line["kind"]): line for line in alone.metrics if line["kind"] != "train"}
    for line in sliced.metrics:
        if line["kind"] != "train":
            assert line["psnr"] == pytest.approx(wanted[line["step"], line["kind"]]["psnr"], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("shard", "replicate", 1), pytest.param("shard", "shard", 3, marks=slow), pytest.param("replicate", "shard", 2, marks=slow)],
)
def test_each_resumes_what_the_other_saved(
    before: str, after: str, ranks: int, workshop: Path, shapes: Path, tmp_path: Path
) -> None:
    alone = train(workshop, shapes, 1, 10, 8)
    more = {} if before == "replicate" else {"engine__parallel": "shard", "engine__activation_checkpointing": "false"}
    shutil.copytree(train(workshop, shapes, 2, 5, 8, **more).path, tmp_path / "run")
    command = [
        str(tmp_path / "records"),
        "resume",
        str(tmp_path / "run"),
        "--set",
        "tokenizer.steps=10",
        f"engine.parallel={after}",
    ]
    check(run(command, tmp_path, ranks=ranks, script=HERE / "record.py"))
    resumed = Trained(tmp_path / "run", tmp_path / "records")
    assert resumed.losses().keys() == alone.losses().keys()
    assert_same_losses(resumed, alone)
    assert_ranks_agree(resumed, ranks, sliced=after == "shard")


def test_micro_batches_send_no_gradients_but_the_last(workshop: Path, shapes: Path, tmp_path: Path) -> None:
    """Two turns. Replicated: for each, losses and gradients, whatever the number of micro-batches. Sharded: the tokenizer's two
    halves gather weights for every micro-batch, forward and backward, and send gradients once."""
    check(run([str(tmp_path / "found.json"), str(shapes)], tmp_path, ranks=2, script=HERE / "count.py"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["replicate 4"] == found["replicate 1"] == {"allreduce_": 4}
    one, four = found["shard 4"], found["shard 1"]
    assert one["allreduce_"] == four["allreduce_"] == 4, "losses of two turns, the critic's gradients, norms of slices"
    scattered = [name for name in one if "reduce_scatter" in name]
    assert scattered
    assert all(one[name] == four[name] == 2 for name in scattered)
    gathered = [name for name in one if "allgather" in name]
    assert all(four[name] == 4 * one[name] for name in gathered)


@pytest.mark.slow
def test_slices_of_a_batch_that_ranks_share_unevenly(workshop: Path, shapes: Path) -> None:
    """Five samples and four, in micro-batches of at most four: two on each rank, or one would wait for the other for ever."""
    alone, two = (train(workshop, shapes, ranks, 3, 9, 4, engine__parallel="shard") for ranks in (1, 2))
    assert_same_losses(two, alone)
    assert_ranks_agree(two, 2, sliced=True)


@pytest.mark.slow
def test_slices_of_compiled_and_recomputed_blocks(workshop: Path, shapes: Path) -> None:
    alone = train(workshop, shapes, 1, 10, 8)
    more = {"engine__parallel": "shard", "engine__activation_checkpointing": "true", "engine__compile": "true"}
    assert_same_losses(train(workshop, shapes, 2, 5, 8, **more), alone)


def test_every_rank_measures_the_same_scale_of_latents(workshop: Path, shapes: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}"
        out.mkdir()
        if ranks == 1:
            measure(out, str(shapes))
        else:
            check(run([str(out), str(shapes)], workshop, ranks=ranks, script=HERE / "survey.py"))
        scales = [json.loads(file.read_text()) for file in sorted(out.glob("scale-*.json"))]
        assert len(scales) == ranks
        assert all(scale == scales[0] for scale in scales)
        assert scales[0]["raw"] == scales[0]["averaged"]
        found.append(scales[0]["raw"])
    alone, together = found
    assert alone[1] != [1.0, 1.0]
    assert together[0] == pytest.approx(alone[0], abs=1e-6)
    assert together[1] == pytest.approx(alone[1], rel=1e-6)
