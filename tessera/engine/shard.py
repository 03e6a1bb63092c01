"""Sharding: every rank keeps its slice of each parameter (FSDP2), and modules gather their own when they are called.

A sharded parameter is a DTensor. What works element by element (optimizer, averages) works on slices; what needs whole tensors
(checkpoints) gathers them, and then every rank must take part. Weights travel in fp32, gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_net(net: nn.Module, units: tuple[type[nn.Module], ...], device: torch.device) -> None:
    """Slices a net in place: each module of the classes `units` by itself, then what is left. A net without such modules stays
    whole, as critics do. Recomputation and compilation come before this, so that they see plain modules."""
    inner = [module for module in net.modules() if isinstance(module, units)]
    if not inner or not torch_dist.is_initialized():
        return
    net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 slices no other layout
    mesh = init_device_mesh(device.type, (torch_dist.get_world_size(),))
    for module in inner:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    if not all(map(sharded, net.parameters())):
        fully_shard(net, mesh=mesh, reshard_after_forward=True)
    for unit in units_of(net):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units_of(net: nn.Module) -> list[FSDPModule]:
    """The modules that gather their own weights."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Whole weights inside, on every rank: a module gathers its own when it is called, but not for its other methods, and those
    draw previews."""
    units = [unit for net in nets for unit in units_of(net)]
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


def sum_in_backward(units: Iterable[FSDPModule], wanted: bool) -> None:
    """Whether the next backward pass sums over ranks: only that of the last micro-batch does."""
    for unit in units:
        unit.set_requires_gradient_sync(wanted, recurse=False)


def sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a slice."""
    return isinstance(tensor, DTensor)


def own(tensor: Tensor) -> Tensor:
    """This rank's slice, sharing its memory; all of a tensor that is not sharded. Call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All slices together. Every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor that every rank has read, cut as the model is; nothing travels."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def cut_like(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """A state dict of whole tensors, cut as the net's is."""
    models = net.state_dict()
    return {name: like(tensor, models[name]) for name, tensor in tensors.items()}


def gradient_norms(grads: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient; slices add up over ranks in one small collective."""
    norms = torch.stack(torch._foreach_norm([own(grad) for grad in grads]))
    if not any(map(sharded, grads)):
        return norms
    sliced = torch.tensor([sharded(grad) for grad in grads], device=norms.device)
    squares = torch.where(sliced, norms.square(), 0)
    torch_dist.all_reduce(squares)
    return torch.where(sliced, squares.sqrt(), norms)
