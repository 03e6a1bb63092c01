"""What `engine.cuda_graphs` records of every stage can be recorded: it trains as the launched one does, and never turns to the
host. There is no GPU here: graphs are stood in for, and a device without memory shows what would leave it."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tessera import engine
from tessera.compiling import DYNAMIC, outermost, settle_einops
from tessera.engine.replay import NetRecording, Replayed
from tessera.engine.state import TrainState
from tessera.engine.step import Setting, train_step
from tessera.recording import mapped, tensors_of
from tests.contract.test_stages import STAGES, STEPS, WORLD, data, named, small
from tests.engine.test_replay import Again, Anywhere
from tests.prepared import prepared

__all__ = ["data"]  # a fixture

PLAIN = "tokenizer.critic=null"
"""With a critic halves of a tokenizer are recorded by torch, without one by us."""

GRAPH = (
    "tokenizer.model={coordinate_width: 8, encoder_width: 32, encoder_layers: 2, decoder_width: 32, decoder_blocks: 2, heads: 2, "
    "quantizer: {num_quantizers: 2, quantizer: {%s}}}"
)
QUANTIZERS = {"lfq": "kind: lfq, bits: 6", "vq": "kind: vq, codes: 32, width: 4"}

CASES = [
    *(pytest.param(*stage.values, (), id=str(stage.id)) for stage in STAGES),
    *(
        pytest.param(recipe, "tokenizer", (PLAIN,), id=f"{recipe}-tokenizer-plain")
        for recipe in ("phenaki", "phenaki-cvivit", "phenaki-frames", "muse")
    ),
    *(
        pytest.param("meshgpt-graph", "tokenizer", (GRAPH % quantizer,), id=f"meshgpt-graph-{kind}")
        for kind, quantizer in QUANTIZERS.items()
    ),
]


class NoTraffic(TorchDispatchMode):
    """Fails where a number in the host's memory meets the device; one that is known when recording stays what it was."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        met = tensors_of((args, kwargs, made))
        if any(t.is_meta for t in met) and any(not t.is_meta for t in met):
            raise AssertionError(f"{func} joins {[(str(t.device), tuple(t.shape)) for t in met]}")
        return made


def steps_of(state: TrainState, stage: Any, loader: Any) -> list[dict[str, float]]:
    stream = loader.batches(0)
    lines = []
    for _ in range(STEPS):
        moved = [batch.to(WORLD.device) for batch in next(stream)]
        lines.append(
            {k: v for turn in train_step(state, stage, moved, Setting(WORLD, STEPS)).turns for k, v in turn.numbers().items()}
        )
    stream.close()
    return lines


@pytest.mark.parametrize(("recipe", "name", "sets"), CASES)
def test_recorded_nets_train_as_launched_ones(
    recipe: str, name: str, sets: tuple[str, ...], data: dict[str, Path], tmp_path: Path
) -> None:
    config = small(recipe, data, *sets)
    lines = []
    for recorded in (False, True):
        stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
        stand_ins: list[Replayed] = []
        for net in stage.all_nets.values() if recorded else ():
            for module in (m for m in net.modules() if isinstance(m, stage.recorded)):
                stand_ins.append(Anywhere(module, module._call_impl, Again))
                module._compiled_call_impl = stand_ins[-1]
        lines.append(steps_of(state, stage, loader))
    for wanted, found in zip(*lines, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    if stage.recorded:
        assert any(stand_in.recordings for stand_in in stand_ins)


ALWAYS = "dalle2-upsampler1"  # many layers of few kinds, given views; the others take minutes together


@pytest.mark.parametrize(
    ("recipe", "name", "sets"),
    [pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] * (case.id != ALWAYS)) for case in CASES],
)
def test_nothing_is_compiled_while_it_is_recorded(
    recipe: str, name: str, sets: tuple[str, ...], data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []

    class Watched(NetRecording):
        def __init__(self, *args: Any) -> None:
            before = counters["frames"]["total"]
            super().__init__(*args)
            traced.append(counters["frames"]["total"] - before)

    monkeypatch.setattr(engine.replay, "NetRecording", Watched)
    torch._dynamo.reset()
    config = small(recipe, data, *sets)
    stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
    if not stage.recorded:
        pytest.skip("nothing of it is recorded")
    settle_einops()
    for net in stage.all_nets.values():
        for module in outermost(net, stage.compiled):
            module.compile(backend="aot_eager", dynamic=DYNAMIC[stage.shapes])
        for module in (m for m in net.modules() if isinstance(m, stage.recorded)):
            module._compiled_call_impl = Anywhere(module, module._compiled_call_impl or module._call_impl, Again)
    steps_of(state, stage, loader)
    assert traced
    assert not any(traced)


@pytest.mark.parametrize(("recipe", "name", "sets"), CASES)
def test_recorded_nets_never_turn_to_the_host(
    recipe: str, name: str, sets: tuple[str, ...], data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(recipe, data, *sets)
    stage, state, loader = prepared(config, named(config, name), WORLD, tmp_path)
    calls: list[tuple[nn.Module, Any, bool]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((module, (args, kwargs), torch.is_grad_enabled()))

    modules = [m for net in stage.all_nets.values() for m in net.modules() if isinstance(m, stage.recorded)]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    steps_of(state, stage, loader)
    for hook in hooks:
        hook.remove()
    assert bool(calls) == bool(stage.recorded)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # there is none of that device
    seen = set()
    for module, given, grown in calls:
        kind = (module, grown, *(t.shape for t in tensors_of(given)))
        if kind in seen:
            continue
        seen.add(kind)
        twin = copy.deepcopy(module).to("meta")
        args, kwargs = mapped(given, elsewhere)
        with torch.set_grad_enabled(grown), NoTraffic():
            made = [t for t in tensors_of(twin(*args, **kwargs)) if t.requires_grad]
            if made:
                torch.autograd.grad(
                    made, [p for p in twin.parameters() if p.requires_grad], [torch.ones_like(t) for t in made], allow_unused=True
                )


def elsewhere(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
