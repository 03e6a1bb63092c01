"""A report as lines for people: each measure with its rows, its n and its interval, then the sentence on health and the notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ORDER = ("chance", "nearest", "floor", "real", "reconstruction", "samples")  # from the worst reference to what is judged


def lines(report: Mapping[str, Any]) -> list[str]:
    """All lines, in reading order."""
    return [
        f"n={report['n']}, seed {report['seed']}, held out: {report['held_out']}",
        *_oracle(report["oracle"]),
        *_distance("fd", report["fd"]),
        *_distance("kd", report["kd"]),
        *_copies(report["copies"]),
        *_retrieval(report["retrieval"]),
        *_loss(report["loss"]),
        f"health: {report['health']['sentence']}",
        *(f"note: {note}" for note in report["notes"]),
    ]


def _skipped(name: str, section: Mapping[str, Any]) -> list[str]:
    return [f"{name}: skipped: {section['skipped']}"]


def _sorted(rows: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, rows[name]) for name in ORDER if name in rows)


def _oracle(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("oracle", section)
    told = ["oracle: share of pictures that show what was asked for"]
    for name, row in _sorted(section["rows"]):
        low, high = row["interval"]
        parts = [f"{key} {100 * row[key]:.1f}" for key in row if key not in ("joint", "n", "interval")]
        told.append(f"  {name:<15} joint {100 * row['joint']:5.1f} % [{100 * low:.1f}, {100 * high:.1f}]  {'  '.join(parts)}")
    return told


def _distance(key: str, section: Mapping[str, Any]) -> list[str]:
    name = section.get("name", key)
    if "skipped" in section:
        return _skipped(name, section)
    told = [f"{name}: distance to {section['n']} real pictures, lower is better; floor: other real pictures"]
    for row_name, row in _sorted(section["rows"]):
        low, high = row["interval"] or (None, None)
        interval = "" if low is None else f" [{low:.4g}, {high:.4g}] of {row['resamples']} resamples"
        told.append(f"  {row_name:<15} {row['value']:.4g}{interval}")
    return told + ([f"  note: {section['note']}"] if "note" in section else [])


def _copies(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("copies", section)
    told = [f"copies: nearest of {section['searched']:,} training pictures"]
    for space in ("pixels", "features"):
        row = section[space]
        shares = f"{100 * row['share']:.1f} % copies (held out: {100 * row['held_out_share']:.1f} %)"
        told.append(f"  {space:<15} median {row['median']:.4g} (held out: {row['held_out_median']:.4g}), {shares}")
    return told + ([f"  note: {section['note']}"] if "note" in section else [])


def _retrieval(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("retrieval", section)
    told = [f"retrieval: a picture finds its caption among {section['candidates']}"]
    for name, row in _sorted(section["rows"]):
        told.append(f"  {name:<15} " + "  ".join(f"{key.upper()} {100 * value:5.1f} %" for key, value in row.items()))
    return told


def _loss(section: Mapping[str, Any]) -> list[str]:
    if "skipped" in section:
        return _skipped("loss", section)
    return ["loss: " + ", ".join(f"{name} {value:.5g}" for name, value in section.items())]
