"""Ranks: who we are, sums over all of us, and decisions that all ranks take together.

Started by `torchrun`, or alone. Gradients and log numbers are summed, never averaged: the step divides once by the
global weight, so the result does not depend on how a batch was cut.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
import torch.distributed.nn.functional  # before there is a group: it keeps the one it finds, with gloo's threads, past `leave`
from torch import Tensor

from tessera.config import EngineConfig, UserError
from tessera.engine.shard import sharded

T = TypeVar("T")
BUCKET_BYTES = 32 * 2**20  # large enough to fill a link, small enough that several are in flight


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of this run and the device of this one."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Only this rank writes files and talks to the user."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums in place over all ranks."""
        if self.size > 1:
            torch_dist.all_reduce(tensor)
        return tensor

    def gather(self, item: T) -> list[T]:
        """One item of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[T | None] = [None] * self.size
        torch_dist.all_gather_object(items, item)
        return items  # type: ignore[return-value]  # every slot is filled by now

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks, in rank order; a gradient goes back to the rank that brought its row. Every rank must call it,
        and go backward through it; it waits for the device, to learn how many rows the others bring."""
        if self.size == 1:
            return tensor
        found: Tensor = _Rows.apply(tensor, self)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Runs work on every rank and waits; if it fails on one, it fails on all, so that nobody is left waiting."""
        error: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        faults = [fault for fault in self.gather(f"{type(error).__name__}: {error}" if error else None) if fault]
        if error is not None:
            raise error
        if faults:
            kind, _, message = faults[0].partition(": ")
            raise UserError(message) if kind == "UserError" else RuntimeError(f"another rank failed: {faults[0]}")
        return result  # type: ignore[return-value]  # no error: work returned


class _Rows(torch.autograd.Function):
    """Rows of all ranks, which may bring unequal numbers of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World) -> Tensor:
        counts = torch.zeros(world.size, dtype=torch.int64, device=world.device)
        counts[world.rank] = len(rows)
        nums = world.sum_(counts).tolist()
        padded = rows.new_zeros(max(nums), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in nums]
        torch_dist.all_gather(parts, padded)
        ctx.world, ctx.first, ctx.num = world, sum(nums[: world.rank]), len(rows)
        return torch.cat([part[:num] for part, num in zip(parts, nums, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return ctx.world.sum_(grad.clone(memory_format=torch.contiguous_format)).narrow(0, ctx.first, ctx.num), None


def join(config: EngineConfig) -> World:
    """Enters the process group that torchrun described in the environment; alone without one."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = pick_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1 and not torch_dist.is_initialized():
        torch_dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=config.timeout_s),
            device_id=device if device.type == "cuda" else None,
            **store_of_restart(rank, size, config.timeout_s),
        )
    if size > 1 and torch_dist.get_world_size() != size:
        raise RuntimeError(f"asked for {size} ranks, the process group has {torch_dist.get_world_size()}")
    return World(rank, size, device)


def store_of_restart(rank: int, size: int, timeout_s: int) -> dict[str, Any]:
    """Arguments of init_process_group after `torchrun --max-restarts` has started the ranks anew on one machine.

    torch 2.13 takes the same store again, with the addresses of the dead ranks in it, and cannot connect: we look beside them.
    On several machines the launchers make a new store, and their counts of restarts differ.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return {}
    store, *_ = next(torch_dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))  # type: ignore[attr-defined]
    beside = torch_dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return {"store": beside, "rank": rank, "world_size": size}


def leave() -> None:
    """Leaves the process group, if there is one."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this rank; asking for a GPU that is not there is the user's error."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"engine.device={name}: rank {local_rank} of this machine needs GPU number {local_rank}, "
            f"but {count} {'is' if count == 1 else 'are'} visible; set engine.device=cpu, or start fewer ranks"
        )
    return torch.device("cuda", local_rank)


def sum_gradients(world: World, parameters: Sequence[Tensor]) -> None:
    """Sums .grad over ranks, in buckets that travel while the next one is packed; a missing gradient counts as zero."""
    for parameter in parameters:  # on one rank too, or the result would depend on the number of ranks
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if world.size == 1:
        return
    flights = []
    for bucket in _buckets([p for p in parameters if not sharded(p)]):  # those of sharded nets are summed in their backward pass
        grads = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        flights.append((bucket, grads, flat, torch_dist.all_reduce(flat, async_op=True)))
    for bucket, grads, flat, flight in flights:
        flight.wait()
        for parameter, grad, total in zip(bucket, grads, flat.split([g.numel() for g in grads]), strict=True):
            parameter.grad = grad.copy_(total.view(grad.shape))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
