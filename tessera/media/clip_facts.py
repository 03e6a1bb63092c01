"""What is known of a clip before its frames are decoded, how its frames are asked for, and why one cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessera.media.images import WHITE, Channels, Colour, ImageFile, Pixels, resize, to_array, with_channels

PAUSE = 0.1  # seconds that a frame is shown where its file does not say
DEFAULT_FPS = 8.0  # of clips that are made, where neither data nor request says

# Frames of a hundredth of a second or less say "as fast as you can". Browsers show them for a tenth, and so do we.
_TOO_SHORT = 0.0101


@dataclass(frozen=True, slots=True, eq=False)
class ClipFacts:
    """What a file holds, before any conversion; width and height are those of the upright picture."""

    num_frames: int
    width: int
    height: int
    times: npt.NDArray[np.float64]  # t: seconds from the first frame to the start of each one, rising
    duration: float  # seconds, that of the last frame included
    format: str  # GIF, PNG, WEBP, mp4, webm, ..., folder
    codec: str  # h264, vp9, ...; of an animation its format
    mode: str  # P, RGB, yuv420p, ...: how the pixels are stored
    has_alpha: bool
    rotation: int = 0  # degrees clockwise by which the stored picture is turned: 0, 90, 180 or 270

    @property
    def fps(self) -> float:
        """Frames a second, on average."""
        return self.num_frames / self.duration


class UnreadableClip(Exception):
    """A clip of which a wanted frame cannot be decoded."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(path, reason)  # both, so that a loader's worker can pickle it
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class AvMissing(ImportError):
    """The package that reads and writes video files is not installed; the message says how to get it."""


def import_av(what: str) -> Any:
    """PyAV, which is an extra. `what` needs it, in words."""
    try:
        import av
    except ImportError as error:
        raise AvMissing(
            f"{what} needs PyAV, which is not installed: pip install 'tessera-gen[video]'; gif, apng and webp do not"
        ) from error
    return av


@dataclass(frozen=True, slots=True)
class Look:
    """How frames are wanted. With `min_side` a larger frame is scaled down until that is its shorter side."""

    channels: Channels = 3
    background: Colour = WHITE
    min_side: int | None = None

    def of_picture(self, picture: Image.Image) -> Pixels:
        """A PIL image of any mode, upright."""
        return self._small(to_array(picture, channels=self.channels, background=self.background))

    def of_array(self, array: Pixels) -> Pixels:
        """uint8 h w c, c being 1, 3 or 4."""
        return self._small(with_channels(array, channels=self.channels, background=self.background))

    def _small(self, array: Pixels) -> Pixels:
        height, width = array.shape[:2]
        shorter = min(height, width)
        if self.min_side is None or shorter <= self.min_side:
            return array
        return resize(array, round(height * self.min_side / shorter), round(width * self.min_side / shorter))


def name_of(file: ImageFile) -> Path | str:
    """What messages call a file."""
    return file if isinstance(file, (Path, str)) else file.name


def starts(shown: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], float]:
    """When frames start and when the last one ends, from the seconds that each is said to be shown."""
    seconds = np.asarray(shown, dtype=np.float64)
    seconds = np.where(seconds < _TOO_SHORT, PAUSE, seconds)
    ends = np.cumsum(seconds)
    return np.concatenate([[0.0], ends[:-1]]), float(ends[-1])
