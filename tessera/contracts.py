"""The seam between engine and models. Read this first.

A model author writes losses: functions that receive networks, a batch and a context, and return a `Loss`. A `Stage` says
which networks there are, which turns train them and what to measure. The engine owns everything else: backward,
accumulation, ranks, clipping, the update, EMA, checkpoints. Neither side imports the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tessera.compiling import Shapes
from tessera.config import Config, Kinds, OptimConfig

Nets = Mapping[str, nn.Module]
Classes = tuple[type[nn.Module], ...]  # of modules


@dataclass(frozen=True, slots=True)
class Loss:
    """What one turn makes of one micro-batch."""

    total: Tensor  # a SUM over targets; the step divides once, by the weight over all micro-batches and ranks
    weight: Tensor  # number of targets: masked tokens, faces, samples
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # detached sums over the same targets, for the log
    stats: Mapping[str, Tensor] = field(default_factory=dict)  # detached sums for Stage.after and Stage.digest: code counts
    hand: Any = None  # detached outputs for later turns of this micro-batch


def _alone(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True, slots=True)
class Context:
    """Where in training a loss is called. Everything random in a loss is a function of what is in here."""

    step: int
    seed: int
    positions: Tensor  # b int64 on the batch's device: place of each sample in the endless stream
    handed: Mapping[str, Any] = field(default_factory=dict)  # turn name -> what that turn handed on
    gather: Callable[[Tensor], Tensor] = _alone  # rows of this micro-batch -> those of all ranks, in rank order, with gradients


LossFunction = Callable[[Nets, Any, Context], Loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One update of some nets. The other nets are frozen while it runs."""

    name: str
    trains: tuple[str, ...]
    loss: LossFunction
    max_grad_norm: float | None = None  # over all parameters of the turn together; None does not clip
    start: int = 0  # first step of this turn
    every: int = 1

    def due(self, step: int) -> bool:
        """Whether this turn runs at a step."""
        return step >= self.start and (step - self.start) % self.every == 0


@dataclass(frozen=True, slots=True)
class Best:
    """The validation number by which `checkpoints/best` is chosen."""

    metric: str
    higher_is_better: bool

    def improves(self, value: float, record: float | None) -> bool:
        """Whether a value beats the record; the first finite one always does."""
        if not math.isfinite(value):
            return False
        return record is None or (value > record if self.higher_is_better else value < record)


@dataclass(frozen=True, slots=True)
class Preview:
    """A file for `samples/`, already encoded, and the facts that go into the JSON beside it."""

    extension: str
    content: bytes
    facts: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)  # extension -> the same seen otherwise: frames of a gif as a png


@dataclass(frozen=True, slots=True)
class Survey:
    """What a stage measures of its training data before its first step, and keeps in buffers of its nets."""

    sums: Callable[[Nets, Any], Mapping[str, Tensor]]  # of one micro-batch, in fp64: the order of summing must not show
    keep: Callable[[Nets, Mapping[str, Tensor]], None]  # the sums over all batches and ranks, into buffers
    samples: int  # how many of the stream's first ones; all of an epoch where that has fewer


def _nothing_after(nets: Nets, stats: Mapping[str, Tensor], step: int) -> None: ...


def _empty_digest(stats: Mapping[str, Tensor]) -> dict[str, float]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything the engine must know to train one model."""

    nets: Nets  # trained, saved, on the device
    turns: Sequence[Turn]
    optim: Mapping[str, OptimConfig]  # one entry a net
    best: Best
    frozen: Nets = field(default_factory=dict)  # eval mode, no gradients; outside optimizer, EMA and checkpoint
    averaged: tuple[str, ...] = ()  # nets with an EMA
    ema_decay: float = 0.999
    needs: Mapping[str, str] = field(default_factory=dict)  # name -> hash of the checkpoint that training reads
    survey: Survey | None = None  # of the training data, before step 0
    measure: LossFunction | None = None  # validation: parts and stats are summed over the whole split
    preview: Callable[[Nets, Nets, Any, Context], Preview] | None = None  # (raw nets, averaged nets, batch, context)
    after: Callable[[Nets, Mapping[str, Tensor], int], None] = _nothing_after  # once a step, with the stats of its turns
    digest: Callable[[Mapping[str, Tensor]], dict[str, float]] = _empty_digest  # reduced sums -> numbers: code use
    compiled: Classes = ()  # module classes that engine.compile compiles, the outermost ones
    recorded: Classes = ()  # larger ones that engine.cuda_graphs records; () records each compiled one
    shapes: Shapes = "one"  # how many different ones batches have
    sharded: Classes = ()  # module classes that engine.parallel: shard slices; nets without one stay whole
    checkpointed: Classes = ()  # module classes that engine.activation_checkpointing recomputes

    def __post_init__(self) -> None:
        known = set(self.nets)
        if known & set(self.frozen):
            raise ValueError(f"nets {sorted(known & set(self.frozen))} are both trained and frozen")
        if set(self.optim) != known:
            raise ValueError(f"optim names {sorted(self.optim)}, the stage trains {sorted(known)}")
        if unknown := set(self.averaged) - known:
            raise ValueError(f"averaged names unknown nets {sorted(unknown)}")
        for turn in self.turns:
            if not turn.trains or set(turn.trains) - known:
                raise ValueError(f"turn {turn.name!r} trains {turn.trains}, the stage has {sorted(known)}")
        if len({turn.name for turn in self.turns}) != len(self.turns):
            raise ValueError("two turns share a name")

    @property
    def all_nets(self) -> dict[str, nn.Module]:
        """What a loss receives: trained and frozen nets by name."""
        return {**self.nets, **self.frozen}


@contextlib.contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Without gradients of these parameters for a while; one that its author froze stays frozen."""
    held = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@runtime_checkable
class Tokenizer(Protocol):
    """Data <-> tokens. A grid tokenizer returns ids of one fixed shape per input shape."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    def encode(self, x: Tensor) -> Tensor:
        """Data to ids."""

    def decode(self, ids: Tensor) -> Tensor:
        """Ids to data."""


@runtime_checkable
class Constraint(Protocol):
    """Which token may come next, so that whatever is drawn can be decoded. Shapes never change; nothing waits for the device."""

    def init(self, num: int, device: torch.device) -> tuple[Any, Tensor]:
        """State before the first token of so many sequences, and what that may be: b v bool."""

    def step(self, state: Any, ids: Tensor) -> tuple[Any, Tensor]:
        """The same after one more token of each, b."""


class Loader(Protocol):
    """Endless batches from a given step on. One item is one step of this rank: its micro-batches, in order."""

    @property
    def train(self) -> Sized:
        """The samples to learn from."""

    @property
    def held_out(self) -> Sized:
        """The samples of the validation split."""

    def batches(self, first_step: int) -> Generator[Sequence[Any], None, None]:
        """Starts anywhere at no cost; the order is a function of the seed. Closing it ends the workers."""

    def validation(self) -> Sequence[Any]:
        """This rank's share of the fixed validation batches, equally many on every rank; empty without a split."""

    def preview(self) -> Any:
        """The fixed samples that previews show; the same on every rank."""


def _anywhere(device: torch.device) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """A step of a recipe that trains one stage."""

    name: str  # the stage's folder in the run
    batch_size: int  # samples per update over all ranks
    steps: int
    build: Callable[[], Stage]  # fresh nets, initialised from the seed on the CPU
    serves: Callable[[], Nets]  # fresh nets of those that use needs, which an export holds: no helper of training alone
    feed: Callable[[Nets, Any], Loader]  # (needed nets, a data.loader.Feed): makes the caches it reads, then the batches
    needs: Mapping[str, str] = field(default_factory=dict)  # name of a frozen net -> the stage that has trained it
    shows: Mapping[str, str] = field(default_factory=dict)  # name of a frozen net -> a stage of which previews show something
    captioned: bool = False  # learns from captions
    fits: Callable[[torch.device], None] = _anywhere  # refuses a device that it cannot train on, before any stage has trained
    origin: str | None = None  # OTHER_RUN/STAGE: not trained in this run, but read from there
    origin_key: str | None = None  # of the config, that says so: base.path


@dataclass(frozen=True, slots=True)
class Scene:
    """A part of a clip with a caption of its own."""

    caption: str
    frames: int  # how many this scene adds
    overlap: int | None = None  # frames of what came before that it goes on from; 0 is a hard cut, None what the recipe takes


@dataclass(frozen=True, slots=True)
class Chunk:
    """So many samples to draw at once: what a recipe draws is a function of each row alone."""

    captions: Sequence[str | None]
    seeds: Tensor  # b int64 on the device
    options: Any  # the recipe's sample section
    negatives: Sequence[str | None] | None = None  # what guidance pushes away from; None: the empty caption
    pictures: Tensor | None = None  # b c h w in [-1, 1], as large as what is drawn, or as what is enlarged: where drawing starts;
    # of recipes that have an `embedding_width` also b e, embeddings of length 1
    redraw: Tensor | None = None  # b h w bool with `pictures`: True where something new is drawn
    towards: Tensor | None = None  # b c h w with `pictures`, as large, or b e: what is drawn lies between the two
    at: Tensor | None = None  # b with `towards`: how far from the one to the other, 0 to 1; None where one sample has no place
    mesh: Any = None  # a part of a mesh, of which a whole one is made
    frames: Tensor | None = None  # b c t h w in [-1, 1]: frames of a clip that are given, at their places; others hold anything
    given: Tensor | None = None  # t bool with `frames`: which ones are given; what is drawn may be longer than t
    scenes: Sequence[Scene] | None = None  # of a clip of several scenes; then captions are not read
    sketch: Tensor | None = None  # b k h w ids: of a sketch of the clip, at their places; what is drawn may be longer or shorter
    sketched: Tensor | None = None  # k bool with `sketch`: which of its latent frames are there; the others count nowhere
    num_asked: int | None = None  # rows behind so many only fill up, and may be left out of what is drawn


class Draw(Protocol):
    """A recipe's trained nets, ready to draw."""

    def __call__(self, chunk: Chunk) -> Sequence[Any]:
        """One thing of the recipe's medium for every row that is asked for: a PIL picture, a `media.clips.Clip`, a
        `media.meshes.Mesh`."""

    def loss(self, real: Any, captions: Sequence[str | None]) -> Mapping[str, float]:
        """Held-out loss of real things (pictures as uint8 n h w c, or a list of clips or meshes), in the units of training."""


@dataclass(frozen=True, slots=True)
class Way:
    """How something is drawn."""

    given: Literal["prompt", "image", "embedding"]
    start: str | None = None  # the stage that `sample.start` must name
    lacks: str | None = None  # the stage that is not trained, with which it could be drawn from prompts


def _from_prompts(config: Any, trained: Collection[str]) -> Way | None:
    return Way("prompt") if "base" in trained else None


def _as_it_is(config: Any, *others: Any) -> Any:
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named chain of steps with its root config and presets."""

    name: str
    summary: str
    medium: Literal["picture", "clip", "mesh"]  # what is drawn
    config_type: type[Config] | Kinds[Any]
    presets: Mapping[str, Callable[..., Config]]  # of a recipe of several kinds called with the one that is asked for, if any
    steps: Callable[[Any], Sequence[Train]]
    adopt: Callable[[Any, Callable[[str], Any]], Any] = _as_it_is  # (config, reads RUN/STAGE): with what others trained
    settle: Callable[[Any, Any, Collection[str]], Any] = _as_it_is  # (config, source, names of the stages that train): the
    # config with what only the data knows
    opens: Callable[[Any, Mapping[str, Nets], Any], Draw] | None = None  # (config, trained nets by stage, device)
    enters: Callable[[Any, Any], Sequence[str]] | None = None  # (what `opens` gave, options): names of the stages that take part,
    # where a chain may be entered later than at its beginning; None: all that are trained
    way: Callable[[Any, Collection[str]], Way | None] = _from_prompts  # (config, names of the stages that are trained): how one
    # draws with these; None: none of them draws
