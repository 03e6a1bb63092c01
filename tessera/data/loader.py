"""From a source to batches: reads, crops, flips and stacks, in worker processes, in an order that only the seed decides."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tessera.batches import ImageBatch, MeshBatch, PairBatch, TokenBatch, VideoBatch
from tessera.config import DataConfig, ImageDataConfig, UserError
from tessera.data.draws import drawn_caption, mirrors
from tessera.data.order import Cut, Indices, Order
from tessera.data.sources import Source, StoredImages, captions_of, split_indices
from tessera.media.images import Pixels, UnreadableImage, fit
from tessera.randomness import fraction, mix, mix_text, permute

MOST_TRIES = 16  # samples drawn in the place of one that cannot be read; if half of all files were bad, one place in 65,000 fails
WORKER_TIMEOUT_S = 300  # a worker that is silent for so long is dead or stuck; better an error than a hang
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends
_REPLACEMENT = mix_text("replacement")  # keeps these draws apart from all others


@dataclass(frozen=True, slots=True)
class Item:
    """One prepared picture on its way into a batch."""

    key: str
    caption: str | None
    position: int
    image: Pixels  # h w c uint8; black where there is none
    readable: bool = True
    fault: str = ""  # path and reason of the sample that belongs here, where it could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a stage's loader and its caches are made from."""

    source: Source
    config: Any  # the data section of the recipe: an ImageDataConfig, a VideoDataConfig, a MeshDataConfig
    cut: Cut
    seed: int
    device: torch.device
    validation_samples: int
    preview_samples: int
    caches: Path  # the folder of the run's caches
    needs: Mapping[str, str] = field(default_factory=dict)  # stage -> hash of its weights that this stage reads
    say: Callable[[str], None] = print  # one line for the user
    note: Callable[[str], None] = lambda line: None  # one line for log.txt alone
    show: Callable[[str], None] = print  # one line of progress, which the next may replace
    wait: Callable[[], None] = lambda: None  # until every rank is here
    check: Callable[[], None] = lambda: None  # raises where a signal asked to stop
    uses: Callable[[Path], None] = lambda folder: None  # told of each cache that the stage reads
    whole: Source | None = None  # all of the data, where `source` is a part
    lenders: tuple[Path, ...] = ()  # folders of other runs' caches, whose equal parts need not be made again


class Readable(Protocol):
    """What the loader needs to know of an item."""

    @property
    def readable(self) -> bool: ...
    @property
    def fault(self) -> str: ...


I = TypeVar("I", bound=Readable)  # noqa: E741 (an item)
B = TypeVar("B", ImageBatch, PairBatch, TokenBatch, MeshBatch, VideoBatch)


class Stream(Protocol):
    """Which positions make up this rank's micro-batches: `order.Cut`, or `order.Windows` of it."""

    def all_micro_batches(self, first_step: int) -> Iterator[list[int]]: ...


class Samples(Dataset[I], ABC):
    """Stream position -> item. Runs in the workers; everything it draws is a function of seed, epoch and key."""

    def __init__(self, source: Source, indices: Indices, seed: int) -> None:
        self.source, self.indices, self.seed = source, indices, seed
        self.order = Order(len(indices), seed)

    @abstractmethod
    def item(self, index: int, position: int, draw: int | None) -> I:
        """A sample of the source; without a draw as in validation."""

    def __getitem__(self, position: int) -> I:
        """The sample of a position."""
        return self.taken(self.indices, *self.order.locate(position), position)

    def taken(self, pool: Indices, epoch: int, place: int, position: int) -> I:
        """One of a pool; if it cannot be read, others of it drawn for the position, so that no batch is ever smaller."""
        first = item = self._drawn(int(pool[place]), epoch, position)
        for attempt in range(MOST_TRIES):
            if item.readable:
                break
            item = self._drawn(int(pool[mix(self.seed, position, attempt, _REPLACEMENT) % len(pool)]), epoch, position)
        return replace(item, fault=first.fault) if first.fault else item  # type: ignore[type-var]  # items are dataclasses

    def _drawn(self, index: int, epoch: int, position: int) -> I:
        return self.item(index, position, mix(self.seed, epoch, mix_text(self.source.key(index))))


class SampleLoader(Generic[I, B]):
    """Training, validation and preview batches of one source. The contract is `contracts.Loader`."""

    def __init__(
        self, samples: Samples[I], collate: Callable[[Sequence[I]], B], held_out: Indices, config: DataConfig, cut: Cut, *,
        device: torch.device, validation_samples: int, preview_samples: int,
    ) -> None:  # fmt: skip
        if len(samples.indices) == 0:
            lost = len(samples.source) - len(held_out)
            which = f"of which {lost} cannot be used and {len(held_out)}" if lost else "and all of them"
            raise UserError(
                f"{len(samples.source)} samples, {which} fall into the validation split; {'repair the former, ' * bool(lost)}"
                f"lower data.validation_fraction (now {config.validation_fraction}), or bring more files"
            )
        self.collate: Callable[[Sequence[I]], B] = collate
        self.source, self.samples, self.config, self.cut, self.device = samples.source, samples, config, cut, device
        self.train, self.held_out = samples.indices, _shuffled(held_out, samples.seed)
        self.validation_samples, self.preview_samples = validation_samples, preview_samples
        self.stream: Stream = cut

    def batches(self, first_step: int) -> Generator[Sequence[B], None, None]:
        """Endless steps of this rank's micro-batches, prefetched by workers."""
        num_micro = len(self.cut.micro_batches(first_step))
        order = _Sampler(self.stream, first_step)
        stream = iter(make_dataloader(self.samples, order, self.collate, self.config, self.device))
        leave = partial(end_workers, stream)
        atexit.register(leave)  # an open stream: at its end Python would wait for workers that ignore its signal
        try:
            while True:
                yield [next(stream) for _ in range(num_micro)]
        except (EOFError, ConnectionError) as error:  # which elsewhere mean that the user left
            raise RuntimeError("a worker of the loader died; if memory ran out, lower data.workers or data.prefetch") from error
        finally:
            atexit.unregister(leave)
            leave()

    def validation(self) -> Sequence[B]:
        """This rank's share of the held-out samples, padded so that every rank has equally many batches."""
        picked = self.arranged(self.held_out[: self.validation_samples])
        if len(picked) == 0:
            return []
        share = max(1, self.cut.batch_size // self.cut.world_size)
        size = min(self.cut.micro_batch_size or share, share)
        num_batches = -(-len(picked) // (size * self.cut.world_size))
        slots = np.arange(num_batches * size * self.cut.world_size).reshape(num_batches, self.cut.world_size, size)
        return [self._fixed_batch(self.samples, picked, mine) for mine in slots[:, self.cut.rank]]

    def arranged(self, picked: Indices) -> Indices:
        """The samples of a validation pass, in the order in which they are cut into batches."""
        return picked

    def preview(self) -> B:
        """The first held-out samples, or training ones where nothing was held out."""
        return self.previewed(self.samples)

    def previewed(self, samples: Samples[I]) -> B:
        """The same of samples that are read in another way."""
        picked = self.held_out if len(self.held_out) else self.train
        return self._fixed_batch(samples, picked, np.arange(min(self.preview_samples, len(picked))))

    def _fixed_batch(self, samples: Samples[I], picked: Indices, slots: Indices) -> B:
        batch = self.collate([samples.item(int(picked[slot % len(picked)]), int(slot), None) for slot in slots])
        return replace(batch, valid=batch.valid & torch.from_numpy(slots < len(picked)))


class Prepared(Samples[Item]):
    """Pictures, read and cut."""

    def __init__(self, source: Source, config: ImageDataConfig, indices: Indices, seed: int) -> None:
        super().__init__(source, indices, seed)
        self.config = config

    def item(self, index: int, position: int, draw: int | None) -> Item:
        """One picture."""
        return prepare(self.source, self.config, index, position, draw)


class ImageLoader(SampleLoader[Item, ImageBatch]):
    """Batches of pictures."""

    def __init__(
        self, source: Source, config: ImageDataConfig, cut: Cut, *, seed: int, device: torch.device,
        validation_samples: int, preview_samples: int,
    ) -> None:  # fmt: skip
        train, held_out = split_indices(source, config.validation_fraction)
        super().__init__(
            Prepared(source, config, train, seed), collate, held_out, config, cut,
            device=device, validation_samples=validation_samples, preview_samples=preview_samples,
        )  # fmt: skip

    @classmethod
    def of(cls, feed: Feed, resolution: int) -> ImageLoader:
        """For a stage that learns from pictures of that height."""
        config: ImageDataConfig = feed.config.at(resolution)
        return cls(
            reading_at(feed.source, config), config, feed.cut, seed=feed.seed, device=feed.device,
            validation_samples=feed.validation_samples, preview_samples=feed.preview_samples,
        )  # fmt: skip


def make_dataloader(
    samples: Dataset[Any], order: Iterable[list[int]], collate: Callable[[Any], Any], config: DataConfig, device: torch.device
) -> DataLoader[Any]:
    """Worker processes that make one batch for each list of the order."""
    workers, context = config.workers, None
    if workers:
        # Forking a process that has threads and a CUDA context is a gamble; without CUDA it is quick and safe enough.
        context = multiprocessing.get_context("forkserver" if device.type == "cuda" else "fork")
        context.set_forkserver_preload(["tessera.data.deaf"])  # or each worker would import torch by itself
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores serve slow disks
    return DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
        timeout=WORKER_TIMEOUT_S if workers else 0,
        prefetch_factor=config.prefetch if workers else None,
        worker_init_fn=ignore_signals if workers else None,
        multiprocessing_context=context,
    )


def reading_at(source: Source, config: ImageDataConfig) -> Source:
    """Pictures with as many pixels as the config asks for, where they have them; a source of the user's own is as it is."""
    return source.reading_at(round(max(config.size) * config.zoom)) if isinstance(source, StoredImages) else source


def prepare(source: Source, config: ImageDataConfig, index: int, position: int, draw: int | None = None) -> Item:
    """Reads and cuts one picture; without a draw it is the centre, unflipped, as in validation."""
    captions = captions_of(source, index)
    key, caption = source.key(index), drawn_caption(captions, draw)
    try:
        image = source.read(index)
    except (UnreadableImage, UserError, OSError) as error:  # UserError from a user's own dataset
        blank = np.zeros((*config.size, config.channels), np.uint8)
        fault = f"{key}: {error}" if isinstance(error, OSError) else str(error)
        return Item(key, caption, position, blank, readable=False, fault=fault)
    return Item(key, caption, position, frame(image, config, captions, draw))


def frame(image: Pixels, config: ImageDataConfig, captions: Sequence[str], draw: int | None) -> Pixels:
    """The part of a picture that a draw decides, at the size, perhaps mirrored."""
    crop_x = crop_y = 0.5
    zoom = 1.0
    if draw is not None and config.crop == "random":
        crop_x, crop_y = fraction(mix(draw, 1)), fraction(mix(draw, 2))
        zoom = 1 + (config.zoom - 1) * fraction(mix(draw, 3))
    image = fit(image, config.size, crop_x=crop_x, crop_y=crop_y, zoom=zoom)
    return image[:, ::-1] if mirrors(config.flip, captions, draw) else image


def collate(items: Sequence[Item]) -> ImageBatch:
    """One batch with its faults: raising in a worker would bury the message and bring the ranks out of step."""
    batch = ImageBatch.stack(
        [torch.from_numpy(np.ascontiguousarray(item.image.transpose(2, 0, 1))) for item in items],
        [item.key for item in items],
        [item.caption for item in items],
        [item.position for item in items],
    )
    readable = torch.tensor([item.readable for item in items])
    return replace(batch, valid=readable, faults=tuple(item.fault for item in items if item.fault))


def end_workers(stream: Any) -> None:
    """Ends a DataLoader iterator's processes now; left to the garbage collector they outlive the run."""
    shutdown = getattr(stream, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def ignore_signals(worker: int) -> None:
    """A signal goes to the whole process group; workers leave it to the training process, which ends them once it has saved. If
    it is killed they end with it, where Linux sees to that: one that has a full queue would wait for its reader for ever."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _shuffled(indices: Indices, seed: int) -> Indices:
    return indices[permute(np.arange(len(indices)), len(indices), mix(seed, 0))]


class _Sampler:
    """Lists of stream positions, one a micro-batch, endless."""

    def __init__(self, stream: Stream, first_step: int) -> None:
        self.stream, self.first_step = stream, first_step

    def __iter__(self) -> Iterator[list[int]]:
        return self.stream.all_micro_batches(self.first_step)
