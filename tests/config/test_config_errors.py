"""Every problem in one message: the key, where it came from, what was found, what was expected, the nearest right name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from tessera.config import Config, UserError, build, layer_of, nearest, parse_sets, read_yaml


class Masked(Config):
    kind: Literal["masked"] = "masked"
    width: int = Field(64, ge=8, multiple_of=8)
    masked: float = Field(0.5, ge=0, le=1)  # named like its own tag, on purpose


class Auto(Config):
    kind: Literal["auto"] = "auto"
    layers: int = 2
    width: int = 64


Model = Annotated[Masked | Auto, Field(discriminator="kind")]


class Optim(Config):
    lr: float = Field(3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.99)
    schedule: Literal["constant", "cosine"] = "cosine"


class Stage(Config):
    model: Model = Masked()
    optim: Optim = Optim()
    critic_optim: Optim | None = None
    batch_size: int = 64
    steps: int = 100

    @model_validator(mode="after")
    def _combinations(self) -> Stage:
        if self.steps < self.batch_size // 64:
            raise ValueError(f"steps {self.steps} is below batch_size / 64; use {self.batch_size // 64} or more")
        return self


class Data(Config):
    path: Path
    resolution: int = 64
    workers: int = 0
    channels: Literal[1, 3] = 3
    name: str = "x"
    code: Annotated[str, Field(pattern="^[a-z]+$")] = "x"

    @field_validator("resolution")
    @classmethod
    def _whole(cls, value: int) -> int:
        if value % 16:
            raise ValueError(f"resolution {value} cannot be divided by 16; use {value // 16 * 16}")
        return value


class Engine(Config):
    micro_batch_size: int | Literal["auto"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    save_every_steps: int = 10
    compile: bool = False


class Root(Config):
    seed: int = 0
    data: Data
    tokenizer: Stage = Stage()
    base: Stage = Stage()
    engine: Engine = Engine()
    upsamplers: tuple[Model, ...] = ()
    extras: dict[str, Optim] = Field(default_factory=dict)
    weights: dict[str, float] = Field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    plain: Masked | Optim | int = 3

    @model_validator(mode="after")
    def _combinations(self) -> Root:
        if self.seed == 13:
            raise ValueError("seed 13 is unlucky; use 12")
        return self


PRESET = layer_of(Root(data=Data(path=Path("photos"))), "preset small")


def complaint(folder: Path, text: str, *sets: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        build(Root, [PRESET, read_yaml(path), parse_sets(sets)])
    return str(caught.value).replace(f"{folder}/", "")


def test_unknown_keys_have_their_line_and_the_nearest_name(tmp_path: Path) -> None:
    message = complaint(tmp_path, "seed: 0\ntokenizer:\n  optim:\n    lrr: 1.0\n")
    assert message == "tokenizer.optim.lrr (run.yaml, line 4): unknown key; did you mean 'tokenizer.optim.lr'?"
    message = complaint(tmp_path, "seed: 0", "tokeniser.optim.lr=1")
    assert message == "tokeniser (--set): unknown key; did you mean 'tokenizer'?"


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("lr", "did you mean 'tokenizer.optim.lr', 'tokenizer.critic_optim.lr' or 'base.optim.lr'?"),
        ("resolution", "did you mean 'data.resolution'?"),
        ("engine.resolution", "did you mean 'data.resolution'?"),
        ("engine.steps", "did you mean 'tokenizer.steps' or 'base.steps'?"),
        ("base.lr", "did you mean 'base.optim.lr' or 'base.critic_optim.lr'?"),
        ("base.model.steps", "did you mean 'base.steps'?"),
        ("micro_batch_siz", "did you mean 'engine.micro_batch_size'?"),
        ("Seed", "did you mean 'seed'?"),
        ("engine.save-every-steps", "did you mean 'engine.save_every_steps'?"),
        ("base.batchsize", "did you mean 'base.batch_size'?"),
        ("data.xyzzy", "expected one of path, resolution, workers, channels, name, code"),
        ("learning_rate", "did you mean 'tokenizer.optim.lr',"),
        ("base.optim.learning_rate", "did you mean 'base.optim.lr'?"),
        ("max_train_steps", "did you mean 'tokenizer.steps' or 'base.steps'?"),
        ("tokenizer.max_train_steps", "did you mean 'tokenizer.steps'?"),
        ("image_size", "did you mean 'data.resolution'?"),
        ("data.image-size", "did you mean 'data.resolution'?"),
        ("num_workers", "did you mean 'data.workers'?"),
        ("data.num_workers", "did you mean 'data.workers'?"),
        ("gradient_accumulation_steps", "set engine.micro_batch_size instead"),
        ("engine.gradient_accumulation_steps", "set engine.micro_batch_size instead"),
        ("resume_from_checkpoint", "`tessera resume RUN`"),
        ("base.model.layers", "unknown key with kind 'masked'; it belongs to kind 'auto'"),
        ("base.model.masked.x", "expected a number"),
        ("base.model.widht", "did you mean 'base.model.width'?"),
    ],
)
def test_advice_on_unknown_keys(tmp_path: Path, key: str, advice: str) -> None:
    message = complaint(tmp_path, "seed: 0", f"{key}=3")
    assert message.startswith(f"{key.removesuffix('.x')} (--set): ")
    assert advice in message


def test_a_dotted_key_in_a_file_is_told_to_nest(tmp_path: Path) -> None:
    message = complaint(tmp_path, "seed: 0\nbase.optim.lr: 1.0\n")
    assert message.startswith("base.optim.lr (run.yaml, line 2): unknown key")
    assert "write base: {optim: {lr: ..}}" in message


@pytest.mark.parametrize(
    ("key", "value", "rest"),
    [
        ("seed", '"3"', "found the text '3'; expected a whole number; write it without quotes"),
        ("seed", "1e3", "found 1000.0; expected a whole number; write 1000"),
        ("seed", "3.5", "found 3.5; expected a whole number"),
        ("seed", "true", "found true; expected a whole number"),
        ("seed", "null", "found null; expected a whole number"),
        ("seed", "{a: 1}", "found a section with a; expected a whole number"),
        ("seed", "[]", "found []; expected a whole number"),
        ("engine.compile", "1", "found 1; expected true or false"),
        ("engine.compile", "yes", "found the text 'yes'; expected true or false"),
        ("engine.precision", "bf17", "found the text 'bf17'; expected 'fp32' or 'bf16'; did you mean 'bf16'?"),
        ("engine.precision", "BF16", "found the text 'BF16'; expected 'fp32' or 'bf16'; did you mean 'bf16'?"),
        ("engine.micro_batch_size", "auot", "found the text 'auot'; expected a whole number or 'auto'; did you mean 'auto'?"),
        ("data.path", "3", "found 3; expected a path"),
        ("data.path", '""', "found the text ''; expected a path"),
        ("data.channels", "true", "found true; expected 1 or 3"),
        ("data.channels", '"3"', "found the text '3'; expected 1 or 3; write it without quotes"),
        ("data.name", "3", "found 3; expected text; put it in quotes"),
        ("data.code", "A1", "found the text 'A1'; String should match pattern '^[a-z]+$'"),
        ("base.optim", "3", "found 3; expected a section of keys"),
        ("base.optim.lr", "-1", "found -1; expected a number > 0"),
        ("base.optim.lr", ".inf", "found .inf; expected a finite number"),
        ("base.optim.betas", "[1]", "found [1]; expected a list of 2 numbers"),
        ("base.critic_optim", "3", "found 3; expected a section of keys or null"),
        ("base.model.width", "12", "found 12; expected a whole number >= 8 and divisible by 8"),
        ("base.model.masked", "2", "found 2; expected a number >= 0 and <= 1"),
        ("base.model", "auto", "found the text 'auto'; expected a section with kind 'masked' or 'auto'; write {kind: auto}"),
        ("upsamplers", "3", "found 3; expected a list of sections with kind 'masked' or 'auto'"),
        ("sizes", "3", "found 3; expected a list of whole numbers; write [3]"),
        ("base.optim.betas", "[1, 2, 3]", "found [1, 2, 3]; expected a list of 2 numbers"),
        ("base.optim.betas", "[]", "found []; expected a list of 2 numbers"),
        ("weights", "[1]", "found [1]; expected a mapping from names to numbers"),
        ("plain", "x", "found the text 'x'; expected a section of keys or a whole number"),
        ("plain", "{lr: 0}", "found a section with lr; expected a section of keys or a whole number"),
    ],
)
def test_found_and_expected(tmp_path: Path, key: str, value: str, rest: str) -> None:
    message = complaint(tmp_path, "seed: 0", f"{key}={value}")
    assert message == f"{key} (--set): {rest}"


def test_kinds(tmp_path: Path) -> None:
    message = complaint(tmp_path, "seed: 0\nbase:\n  model:\n    kind: maskd\n")
    assert (
        message
        == "base.model.kind (run.yaml, line 4): found the text 'maskd'; expected 'masked' or 'auto'; did you mean 'masked'?"
    )
    message = complaint(tmp_path, "seed: 0\nupsamplers:\n- {kind: auto}\n- {width: 3}\n")
    assert message == "upsamplers.1.kind (run.yaml, line 4): missing; expected 'masked' or 'auto'"
    for wrong in ("null", "3", "[1]", "{a: 1}"):
        assert complaint(tmp_path, f"base: {{model: {{kind: {wrong}}}}}").startswith("base.model.kind (run.yaml, line 1): found ")


def test_paths_hold_no_tags(tmp_path: Path) -> None:
    message = complaint(tmp_path, "base:\n  model:\n    kind: auto\n    layers: x\nupsamplers:\n- kind: masked\n  masked: x\n")
    assert "\n  base.model.layers (run.yaml, line 4): found the text 'x'" in message
    assert "\n  upsamplers.0.masked (run.yaml, line 7): found the text 'x'" in message


def test_missing_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\ndata: {resolution: 32}\n")
    with pytest.raises(UserError) as caught:
        build(Root, [read_yaml(path)])
    assert str(caught.value).startswith(f"data.path ({path}, line 2): missing; expected a path; ")
    assert "--set data.path=VALUE" in str(caught.value)
    with pytest.raises(UserError, match=r"^data: missing; .*--set data\.KEY=VALUE"):
        build(Root, [])


def test_validators_speak_for_themselves(tmp_path: Path) -> None:
    message = complaint(tmp_path, "seed: 0\nbase:\n  batch_size: 640\n", "base.steps=3")
    assert message == "base (--set + run.yaml, line 3): steps 3 is below batch_size / 64; use 10 or more"
    message = complaint(tmp_path, "seed: 0\ndata: {resolution: 250}")
    assert message == "data.resolution (run.yaml, line 2): resolution 250 cannot be divided by 16; use 240"
    assert complaint(tmp_path, "seed: 13") == "config (preset small + run.yaml): seed 13 is unlucky; use 12"


def test_the_last_layer_that_set_a_key_is_blamed(tmp_path: Path) -> None:
    assert complaint(tmp_path, "seed: a", "seed=b").startswith("seed (--set): found the text 'b'")
    assert complaint(tmp_path, "seed: a", "engine.compile=true").startswith("seed (run.yaml, line 1): found the text 'a'")
    message = complaint(tmp_path, "base:\n  model: {kind: auto}\n", "base.model.masked=1")
    assert message == "base.model.masked (--set): unknown key with kind 'auto'; it belongs to kind 'masked'"


def test_many_problems_make_one_message(tmp_path: Path) -> None:
    message = complaint(tmp_path, "seed: x\n" + "".join(f"unknown{i}: 1\n" for i in range(11)))
    lines = message.splitlines()
    assert lines[0] == "the config has 12 problems:"
    assert lines[1].startswith("  seed (run.yaml, line 1): ")
    assert [line.split()[0] for line in lines[2:9]] == [f"unknown{i}" for i in range(7)]
    assert lines[9:] == ["  and 4 more"]


def test_long_values_and_odd_keys_stay_on_one_line(tmp_path: Path) -> None:
    message = complaint(tmp_path, f'seed: {"x" * 500}\n"a\\nb\\e[31m": 1\nengine: {{compile: {"[" * 50}{"]" * 50}}}')
    assert max(len(line) for line in message.splitlines()) < 200
    assert len(message.splitlines()) == 4
    assert "\x1b" not in message


def test_nearest() -> None:
    assert nearest("Micro-Batch-Size", ["seed", "micro_batch_size"]) == "micro_batch_size"
    assert nearest("tokeniser", ["tokenizer", "base"]) == "tokenizer"
    assert nearest("xyzzy", ["tokenizer", "base"]) is None
    assert nearest("x", []) is None
