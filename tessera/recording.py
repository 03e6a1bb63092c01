"""A step recorded once as a CUDA graph and replayed: the host launches one thing instead of a thousand.

What a step reads lies in dataclasses of tensors, at any depth. A recording has buffers of its own, which it updates in place.
How nets are recorded for training stands in `engine/replay.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

WARM_UP_STEPS = 3  # libraries choose kernels and take workspaces in their first calls, which must not be recorded
MOST_KEPT = 8  # ways to draw whose recordings are kept; a cascade of six stages draws in six

Setup = TypeVar("Setup")
State = TypeVar("State")
Net = TypeVar("Net", bound=nn.Module)
Thing = TypeVar("Thing")


class Recording(Generic[Setup, State]):
    """`step(setup, state) -> state` on buffers of this recording."""

    def __init__(self, step: Callable[[Setup, State], State], setup: Setup, state: State) -> None:
        self.setup, self.state = cloned(setup), cloned(state)  # the caller's tensors are not ours to overwrite
        device = tensors_of(state)[0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step(self.setup, self.state)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self.graph):
            copy_tensors(self.state, step(self.setup, self.state))

    def load(self, setup: Setup, state: State) -> None:
        """Takes over where another left."""
        copy_tensors(self.setup, setup)
        copy_tensors(self.state, state)

    def play(self) -> None:
        """One step."""
        self.graph.replay()


def sampling_precision(device: torch.device, bf16: bool) -> contextlib.AbstractContextManager[Any]:
    """Around a step: bf16 where it is asked for. A cached cast would outlive a recording that made it, so nothing is cached."""
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if bf16 else contextlib.nullcontext()


class Lean(Generic[Net]):
    """A net for many small passes, in its own precision or in bf16. Those in bf16 go through a copy: autocast would cast all
    weights anew in each of them, which takes longer than what is then computed."""

    def __init__(self, net: Net, bf16: bool = False) -> None:
        self.net, self.bf16 = net, bf16
        self.passes = copy.deepcopy(net).requires_grad_(False).to(torch.bfloat16) if bf16 else net  # what passes call

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the weights as they are now. They stay where they are, so recordings go on reading them."""
        if self.bf16:
            torch._foreach_copy_(list(self.passes.parameters()), list(self.net.parameters()))


class Kept(Generic[Thing]):
    """What was made last, by key. Recordings hold memory of the device, and who is served for long asks in many ways."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self._things: dict[Hashable, Thing] = {}  # in the order in which they were asked for

    def find(self, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """That of the key, made if it is not there any more; the one that was not asked for the longest then goes."""
        thing = self._things.pop(key) if key in self._things else make()
        self._things[key] = thing
        if len(self._things) > self.most:
            del self._things[next(iter(self._things))]
        return thing

    def clear(self) -> None:
        """Forgets all."""
        self._things.clear()


def shapes_of(*items: Any) -> tuple[Any, ...]:
    """What a recording fits: shapes, types and devices of all tensors."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for item in items for tensor in tensors_of(item))


def tensors_of(item: Any) -> list[Tensor]:
    """All tensors of dataclasses, tuples, lists and dictionaries, at any depth, in their order."""
    if isinstance(item, Tensor):
        return [item]
    return [tensor for part in parts_of(item) or () for tensor in tensors_of(part)]


def layout_of(item: Any) -> Hashable:
    """All that is no tensor, and where tensors stand. Numbers and names by value; any other object is itself, as long as it
    lives."""
    if isinstance(item, Tensor):
        return Tensor
    if (parts := parts_of(item)) is not None:
        names = tuple(item) if isinstance(item, Mapping) else ()
        return (type(item), *names, *map(layout_of, parts))
    return type(item), item if item is None or isinstance(item, bool | int | float | str) else id(item)


def parts_of(item: Any) -> list[Any] | None:
    """One level down; None where there is none."""
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, part.name) for part in fields(item)]
    if isinstance(item, Mapping):
        return list(item.values())
    return list(item) if isinstance(item, list | tuple) else None


def cloned(item: Any) -> Any:
    """The same with tensors of its own."""
    return mapped(item, Tensor.clone)


def mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed, in the order of `tensors_of`."""
    if isinstance(item, Tensor):
        return change(item)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{part.name: mapped(getattr(item, part.name), change) for part in fields(item)})
    if isinstance(item, Mapping):
        return {name: mapped(value, change) for name, value in item.items()}
    if isinstance(item, list | tuple):
        parts = [mapped(part, change) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def copy_tensors(into: Any, source: Any) -> None:
    """Overwrites tensors with those of the same structure."""
    for old, new in zip(tensors_of(into), tensors_of(source), strict=True):
        if old is not new:
            old.copy_(new)
