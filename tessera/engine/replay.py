"""Forward and backward of a net as CUDA graphs: the host launches two things instead of thousands.

Torch records what it has compiled, and to record a whole net is to compile it as one piece: minutes where layers are many, since
equal ones are compiled again and again. Here layers are compiled, which takes seconds, and what calls them is recorded around
them.

A graph always reads and writes the same memory. So inputs are copied to where it reads, outputs from where it writes, and what
lies between the two passes may not be touched by anybody else: a net that is called again before its backward pass has another
recording with memory of its own (`Lane`). Recordings for other shapes share that memory, since only one of them is under way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from tessera.recording import layout_of, mapped, shapes_of, tensors_of

WARM_UP_CALLS = 2  # of each shape: compilers and libraries choose their kernels in the first ones, which must not be recorded
MOST_FLIGHTS = 4  # calls of one net that may await their backward pass together; more are launched one by one
MOST_RECORDINGS = 128  # of one net; more shapes are launched one by one

_LAUNCHING: list[None] = []  # one for each `launched_one_by_one` that is open


@contextlib.contextmanager
def launched_one_by_one() -> Iterator[None]:
    """Nothing is recorded or replayed inside."""
    _LAUNCHING.append(None)
    try:
        yield
    finally:
        _LAUNCHING.pop()


def replay(module: nn.Module) -> None:
    """In place, around what may be compiled already: by the hook through which `nn.Module.compile` works, so names stay."""
    call = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = Replayed(module, call)


class Graph:
    """Launches, recorded."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.device, self.pool, self.graph = device, pool, torch.cuda.CUDAGraph()

    def record(self, launch: Callable[[], None]) -> None:
        """What it computes is there after `replay`. Other threads may go on meanwhile: they pin memory for coming batches."""
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"),
        ):
            launch()

    def replay(self) -> None:
        """Once more."""
        self.graph.replay()


class Flight:
    """A call on its way to its backward pass."""

    def __init__(self) -> None:
        self.landed = False


class Replayed:
    """Stands in for the call of a module. On other devices it is that call."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], graph: Callable[[torch.device, Any], Graph] = Graph) -> None:
        self.module, self.call, self.graph = module, call, graph
        self.parameters = list(module.parameters())
        self.calls: Counter[Hashable] = Counter()
        self.recordings: dict[Hashable, NetRecording] = {}
        self.lanes = [Lane() for _ in range(MOST_FLIGHTS)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = tensors_of((args, kwargs))
        if _LAUNCHING or not self.follows(inputs):
            return self.call(*args, **kwargs)
        wanted = [p for p in self.parameters if p.requires_grad] if torch.is_grad_enabled() else []
        backward = torch.is_grad_enabled() and (bool(wanted) or any(tensor.requires_grad for tensor in inputs))
        lane = next((lane for lane in self.lanes if lane.free), None)
        if lane is None:
            return self.call(*args, **kwargs)
        key = (self.lanes.index(lane), backward, self.module.training, *self.kind_of(inputs, (args, kwargs)))
        recording = self.recordings.get(key)
        if recording is None:
            self.calls[key] += 1
            if self.calls[key] <= WARM_UP_CALLS or len(self.recordings) == MOST_RECORDINGS:
                args, kwargs = mapped((args, kwargs), Tensor.clone)  # a view would be compiled for, and is not recorded
                return self.call(*args, **kwargs)
            recording = self.recordings[key] = self.record(lane, (args, kwargs), wanted, backward)
        if not backward:
            return recording.rebuilt(recording.go(inputs))
        flight = Flight()
        lane.occupy(flight)
        return recording.rebuilt(_Pass.apply(recording, flight, *inputs, *wanted))

    def follows(self, inputs: Sequence[Tensor]) -> bool:
        """Whether this call can be recorded at all. Inside of another recording it is a part of that one."""
        return bool(inputs) and all(tensor.is_cuda for tensor in inputs) and not torch.cuda.is_current_stream_capturing()

    def kind_of(self, inputs: Sequence[Tensor], given: Any) -> tuple[Hashable, ...]:
        """What a recording fits: shapes, what has gradients, precision, and everything that is no tensor."""
        kind = inputs[0].device.type
        trained = tuple(p.requires_grad for p in self.parameters)
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return shapes_of(list(inputs)), tuple(tensor.requires_grad for tensor in inputs), trained, precision, layout_of(given)

    def record(self, lane: Lane, given: Any, wanted: Sequence[nn.Parameter], backward: bool) -> NetRecording:
        """A new one; what cannot be recorded is told by name."""
        try:
            return NetRecording(self, lane, given, wanted, backward)
        except Exception as error:
            shapes = [list(tensor.shape) for tensor in tensors_of(given)]
            raise RuntimeError(
                f"{type(self.module).__name__} could not be recorded as a CUDA graph for inputs of shapes {shapes}: {error}; "
                "set engine.cuda_graphs to false"
            ) from error


class Lane:
    """Memory for one call that is under way: the recordings' own, what goes in and out, and gradients of parameters."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.rooms: dict[Hashable, torch.UntypedStorage] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.flight: weakref.ref[Flight] | None = None

    @property
    def free(self) -> bool:
        """Whether nothing waits: it went back, or nobody holds it any longer."""
        flight = None if self.flight is None else self.flight()
        return flight is None or flight.landed

    def occupy(self, flight: Flight) -> None:
        """Until it lands or is forgotten."""
        self.flight = weakref.ref(flight)

    def prepare(self, device: torch.device, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients lie outside of what recordings share: they must outlive the next forward pass where batches add up."""
        if self.pool is None and device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()
        for parameter in parameters:
            if parameter not in self.gradients:
                self.gradients[parameter] = torch.empty_like(parameter)

    @torch.no_grad()
    def room(self, name: Hashable, like: Tensor) -> Tensor:
        """Uninitialised, as dense and in the same order of memory. One that is larger replaces what recordings shared so far, and
        they go on with the old one: sizes are powers of two, so that all of them together are not many times the largest."""
        size = max(1, like.numel() * like.element_size())
        if name not in self.rooms or self.rooms[name].nbytes() < size:
            bytes_ = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=like.device)
            self.rooms[name] = bytes_.untyped_storage()
        dense = torch.empty_like(like, device="meta")
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(self.rooms[name], 0, dense.shape, dense.stride())

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """What .grad holds of an earlier call is about to be overwritten."""
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.data_ptr() == self.gradients[parameter].data_ptr():
                parameter.grad = parameter.grad.clone()


class NetRecording:
    """One call, for one set of shapes."""

    def __init__(self, replayed: Replayed, lane: Lane, given: Any, wanted: Sequence[nn.Parameter], backward: bool) -> None:
        self.lane, self.module, self.wanted = lane, replayed.module, wanted
        # The same memory as parameters of its own: a graph of this net that waits for its backward pass holds on to the others,
        # and to the stream on which they were seen first, which may not wait for one that is being recorded.
        self.twins = {p: nn.Parameter(p.detach(), p.requires_grad) for p in replayed.parameters}
        tensors = tensors_of(given)
        self.inputs = [lane.room(("in", place), tensor).copy_(tensor.detach()) for place, tensor in enumerate(tensors)]
        for own, tensor in zip(self.inputs, tensors, strict=True):
            own.requires_grad_(tensor.requires_grad and backward)
        self.given = refilled(given, self.inputs)  # keeps objects alive that keys know by number
        self.structure: Any = None
        self.live: list[Tensor] = []  # outputs with all that their backward pass needs, while it is recorded
        self.outputs: list[Tensor] = []
        self.input_gradients: list[Tensor | None] = []
        self.reached: list[bool] = []
        lane.prepare(self.inputs[0].device, wanted)
        self.there = replayed.graph(self.inputs[0].device, lane.pool)
        self.there.record(self.launch_forward)
        self.seeds = [lane.room(("seed", n), made) if made.requires_grad else None for n, made in enumerate(self.live)]
        self.back: Graph | None = None
        if backward:
            self.back = replayed.graph(self.inputs[0].device, lane.pool)
            self.back.record(self.launch_backward)
        self.live = []

    def launch_forward(self) -> None:
        """From `inputs` to `outputs`. Autocast must keep no weights that others have cast, nor those cast here for others."""
        weights: dict[str, Tensor] = {name: self.twins[p] for name, p in self.module.named_parameters()}
        torch.clear_autocast_cache()
        with launched_one_by_one():
            structure = functional_call(self.module, weights, *self.given)
        torch.clear_autocast_cache()
        self.live = tensors_of(structure)
        if self.structure is None:
            self.outputs = [self.lane.room(("out", place), made) for place, made in enumerate(self.live)]
            self.structure = refilled(structure, self.outputs)
        with torch.no_grad():
            for own, made in zip(self.outputs, self.live, strict=True):
                own.copy_(made)

    def launch_backward(self) -> None:
        """From `seeds`, the gradients of outputs, to those of inputs and parameters; outside of autocast, as always."""
        sources = [tensor for tensor in self.inputs if tensor.requires_grad]
        ends = [(made, seed) for made, seed in zip(self.live, self.seeds, strict=True) if seed is not None]
        leaves = [*sources, *(self.twins[p] for p in self.wanted)]
        with torch.autocast(self.inputs[0].device.type, enabled=False):
            found = torch.autograd.grad([end for end, _ in ends], leaves, [seed for _, seed in ends], allow_unused=True)
        of_inputs = iter(found[: len(sources)])
        every = [next(of_inputs) if tensor.requires_grad else None for tensor in self.inputs]
        if not self.input_gradients:
            rooms = enumerate(every)
            self.input_gradients = [None if made is None else self.lane.room(("back", place), made) for place, made in rooms]
        for own, made in zip(self.input_gradients, every, strict=True):
            if own is not None and made is not None:
                own.copy_(made)
        pairs = list(zip(self.wanted, found[len(sources) :], strict=True))
        self.reached = [gradient is not None for _, gradient in pairs]
        copy_all([(self.lane.gradients[parameter], gradient) for parameter, gradient in pairs if gradient is not None])

    @torch.no_grad()
    def go(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of its own: the next call overwrites the recording's."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.there.replay()
        return [tensor.clone() for tensor in self.outputs]

    @torch.no_grad()
    def go_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of inputs and parameters. The latter stay where they were written until the lane's next backward pass."""
        assert self.back is not None
        for seed, gradient in zip(self.seeds, gradients, strict=True):
            if seed is not None:
                seed.zero_() if gradient is None else seed.copy_(gradient)
        self.lane.keep([p for p, reached in zip(self.wanted, self.reached, strict=True) if reached])
        self.back.replay()
        own = [self.lane.gradients[p].detach() if hit else None for p, hit in zip(self.wanted, self.reached, strict=True)]
        return [*(None if gradient is None else gradient.clone() for gradient in self.input_gradients), *own]

    def rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        """As the module returns them."""
        return refilled(self.structure, outputs)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """From the second to the first of each, in one launch for all that lie alike: torch makes one of each, if one does not."""
    alike = [(own, made) for own, made in pairs if lies_alike(own, made)]
    if alike:
        torch._foreach_copy_([own for own, _ in alike], [made for _, made in alike])
    for own, made in pairs:
        if not lies_alike(own, made):
            own.copy_(made)


def lies_alike(one: Tensor, other: Tensor) -> bool:
    """In memory. No stride is taken along an axis of one entry: a 1 x 1 kernel lies alike in either layout."""
    taken = [axis for axis, size in enumerate(one.shape) if size > 1]
    return one.dtype == other.dtype and all(one.stride(axis) == other.stride(axis) for axis in taken)


def refilled(item: Any, tensors: Sequence[Tensor]) -> Any:
    """The same with other tensors."""
    rest = iter(tensors)
    return mapped(item, lambda _: next(rest))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: NetRecording, flight: Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording, ctx.flight = recording, flight
        ctx.set_materialize_grads(False)
        outputs = recording.go(tensors[: len(recording.inputs)])
        ctx.mark_non_differentiable(*(made for made, seed in zip(outputs, recording.seeds, strict=True) if seed is None))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.flight.landed:
            raise RuntimeError("a recorded net goes back once a call; leave out engine.cuda_graphs for losses that go back twice")
        ctx.flight.landed = True
        return (None, None, *ctx.recording.go_back(gradients))
