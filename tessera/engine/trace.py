"""Follows a loss to the parameters it would change, and refuses a stage whose turns do not train what they say."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tessera.contracts import Loss, Stage, Turn
from tessera.engine.shard import sharded


def check_reach(loss: Loss, turn: Turn, stage: Stage) -> None:
    """The leaves of the graph must be parameters of the nets that the turn trains, with at least one of each net.

    A leaf from elsewhere is a network that the loss closes over and nobody froze: its gradients would never be zeroed.
    """
    if loss.total.ndim or loss.weight.ndim:
        shapes = f"{tuple(loss.total.shape)} and {tuple(loss.weight.shape)}"
        raise ValueError(f"turn {turn.name!r}: Loss.total and Loss.weight must be scalars (sums), got shapes {shapes}")
    if any(sharded(p) for net in turn.trains for p in stage.nets[net].parameters()):
        return  # the graph ends in gathered copies, which belong to nobody; the stage is checked where it is replicated
    reached = leaves(loss.total)
    owners = {id(p): (net, name) for net, module in stage.all_nets.items() for name, p in module.named_parameters()}
    strangers = [leaf for leaf in reached if owners.get(id(leaf), ("", ""))[0] not in turn.trains]
    if strangers:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in strangers[:4])
        raise ValueError(
            f"turn {turn.name!r} sends gradients into {len(strangers)} tensors that it does not train (shapes {shapes}); "
            f"it trains {', '.join(turn.trains)}. Name their network in Stage.frozen, or in Turn.trains"
        )
    missed = set(turn.trains) - {owners[id(leaf)][0] for leaf in reached}
    if missed:
        raise ValueError(f"turn {turn.name!r} trains {sorted(missed)}, but no gradient reaches it: does the loss use it?")


def leaves(total: Tensor) -> list[nn.Parameter]:
    """All parameters that `total.backward()` would accumulate a gradient into."""
    found: list[nn.Parameter] = []
    seen: set[Any] = set()
    stack: list[Any] = [total.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes have one
        if isinstance(variable, nn.Parameter):  # an input with requires_grad, as penalties use, is no parameter
            found.append(variable)
        stack += [parent for parent, _ in node.next_functions]
    return found
