"""Times an old package and Tessera side by side: same process, same card, same pictures or tokens, same batch.

    PYTHONPATH=PEERS python bench/beside.py [--only peer|ours] [image.tokenizer.train image.tokenizer.encode ... video.ar.sample]

needs on the path muse-maskgit-pytorch and dalle2-pytorch for pictures, meshgpt-pytorch for meshes, phenaki-pytorch and
nuwa-pytorch==0.7.8 for clips, and what they import. The last one needs little: torchvision, vector-quantize-pytorch, einx,
frozendict, loguru, torch-einops-utils, unfoldNd, ftfy, wcwidth, regex, tqdm; dalle2-pytorch of these vector-quantize-pytorch and
what it needs, ftfy, wcwidth, regex, tqdm, and besides resize-right and rotary-embedding-torch; the others besides the first
list transformers, torch_geometric, accelerate, cv2. Without names all cases run, one after the other.

Prints a JSON row as soon as it is there: the peer's, then ours with the ratio, so that a run that is cut shows what it has. With
--only one of the two.

The peers (`peers/`) run as their authors ship them: a tokenizer's two turns, each with its own forward, Adam, bf16 autocast; the
MaskGit of pictures and the generator of clips token by token in TF32, because their bf16 fails. VGG16 has random weights on both
sides, text is random states of 77 x 512, with random embeddings of 512 beside them where diffusion draws, of clips 64 x 768, of
clips token by token 64 words or bytes with an encoder that is trained; meshes have none, and are counted in faces: the peer
spends six tokens on one, and what it returns is counted. Both operation counts come from torch's own formulas. On a CPU both
sides are small, only to show that they run.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
from typing import Any

import torch

from tessera.bench import CASES
from tessera.bench.timing import device_facts

PEERS = {
    "image.tokenizer.train": "muse",
    "image.tokenizer.encode": "muse",
    "image.maskgit.train": "muse",
    "image.maskgit.sample": "muse",
    "image.diffusion.train": "dalle2",
    "image.diffusion.sample": "dalle2",
    "mesh.tokenizer.train": "meshgpt",
    "mesh.ar.train": "meshgpt",
    "mesh.ar.sample": "meshgpt",
    "video.tokenizer.train": "phenaki",
    "video.tokenizer.encode": "phenaki",
    "video.maskgit.train": "phenaki",
    "video.maskgit.sample": "phenaki",
    "video.ar.train": "nuwa",
    "video.ar.train.tokens": "nuwa",
    "video.ar.sample": "nuwa",
}
"""The module of each case's peer; imported when it is asked for, because each takes seconds."""


def set_kernels(*, tried: bool) -> None:
    """TF32 for both sides; only our pipeline has cuDNN try its kernels."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = tried


def peer_row(name: str) -> dict[str, Any]:
    """The peer of a case, built for it alone: MaskGit moves its tokenizer, and memory is to be its own."""
    set_kernels(tried=False)
    module = importlib.import_module(f"peers.{PEERS[name]}")
    return module.CASES[name](module.Peer())


def our_row(name: str) -> dict[str, Any]:
    """A case of ours."""
    set_kernels(tried=True)
    torch.compiler.reset()  # another case's shapes would make this one's dynamic
    return CASES[name](None)


def release() -> None:
    """What the other side took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """A pair of rows a case."""
    parser = argparse.ArgumentParser(description="Times old packages and Tessera side by side.")
    parser.add_argument("names", nargs="*", metavar="case", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--only", choices=("peer", "ours"), help="time one side alone")
    asked = parser.parse_args()
    for name in asked.names:
        if name not in PEERS:
            parser.error(f"the peers have no case {name!r}; there are {', '.join(PEERS)}")
    facts = device_facts()
    for name in asked.names or PEERS:
        rows: dict[str, dict[str, Any]] = {}
        for side, timed in (("peer", peer_row), ("ours", our_row)):
            if asked.only in (None, side):
                rows[side] = timed(name)
                release()
                about = {"ratio": round(rows["ours"]["items_per_s"] / rows["peer"]["items_per_s"], 2)} if len(rows) == 2 else {}
                print(json.dumps({"case": name, "side": side, **rows[side], **about, **facts}), flush=True)


if __name__ == "__main__":
    main()
