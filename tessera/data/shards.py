"""Webdataset tars in, a source out: every shard's headers are read once, and then each picture is one seek and one read.

So a shard is as good as a folder: any order, exact to resume, no matter how many workers and ranks share how many shards. Nothing
is unpickled. A sample is what shares a name up to its first dot: `0001.jpg` is the picture, `0001.txt`, `0001.caption` or
`0001.json` (an object with text, caption or prompt) its captions.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tessera.config import UserError
from tessera.data.captions import caption_lines
from tessera.data.folders import CAPTION_SUFFIXES, Contents, Reject, divide, group_values
from tessera.data.kinds import IMAGES
from tessera.data.sources import Examined, Index, Reading, StoredImages, StringTable
from tessera.data.tables import filled_captions
from tessera.data.unread import note_beside_tars
from tessera.media.images import IMAGE_SUFFIXES, Blob, Pixels, UnreadableImage, inspect_image

_MAX_TEXT_BYTES = 1 << 20  # a caption is not larger; what is would only fill the memory


@dataclass(frozen=True, eq=False, kw_only=True)
class TarShards(StoredImages):
    """The images in the tars of a folder, or in a single tar. Build it with `TarShards.of`."""

    layout = "webdataset"
    _shards: StringTable  # paths below the root
    _shard: npt.NDArray[np.int32]
    _offsets: npt.NDArray[np.int64]
    _sizes: npt.NDArray[np.int64]
    _members: StringTable

    @classmethod
    def of(cls, contents: Contents, reading: Reading) -> TarShards:
        shards, sides = divide(contents, contents.shards, reading.split_folders)
        found = [(number, entry) for number, shard in enumerate(shards) for entry in _entries(contents, shard)]
        if not found:
            reasons = "; ".join(f"{reject.path}: {reject.reason}" for reject in contents.rejects[:3])
            raise UserError(f"{contents.root} holds .tar files without images ({reasons or 'they are empty'}); {IMAGES.expected}")
        note_beside_tars(contents)
        stems = [posixpath.splitext(shard or contents.root.name)[0] for shard in shards]
        keys = [f"{stems[number]}/{entry.key}" for number, entry in found]
        groups = None
        if reading.group_by is not None:
            groups = group_values(contents, [entry.columns for _, entry in found], keys, reading.group_by)
        return cls(
            root=contents.root,
            rejects=tuple(contents.rejects),
            notes=contents.notes(),
            reading=reading,
            index=Index.of(
                keys,
                [entry.captions for _, entry in found],
                None if sides is None else [sides[number] for number, _ in found],
                groups,
            ),
            _shards=StringTable(shards),
            _shard=np.array([number for number, _ in found], dtype=np.int32),
            _offsets=np.array([entry.offset for _, entry in found], dtype=np.int64),
            _sizes=np.array([entry.size for _, entry in found], dtype=np.int64),
            _members=StringTable(entry.member for _, entry in found),
        )

    def files(self) -> Iterator[Path]:
        return (self.root / self._shards[index] for index in range(len(self._shards)))

    def shard(self, index: int) -> int:
        """Which of the files a sample lies in."""
        return int(self._shard[index])

    def stem(self, shard: int) -> str:
        """Of a file: what the keys of its samples begin with."""
        return posixpath.splitext(self._shards[shard] or self.root.name)[0]

    def offset(self, index: int) -> int:
        """Where in its file a sample's picture begins."""
        return int(self._offsets[index])

    def name(self, index: int) -> str:
        return posixpath.join(self._shards[int(self._shard[index])], self._members[index])

    def read(self, index: int) -> Pixels:
        return self.decoded(self.blob(index))

    def examine(self, index: int) -> Examined:
        blob = self.blob(index)
        facts, picture = inspect_image(blob)
        return Examined(facts, hashlib.sha256(blob.content).digest(), picture)

    def blob(self, index: int) -> Blob:
        name = str(self.root / self.name(index))
        try:
            with (self.root / self._shards[int(self._shard[index])]).open("rb") as shard:
                shard.seek(int(self._offsets[index]))
                return Blob(name, shard.read(int(self._sizes[index])))
        except OSError as error:
            raise UnreadableImage(name, (error.strerror or str(error)).lower()) from error


@dataclass
class _Entry:
    """What a shard holds under one key."""

    key: str
    member: str = ""  # the picture's; empty: there is none
    offset: int = 0
    size: int = 0
    captions: tuple[str, ...] = ()
    columns: Mapping[str, Any] | None = field(default=None, repr=False)


def _entries(contents: Contents, shard: str) -> Iterator[_Entry]:
    """A shard that is damaged in the middle gives what comes before."""
    entries: dict[str, _Entry] = {}
    path = contents.root / shard
    try:
        with path.open("rb") as texts, tarfile.open(path, "r:") as tar:
            length, end = path.stat().st_size, 0
            for member in tar:
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if member.isfile() and not member.issparse() and member.offset_data + member.size <= length:
                    _sort_member(contents, shard, member, entries, texts)
                elif not member.isdir():
                    contents.rejects.append(Reject(posixpath.join(shard, member.name), "a link, or cut short"))
            texts.seek(end)
            if texts.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # tarfile takes a cut header for the end
                contents.rejects.append(
                    Reject(shard or path.name, f"cut short after {len(entries):,} samples: it has no end mark")
                )
    except Exception as error:  # from damaged headers tarfile leaks several kinds
        reason = f"damaged after {len(entries):,} samples: {error}" if entries else _not_a_tar(path, error)
        contents.rejects.append(Reject(shard or path.name, " ".join(reason.split())))
    for entry in entries.values():
        if entry.member:
            yield entry
        else:
            contents.note("caption in a shard without a picture", posixpath.join(shard, entry.key))


def key_and_suffix(member: str) -> tuple[str, str]:
    """Name in a shard -> the sample's key there, and what follows it; the key of .DS_Store and its kind is empty."""
    folder, name = posixpath.split(posixpath.normpath(member))
    stem, dot, suffix = name.partition(".")
    return posixpath.join(folder, stem) if stem else "", (dot + suffix).lower()


def _sort_member(contents: Contents, shard: str, member: tarfile.TarInfo, entries: dict[str, _Entry], texts: IO[bytes]) -> None:
    key, suffix = key_and_suffix(member.name)
    if not key:
        return
    where = posixpath.join(shard, member.name)
    if suffix in IMAGE_SUFFIXES:
        entry = entries.setdefault(key, _Entry(key))
        if entry.member:
            contents.rejects.append(Reject(where, f"another picture for the key {key}; {entry.member} is used"))
        else:
            entry.member, entry.offset, entry.size = member.name, member.offset_data, member.size
    elif suffix in (*CAPTION_SUFFIXES, ".json"):
        texts.seek(member.offset_data)
        _add_text(contents, where, suffix, texts.read(min(member.size, _MAX_TEXT_BYTES)), entries.setdefault(key, _Entry(key)))
    elif suffix.endswith(".npy"):
        contents.note(f"array in a shard, read only where embeddings are asked for: *{suffix}", where)
    else:
        contents.note(f"file in a shard that is not read: *{suffix or ' without extension'}", where)


def _add_text(contents: Contents, where: str, suffix: str, content: bytes, entry: _Entry) -> None:
    """A text file's captions stand before those of a json, whichever comes first in the shard."""
    try:
        text = content.decode("utf-8-sig")
        if suffix != ".json":
            entry.captions = caption_lines(text)
            return
        columns = json.loads(text)
        if not isinstance(columns, dict):
            raise ValueError(f"a JSON {type(columns).__name__}; expected an object with text, caption or prompt")
        entry.columns = columns
        entry.captions = entry.captions or filled_captions(columns)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        return
    contents.rejects.append(Reject(where, f"{reason}; its image is used without this caption"))


def _not_a_tar(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    with path.open("rb") as file:
        head = file.read(6)
    packed = head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    return "a compressed tar, in which no picture can be found by its offset; decompress it" if packed else f"not a tar: {error}"
