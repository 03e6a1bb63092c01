"""A page of pictures: everything inside, nothing of what was written taken for markup."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from tessera.media.pages import Figure, page


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_pictures_captions_and_table_are_in_the_page() -> None:
    draws = np.random.default_rng(0)
    pictures = [draws.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(2)]
    figures = [Figure(pictures[0], 'a <b>red</b> & "round" thing'), Figure(pictures[1], "x", wrong=True)]
    text = page(
        "Title <script>", ["One & two."], {"real": {"joint": "99 %"}, "drawn": {"joint": "76 %", "shape": "80 %"}}, figures
    )
    read = Reader()
    read.feed(text)
    tags = [tag for tag, _ in read.tags]
    assert tags.count("figure") == 2
    assert "script" not in tags
    assert "b" not in tags
    assert not re.search(r"https?:", text), "nothing comes from elsewhere"
    words = "".join(read.words)
    assert 'a <b>red</b> & "round" thing' in words
    assert "One & two." in words
    assert [part for part in ("99 %", "76 %", "80 %", "shape") if part not in words] == []
    sources = [attributes["src"] for tag, attributes in read.tags if tag == "img"]
    for source, wanted in zip(sources, pictures, strict=True):
        assert source is not None
        with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
            assert np.array_equal(np.asarray(image), wanted)
    assert [attributes.get("class") for tag, attributes in read.tags if tag == "figure"] == [None, "wrong"]
