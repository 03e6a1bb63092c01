"""Which captions each sample of a folder has: from metadata rows, from files beside it, or from the name of its class folder."""

from __future__ import annotations

import itertools
import posixpath
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from tessera.config import UserError
from tessera.data.folders import CAPTION_SUFFIXES, Contents, Reject, divide
from tessera.data.names import name_files
from tessera.data.splits import SPLIT_NAMES
from tessera.data.tables import Row, clean_captions, filled_captions, sample_of, table_rows

# Whole words that a mirror would turn into a lie: left, right, left-hand, leftwards, rightmost; not bright or copyright.
_SIDE = re.compile(r"\b(left|right)(wards?|most|hand|handed|side)?\b", re.IGNORECASE)
_REPEATS = re.compile(r"^\d+_(?=.)")  # kohya's `10_cat`: repeats, then the name


def names_side(captions: Sequence[str]) -> bool:
    """Whether one of them says left or right."""
    return any(_SIDE.search(caption) for caption in captions)


def pair_captions(
    contents: Contents, *, split_folders: bool = True, class_folders: bool = True, name_captions: bool = False
) -> None:
    """Fills rows, sides and captions, and leaves only samples that are used."""
    _read_metadata(contents)
    stems = {contents.stem(image) for image in contents.samples}
    for stem, name in sorted((posixpath.splitext(name)[0], name) for name in contents.caption_files.values()):
        if stem not in stems:
            contents.note(f"caption file without {contents.kind.an}", name)
    contents.samples, contents.sides = divide(contents, contents.samples, split_folders)
    _read_captions(contents)
    if not contents.metadata and not any(contents.captions):
        if name_captions:
            name_files(contents)
        elif class_folders:
            _name_classes(contents)
    contents.rejects = list(dict.fromkeys(contents.rejects))  # two images of one stem share a caption file


def _read_metadata(contents: Contents) -> None:
    """Several rows for one image give it several captions; its other columns are those of the first."""
    by_name = {unicodedata.normalize("NFC", image): image for image in contents.samples}  # macOS writes names as NFD
    sketches = {unicodedata.normalize("NFC", sketch) for sketch in contents.sketches}
    for folder, names in itertools.groupby(sorted(contents.metadata, key=posixpath.dirname), key=posixpath.dirname):
        found = [posixpath.basename(name) for name in names]
        if len(found) > 1:
            raise UserError(f"{contents.root / folder} holds both {' and '.join(found)}; keep the one that is right")
    for name in contents.metadata:
        for line, columns in table_rows(contents.root / name):
            where, image = f"{name}:{line}", ""
            try:
                image = sample_of(columns, posixpath.dirname(name), by_name, contents.kind, sketches)
                row = Row(where, filled_captions(columns), columns)
            except ValueError as error:
                contents.rejects.append(Reject(where, str(error)))
                contents.spoilt_rows.add(image)
                continue
            if image in contents.rows:
                contents.note(f"another row for the same {contents.kind.noun}, whose caption is one more", where)
                first = contents.rows[image]
                row = replace(first, captions=tuple(dict.fromkeys((*first.captions, *row.captions))))
            contents.rows[image] = row


def _read_captions(contents: Contents) -> None:
    """A row's captions, otherwise those of the file beside the image."""
    unnamed = f"{contents.kind.noun} that no row of the metadata names" + (
        ", rejected rows aside" if "" in contents.spoilt_rows else ""
    )
    covered = tuple(posixpath.join(posixpath.dirname(name), "") for name in contents.metadata)  # tables speak for all below them
    for image in contents.samples:
        stem = contents.stem(image)
        beside = [stem + suffix for suffix in CAPTION_SUFFIXES if stem + suffix in contents.caption_files]
        row = contents.rows.get(image)
        captions = row.captions if row else ()
        if row is None and image in contents.spoilt_rows:
            contents.note(f"{contents.kind.noun} whose row of the metadata was rejected", image)
        elif row is None and image.startswith(covered):
            contents.note(unnamed, image)
        elif row and not captions:
            contents.note("metadata row without a caption", row.where)
        if beside and captions:
            contents.note(f"caption file not used, because the metadata have a caption for its {contents.kind.noun}", beside[0])
        elif beside:
            captions = _caption_file(contents, contents.caption_files[beside[0]])
            if len(beside) > 1:
                contents.note(f"{contents.kind.noun} with two caption files, of which .txt is used", image)
        contents.captions.append(captions)


def _caption_file(contents: Contents, name: str) -> tuple[str, ...]:
    try:
        content = (contents.root / name).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start}); its {contents.kind.noun} is used without a caption"
    except OSError as error:
        reason = f"{error.strerror}; its {contents.kind.noun} is used without a caption"
    else:
        captions = caption_lines(content)
        if not captions:
            contents.note("empty caption file", name)
        if len(captions) > 1:
            contents.note("caption file of several lines, each of which is a caption of its own", name)
        return captions
    contents.rejects.append(Reject(name, reason))
    return ()


def caption_lines(content: str) -> tuple[str, ...]:
    """Every line that is not empty is a caption."""
    return clean_captions(re.split(r"[\r\n]+", content), "the caption")


def _name_classes(contents: Contents) -> None:
    """Only where it is plain: every image lies in a folder directly below the root or its split folder, and there are several."""
    parts = [image.split("/") for image in contents.samples]
    if contents.sides is not None:
        parts = [each[1:] for each in parts]
    names = {each[0] for each in parts if len(each) > 1}
    if len(names) < 2:
        return
    reserved = sorted(name for name in names if name.lower() in SPLIT_NAMES)
    for name in reserved:
        contents.note("folder named as a part of a split, so no folder's name is a caption (class folders)", f"{name}/")
    misplaced = [(image, len(each)) for image, each in zip(contents.samples, parts, strict=True) if len(each) != 2]
    for image, depth in misplaced:
        where = "outside of the folders" if depth < 2 else "deeper than one folder"
        contents.note(f"{contents.kind.noun} {where}, so no folder's name is a caption (class folders)", image)
    if misplaced or reserved:
        return
    for name in sorted(names):
        contents.note(
            f"class folder, whose name is the caption of its {contents.kind.many} (data.class_folders=false: no captions)", name
        )
        if _REPEATS.match(name):
            contents.note(
                f"folder named REPEATS_NAME, whose number is left out: every {contents.kind.noun} is seen once an epoch", name
            )
    contents.captions = [clean_captions(class_name(each[0]), "the folder's name") if _is_text(each[0]) else () for each in parts]


def class_name(folder: str) -> str:
    """`10_golden_retriever` -> golden retriever."""
    return " ".join(_REPEATS.sub("", folder).split("_")).strip()


def _is_text(name: str) -> bool:
    """File names need not be; captions must."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)
