"""The smallest stage with everything in it: two turns, dropout, a running buffer, unequal weights, validation, previews."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tessera.config import EngineConfig, OptimConfig
from tessera.contracts import Best, Context, Loss, Nets, Preview, Stage, Turn
from tessera.engine.dist import World
from tessera.engine.loop import Fit, Job
from tessera.engine.optim import named_state
from tessera.engine.signals import StopFlag
from tessera.engine.state import TrainState, place
from tessera.engine.step import Setting
from tessera.engine.track import Journal
from tessera.randomness import normal

ALONE = World(0, 1, torch.device("cpu"))
PLAIN = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.0, max_grad_norm=None)
WIDTH = 3


@dataclass(frozen=True)
class Points:
    """Pairs of vectors; each sample has its own number of targets."""

    x: Tensor  # b d
    y: Tensor  # b d
    count: Tensor  # b
    positions: Tensor  # b int64
    keys: tuple[str, ...]
    faults: tuple[str, ...] = ()

    def to(self, device: torch.device) -> Points:
        """Already there."""
        return self

    def pin_memory(self) -> Points:
        """Nothing to pin."""
        return self

    def __getitem__(self, part: slice) -> Points:
        return Points(self.x[part], self.y[part], self.count[part], self.positions[part], self.keys[part])


def points(first: int, size: int, seed: int = 0) -> Points:
    """Samples [first, first + size) of an endless stream."""
    positions = torch.arange(first, first + size)
    noise = normal(seed, positions, 2 * WIDTH, stream=7)
    count = (positions % 4 + 1).float()
    return Points(noise[:, :WIDTH], noise[:, WIDTH:], count, positions, tuple(f"sample-{p}" for p in positions.tolist()))


def cut(batch: Points, num_micro: int) -> list[Points]:
    """Equal micro-batches."""
    size = len(batch.keys) // num_micro
    return [batch[start : start + size] for start in range(0, len(batch.keys), size)]


class Maker(nn.Module):
    """A generator; counts what it has seen in a buffer, which only `Stage.after` changes."""

    seen: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


class Judge(nn.Module):
    """A critic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.nn.functional.leaky_relu(self.first(x), 0.2)).squeeze(1)


def maker_turn(nets: Nets, batch: Points, context: Context) -> Loss:
    """Squared error, and pleasing the judge; weighed by each sample's targets."""
    made = nets["maker"](batch.x)
    error = (made - batch.y).square().mean(1)
    plea = -0.1 * nets["judge"](made)
    return Loss(
        ((error + plea) * batch.count).sum(),
        batch.count.sum(),
        {"error": (error.detach() * batch.count).sum()},
        {"made": made.detach().sum(0)},
        hand=made.detach(),
    )


def judge_turn(nets: Nets, batch: Points, context: Context) -> Loss:
    """Hinge loss on what the maker handed on."""
    real, made = nets["judge"](batch.y), nets["judge"](context.handed["maker"])
    hinge = torch.relu(1 - real) + torch.relu(1 + made)
    return Loss((hinge * batch.count).sum(), batch.count.sum(), {"real": (real.detach() * batch.count).sum()})


def measure(nets: Nets, batch: Points, context: Context) -> Loss:
    """Validation: the error alone."""
    error = (nets["maker"](batch.x) - batch.y).square().mean(1)
    total = (error * batch.count).sum()
    return Loss(total, batch.count.sum(), {"error": total})


def count_made(nets: Nets, stats: Mapping[str, Tensor], step: int) -> None:
    """A running sum, as a codebook's."""
    nets["maker"].seen.mul_(0.9).add_(stats["made"])


def show(raw: Nets, averaged: Nets, batch: Points, context: Context) -> Preview:
    """A preview in text."""
    assert not any(net.training for net in [*raw.values(), *averaged.values()])
    return Preview("txt", str(averaged["maker"](batch.x).shape).encode(), {"num": len(batch.keys)})


def gan(
    maker_optim: OptimConfig = PLAIN, judge_optim: OptimConfig | None = None, *, dropout: float = 0.0, **changes: Any
) -> Stage:
    """The toy stage; `start` and `every` are the judge's, other names are fields of Stage."""
    torch.manual_seed(0)
    judge_optim = judge_optim or maker_optim
    start, every = changes.pop("start", 0), changes.pop("every", 1)
    stage = Stage(
        nets={"maker": Maker(dropout), "judge": Judge()},
        turns=[
            Turn(name="maker", trains=("maker",), loss=maker_turn, max_grad_norm=maker_optim.max_grad_norm),
            Turn(
                name="judge",
                trains=("judge",),
                loss=judge_turn,
                max_grad_norm=judge_optim.max_grad_norm,
                start=start,
                every=every,
            ),
        ],
        optim={"maker": maker_optim, "judge": judge_optim},
        best=Best("error", higher_is_better=False),
        averaged=("maker",),
        measure=measure,
        preview=show,
        after=count_made,
    )
    return replace(stage, **changes)


def single(loss: Callable[[Nets, Any, Context], Loss], optim: OptimConfig = PLAIN, **changes: Any) -> Stage:
    """One maker, one turn."""
    torch.manual_seed(0)
    turn = Turn(name="maker", trains=("maker",), loss=loss, max_grad_norm=optim.max_grad_norm)
    stage = Stage(nets={"maker": Maker()}, turns=[turn], optim={"maker": optim}, best=Best("loss", higher_is_better=False))
    return replace(stage, **changes)


def simple_turn(nets: Nets, batch: Points, context: Context) -> Loss:
    """The error alone, one target a sample."""
    error = (nets["maker"](batch.x) - batch.y).square().mean(1)
    return Loss(error.sum(), torch.tensor(float(len(batch.keys))))


def placed(stage: Stage, seed: int = 5, **engine: Any) -> TrainState:
    """The state of a stage on the CPU."""
    return place(stage, seed, EngineConfig(**engine), ALONE.device)


def setting(steps: int = 100, **changes: Any) -> Setting:
    """One rank on the CPU."""
    return Setting(ALONE, steps, **changes)


def snapshot(state: TrainState, net: str | None = None) -> dict[str, Tensor]:
    """Copies of every tensor that training changes, by name; of one net if asked."""
    found: dict[str, Tensor] = {}
    for name, module in state.nets.items():
        found |= {f"raw/{name}/{key}": value.clone() for key, value in module.state_dict().items()}
        found |= {
            f"optim/{name}/{key}": value.clone() for key, value in named_state(state.parameters[name], state.optimizers[name])
        }
    for name, module in state.averages.items():
        found |= {f"ema/{name}/{key}": value.clone() for key, value in module.state_dict().items()}
    return {key: value for key, value in found.items() if net is None or key.split("/")[1] == net}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits differ, or that only one side has."""
    shared = first.keys() & second.keys()
    return sorted((first.keys() ^ second.keys()) | {name for name in shared if not torch.equal(first[name], second[name])})


@dataclass
class Stream:
    """A loader of toy points."""

    batch_size: int = 8
    num_micro: int = 2
    closed: int = 0
    train: range = range(64)
    on_step: Callable[[int], None] = lambda step: None
    change: Callable[[int, list[Points]], list[Points]] = lambda step, batches: batches
    held_out: list[Points] = field(default_factory=lambda: [points(10_000, 4), points(10_004, 4)])

    def batches(self, first_step: int) -> Generator[Sequence[Points], None, None]:
        """Endless, from any step."""
        try:
            step = first_step
            while True:
                self.on_step(step)
                yield self.change(step, cut(points(step * self.batch_size, self.batch_size), self.num_micro))
                step += 1
        finally:
            self.closed += 1

    def validation(self) -> Sequence[Points]:
        """Two fixed batches."""
        return self.held_out

    def preview(self) -> Points:
        """Three fixed samples."""
        return points(20_000, 3)


def fit(
    folder: Path, stage: Stage, state: TrainState, *, steps: int, loader: Stream | None = None, stop: StopFlag | None = None,
    journal: Journal | None = None, pinned: frozenset[str] = frozenset(), kind: type[Fit] = Fit, **engine: Any,
) -> Fit:  # fmt: skip
    """A job in a folder, ready to run."""
    folder.mkdir(parents=True, exist_ok=True)
    loader = loader or Stream()
    config = EngineConfig(device="cpu", **{"log_every_steps": 1, **engine})
    job = Job("toy", stage, loader, steps, loader.batch_size, folder, config, {"stage": "toy"}, pinned)
    return kind(job, state, ALONE, journal or Journal(folder / "log.txt", speaks=False), stop or StopFlag())


def train(folder: Path, steps: int, **engine: Any) -> tuple[TrainState, Fit]:
    """A whole run of the toy stage with dropout."""
    stage = gan(dropout=0.3)
    state = placed(stage)
    done = fit(folder, stage, state, steps=steps, **engine)
    done.run()
    return state, done
