"""From a source to batches: reads, crops, flips and stacks, in worker processes, in an order that only the seed decides."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tessera.batches import ImageBatch
from tessera.config import DataConfig, UserError
from tessera.data.draws import drawn_caption, mirrors
from tessera.data.order import Cut, Indices, Order
from tessera.data.sources import Source, captions_of, split_indices
from tessera.media.images import Pixels, UnreadableImage, fit
from tessera.randomness import fraction, mix, mix_text, permute

MOST_TRIES = 16  # samples drawn in the place of one that cannot be read; if half of all files were bad, one place in 65,000 fails
WORKER_TIMEOUT_S = 300  # a worker that is silent for so long is dead or stuck; better an error than a hang
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


class ImageLoader:
    """Training, validation and preview batches of one source. The contract is `contracts.Loader`."""

    def __init__(
        self, source: Source, config: DataConfig, cut: Cut, *, seed: int, device: torch.device,
        validation_samples: int, preview_samples: int,
    ) -> None:  # fmt: skip
        train, validation = split_indices(source, config.validation_fraction)
        if len(train) == 0:
            raise UserError(
                f"{len(source)} samples, and all of them fall into the validation split; "
                f"lower data.validation_fraction (now {config.validation_fraction}), or bring more files"
            )
        self.source, self.config, self.cut, self.device = source, config, cut, device
        self.train, self.held_out = train, _shuffled(validation, seed)
        self.samples = Prepared(source, config, train, seed)
        self.validation_samples, self.preview_samples = validation_samples, preview_samples

    def batches(self, first_step: int) -> Generator[Sequence[ImageBatch], None, None]:
        """Endless steps of this rank's micro-batches, prefetched by workers."""
        num_micro = len(self.cut.micro_batches(first_step))
        stream = iter(self._dataloader(first_step))
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

    def validation(self) -> Sequence[ImageBatch]:
        """This rank's share of the held-out samples, padded so that every rank has equally many batches."""
        picked = self.held_out[: self.validation_samples]
        if len(picked) == 0:
            return []
        share = max(1, self.cut.batch_size // self.cut.world_size)
        size = min(self.cut.micro_batch_size or share, share)
        num_batches = -(-len(picked) // (size * self.cut.world_size))
        slots = np.arange(num_batches * size * self.cut.world_size).reshape(num_batches, self.cut.world_size, size)
        return [self._fixed_batch(picked, mine) for mine in slots[:, self.cut.rank]]

    def preview(self) -> ImageBatch:
        """The first held-out samples, or training ones where nothing was held out."""
        picked = self.held_out if len(self.held_out) else self.train
        return self._fixed_batch(picked, np.arange(min(self.preview_samples, len(picked))))

    def _fixed_batch(self, picked: Indices, slots: Indices) -> ImageBatch:
        items = [prepare(self.source, self.config, int(picked[slot % len(picked)]), int(slot)) for slot in slots]
        batch = collate(items)
        return replace(batch, valid=batch.valid & torch.from_numpy(slots < len(picked)))

    def _dataloader(self, first_step: int) -> DataLoader[Item]:
        workers = self.config.workers
        return DataLoader(
            self.samples,
            batch_sampler=_Sampler(self.cut, first_step),
            num_workers=workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            timeout=WORKER_TIMEOUT_S if workers else 0,
            prefetch_factor=self.config.prefetch if workers else None,
            worker_init_fn=ignore_signals if workers else None,
            # Forking a process that has threads and a CUDA context is a gamble; without CUDA it is quick and safe enough.
            multiprocessing_context=("forkserver" if self.device.type == "cuda" else "fork") if workers else None,
        )


class Prepared(Dataset[Item]):
    """Stream position -> prepared picture. Runs in the workers; everything it draws is a function of seed, epoch and key."""

    def __init__(self, source: Source, config: DataConfig, indices: Indices, seed: int) -> None:
        self.source, self.config, self.indices, self.seed = source, config, indices, seed
        self.order = Order(len(indices), seed)

    def __getitem__(self, position: int) -> Item:
        """The sample of a position; if it cannot be read, others drawn for that position, so that no batch is ever smaller."""
        epoch, place = self.order.locate(position)
        first = item = self._prepare(place, epoch, position)
        for attempt in range(MOST_TRIES):
            if item.readable:
                break
            item = self._prepare(mix(self.seed, position, attempt, _REPLACEMENT) % len(self.indices), epoch, position)
        return replace(item, fault=first.fault)

    def _prepare(self, place: int, epoch: int, position: int) -> Item:
        index = int(self.indices[place])
        return prepare(self.source, self.config, index, position, draw=mix(self.seed, epoch, mix_text(self.source.key(index))))


def prepare(source: Source, config: DataConfig, index: int, position: int, draw: int | None = None) -> Item:
    """Reads and cuts one picture; without a draw it is the centre, unflipped, as in validation."""
    captions = captions_of(source, index)
    key, caption = source.key(index), drawn_caption(captions, draw)
    try:
        image = source.read(index)
    except (UnreadableImage, UserError, OSError) as error:  # UserError from a user's own dataset
        blank = np.zeros((config.resolution, config.resolution, config.channels), np.uint8)
        fault = f"{key}: {error}" if isinstance(error, OSError) else str(error)
        return Item(key, caption, position, blank, readable=False, fault=fault)
    crop_x = crop_y = 0.5
    zoom = 1.0
    if draw is not None and config.crop == "random":
        crop_x, crop_y = fraction(mix(draw, 1)), fraction(mix(draw, 2))
        zoom = 1 + (config.zoom - 1) * fraction(mix(draw, 3))
    image = fit(image, config.resolution, crop_x=crop_x, crop_y=crop_y, zoom=zoom)
    if mirrors(config.flip, captions, draw):
        image = image[:, ::-1]
    return Item(key, caption, position, image)


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
    """A signal goes to the whole process group; workers leave it to the training process, which ends them once it has saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _shuffled(indices: Indices, seed: int) -> Indices:
    return indices[permute(np.arange(len(indices)), len(indices), mix(seed, 0))]


class _Sampler:
    """Lists of stream positions, one a micro-batch, endless."""

    def __init__(self, cut: Cut, first_step: int) -> None:
        self.cut, self.first_step = cut, first_step

    def __iter__(self) -> Iterator[list[int]]:
        return self.cut.all_micro_batches(self.first_step)
