"""A report as lines for people: each measure with its rows, its n and its interval, then the sentence on health and the notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

ORDER = (
    "chance",
    "nearest",
    "train",
    "floor",
    "shuffled",
    "still",
    "reversed",
    "real",
    "quantised",
    "reconstruction",
    "samples",
    "kept",
    "right",
    "apart",
)  # from the worst reference to what is judged


def lines(report: Mapping[str, Any]) -> list[str]:
    """All lines, in reading order."""
    things = "clips" if "flicker" in report else "pictures"
    return [
        f"n={report['n']}, seed {report['seed']}, held out: {report['held_out']}",
        *(line for name, tell in _sections(things).items() if name in report for line in tell(report[name])),
        f"health: {report['health']['sentence']}",
        *(f"note: {note}" for note in report["notes"]),
    ]


def _sections(things: str) -> dict[str, Callable[[Mapping[str, Any]], list[str]]]:
    """Those of pictures, clips and meshes, in reading order."""
    return {
        "oracle": _oracle,
        "attributes": _attributes,
        "fd": partial(_distance, "fd", things),
        "kd": partial(_distance, "kd", things),
        "is": _score,
        "lpips": _lpips,
        "reconstruction": _reconstruction,
        "flicker": _flicker,
        "codes": _codes,
        "identity": _identity,
        "sets": _sets,
        "shapes": _shapes,
        "copies": partial(_copies, things),
        "retrieval": _retrieval,
        "loss": _loss,
    }


def _skipped(name: str, section: Mapping[str, Any]) -> list[str]:
    return [f"{name}: skipped: {section['skipped']}"]


def _sorted(rows: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, rows[name]) for name in ORDER if name in rows)


def _oracle(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("oracle", section)
    told = ["oracle: share that shows what was asked for"]
    for name, row in _sorted(section["rows"]):
        low, high = row["interval"]
        parts = [f"{key} {100 * row[key]:.1f}" for key in row if key not in ("joint", "n", "interval", "directions")]
        told.append(f"  {name:<15} joint {100 * row['joint']:5.1f} % [{100 * low:.1f}, {100 * high:.1f}]  {'  '.join(parts)}")
        if each := row.get("directions"):
            ways = (f"{way} {100 * part['direction']:.1f} of {part['n']}" for way, part in each.items())
            told.append(f"  {'':<15} directions: {'  '.join(ways)}")
    return told


def _attributes(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("attributes", section)
    told = ["attributes: share that a classifier finds as the caption says; real is its ceiling, chance others' captions"]
    rows = dict(_sorted(section["rows"]))
    told.append("  " + "  ".join(f"{name:>14}" for name in rows))
    for key in ("joint", "mean", *section["slots"]):
        told.append(
            "  " + "  ".join(f"{100 * row[key]:12.1f} %" if key in row else " " * 14 for row in rows.values()) + f"  {key}"
        )
    return told


def _flicker(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("flicker", section)
    told = ["flicker: mean second difference of frames, best at that of real; motion: mean first difference"]
    for name, row in _sorted(section["rows"]):
        told.append(f"  {name:<15} flicker {row['flicker']:.5f}  motion {row['motion']:.5f}")
    return told


def _codes(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("codes", section)
    used = f"{100 * section['codes_used']:.1f} % of {section['vocab_size']:,} codes are used"
    return [f"codes: {used}, perplexity {section['perplexity']:.1f}, over {section['tokens']:,} tokens"]


def _identity(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("identity", section)
    told = [f"identity: {section['n']} stories of three scenes"]
    for name, row in _sorted(section.get("rows", {})):
        parts = "  ".join(f"{key} {100 * value:.1f}" for key, value in row.items() if key != "joint")
        told.append(f"  {name:<15} joint {100 * row['joint']:5.1f} %  {parts}")
    if likeness := section.get("features"):
        told.append(
            f"  {'features':<15} cosine {likeness['within']:.4f} within a story, {likeness['across']:.4f} between stories"
        )
    return told


def _distance(key: str, things: str, section: Mapping[str, Any]) -> list[str]:
    name = section.get("name", key)
    if "skipped" in section:
        return _skipped(name, section)
    told = [f"{name}: distance to {section['n']} real {things}, lower is better; floor: other real {things}"]
    return told + _estimates(section) + ([f"  note: {section['note']}"] if "note" in section else [])


def _estimates(section: Mapping[str, Any]) -> list[str]:
    told = []
    for name, row in _sorted(section["rows"]):
        low, high = row["interval"] or (None, None)
        interval = "" if low is None else f" [{low:.4g}, {high:.4g}] of {row['resamples']} resamples"
        told.append(f"  {name:<15} {row['value']:.4g}{interval}")
    return told


def _score(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped(section.get("name", "is"), section)
    told = f"{section['name']}: sure of each picture, and each another; 1 to {section['classes']:,}, best at that of real"
    return [told, *_estimates(section)]


def _lpips(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped(section["name"], section)
    told = f"{section['name']}: distance of reconstructions to what they were made of, lower is better; shuffled: to others"
    return [told, *_estimates(section)]


def _copies(things: str, section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("copies", section)
    known = "shapes" if "equal" in section else things
    told = [f"copies: nearest of {section['searched']:,} training {known}"]
    for space in ("pixels", "features", "chamfer"):
        if (row := section.get(space)) is None:
            continue
        shares = f"{100 * row['share']:.1f} % copies (held out: {100 * row['held_out_share']:.1f} %)"
        told.append(f"  {space:<15} median {row['median']:.4g} (held out: {row['held_out_median']:.4g}), {shares}")
    if equal := section.get("equal"):
        told.append(
            f"  {'face for face':<15} {100 * equal['share']:.1f} % equal one (held out: {100 * equal['held_out_share']:.1f} %)"
        )
    return told + ([f"  note: {section['note']}"] if "note" in section else [])


def _retrieval(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("retrieval", section)
    told = [f"retrieval: each finds its caption among {section['candidates']}"]
    for name, row in _sorted(section["rows"]):
        told.append(f"  {name:<15} " + "  ".join(f"{key.upper()} {100 * value:5.1f} %" for key, value in row.items()))
    return told


def _loss(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("loss", section)
    return ["loss: " + ", ".join(f"{name} {value:.5g}" for name, value in section.items())]


def _reconstruction(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("reconstruction", section)
    if "psnr" in section:
        return _frames_kept(section)
    told = ["reconstruction: what is left of real shapes; quantised: by bins alone"]
    for name, row in _sorted(section["rows"]):
        exact, faces = (f"{100 * row[key]:.1f} %" for key in ("exact", "triangle_accuracy"))
        close = (
            "no surface" if row["chamfer"] is None else f"chamfer {row['chamfer']:.4g}  normals {row['normal_consistency']:.4f}"
        )
        told.append(f"  {name:<15} exact {exact}  triangles {faces}  {close}")
    return told


def _frames_kept(section: Mapping[str, Any]) -> list[str]:
    told = ["reconstruction: what is left of real frames; still: of clips that repeat their first frame"]
    for name, row in _sorted(section["rows"]):
        similar = "" if row["ssim"] is None else f"  SSIM {row['ssim']:.4f}"
        told.append(f"  {name:<15} PSNR {row['psnr']:.2f} dB (first frames {row['psnr_first']:.2f}){similar}")
    return told


def _sets(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("sets", section)
    told = [f"sets: against {section['n']} held-out shapes, by {section['points']:,} points; 1-NNA is best at that of real"]
    for name, row in _sorted(section["rows"]):
        shares = f"1-NNA {100 * row['nna']:5.1f} %  COV {100 * row['coverage']:5.1f} %  MMD {row['mmd']:.4g}"
        told.append(f"  {name:<15} {shares}" + (f"  without a surface {row['num_empty']}" if row["num_empty"] else ""))
    return told + [f"  note: {note}" for note in section["notes"]]


def _shapes(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("shapes", section)
    told = ["shapes: share that is watertight and clean; means of their shares of edges and faces"]
    for name, row in _sorted(section["rows"]):
        parts = [f"{key} {100 * row[key]:.1f} %" for key in ("watertight", "clean")]
        parts += [f"{label} {100 * row[key]:.2f} %" for label, key in _FLAWS.items()]
        parts += [f"{label} {100 * row[key]:.2f} %" for label, key in _REMOVED.items() if key in row]
        told.append(f"  {name:<15} {row['faces']:.0f} faces  " + "  ".join(parts))
    return told


_FLAWS = {
    "manifold": "manifold_edges", "degenerate": "degenerate_faces", "duplicate": "duplicate_faces", "flipped": "flipped_faces",
}  # fmt: skip
_REMOVED = {"removed: degenerate": "removed_degenerate", "duplicate": "removed_duplicate"}
