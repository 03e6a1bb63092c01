"""A self-contained page of captioned pictures: arrays and words in, one HTML file out that opens without a network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.media.images import Pixels, encode_png

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "figure{display:inline-block;width:9rem;margin:.4rem;vertical-align:top}"
    "img{width:9rem;height:9rem;image-rendering:pixelated;border:1px solid #ddd}"
    "figcaption{font-size:.8rem}.wrong img{border:2px solid #c33}"
    "td,th{padding:.15rem .8rem .15rem 0;text-align:right}td:first-child,th:first-child{text-align:left}code{background:#f3f3f3}"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, the words under it, and whether it is marked as wrong."""

    picture: Pixels
    caption: str
    wrong: bool = False


def page(title: str, paragraphs: Sequence[str], table: Mapping[str, Mapping[str, str]], figures: Sequence[Figure]) -> str:
    """HTML: a heading, text, a table of row -> column -> value, and the pictures."""
    columns = list(dict.fromkeys(name for row in table.values() for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *columns))
    cells = {name: "".join(f"<td>{html.escape(row.get(key, ''))}</td>" for key in columns) for name, row in table.items()}
    rows = "".join(f"<tr><td>{html.escape(name)}</td>{inside}</tr>" for name, inside in cells.items())
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>',
            f"<h1>{html.escape(title)}</h1>",
            *(f"<p>{html.escape(text)}</p>" for text in paragraphs),
            f"<table><tr>{head}</tr>{rows}</table>",
            *(_figure(figure) for figure in figures),
            "</html>",
            "",
        ]
    )


def _figure(figure: Figure) -> str:
    encoded = base64.b64encode(encode_png(figure.picture)).decode()
    words = html.escape(figure.caption)
    mark = ' class="wrong"' if figure.wrong else ""
    return f'<figure{mark}><img src="data:image/png;base64,{encoded}" alt="{words}"><figcaption>{words}</figcaption></figure>'
