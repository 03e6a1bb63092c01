"""Times an old package and Tessera side by side: same process, same card, same pictures or tokens, same batch.

    PYTHONPATH=PEERS python bench/beside.py [image.tokenizer.train image.tokenizer.encode ... mesh.ar.sample video.maskgit.sample]

needs muse-maskgit-pytorch, for meshes meshgpt-pytorch, for clips phenaki-pytorch, and what they import (torchvision,
transformers, torch_geometric, accelerate, cv2) on the path; without names all cases run. The peers run as their authors ship
them: a tokenizer's two turns, each with its own forward, Adam, bf16 autocast; the MaskGit of pictures in TF32, because its bf16
fails. VGG16 has random weights on both sides, text is random states of 77 x 512, of clips 64 x 768; meshes have none, and are
counted in faces: the peer spends six tokens on one, and what it returns is counted. Prints a JSON row a case with the ratio;
both operation counts come from torch's own formulas. On a CPU both sides are small, only to show that they run.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torchvision

from tessera.bench import CASES
from tessera.bench.images import reduced
from tessera.bench.timing import device, device_facts, time_call

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

CODES = 65536


def peer_stepper(parameters: list[torch.nn.Parameter], loss: Callable[[], torch.Tensor], bf16: bool = True) -> Callable[[], None]:
    """One update as the peer's trainer makes it."""
    optimizer = torch.optim.Adam([p for p in parameters if p.requires_grad], lr=1e-4)

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Peer:
    """muse-maskgit-pytorch at the size its README shows. What a case needs is built when it is first asked for."""

    def __init__(self) -> None:
        self.side, self.text = (4, (7, 64)) if reduced() else (16, (77, 512))  # of the token grid; text states and their width
        self.width, self.depth = (64, 2) if reduced() else (512, 8)
        self.num_pictures, self.num_grids, self.num_drawn = (2, 4, 2) if reduced() else (8, 64, 16)
        self.repeats = {"repeats": 2, "warm": 1} if reduced() else {}

    @functools.cached_property
    def vae(self) -> Any:
        from muse_maskgit_pytorch import VQGanVAE

        vgg = torchvision.models.vgg16(weights=None)
        vgg.classifier = torch.nn.Sequential(*vgg.classifier[:-2])
        return VQGanVAE(dim=32 if reduced() else 256, codebook_size=CODES, vgg=vgg).to(device())

    @functools.cached_property
    def images(self) -> torch.Tensor:
        size = 16 * self.side
        return torch.rand(self.num_pictures, 3, size, size, device=device())

    @functools.cached_property
    def maskgit(self) -> Any:
        from muse_maskgit_pytorch import MaskGit, MaskGitTransformer, t5

        t5.T5_CONFIGS["bench"] = {"config": SimpleNamespace(d_model=self.text[1])}
        transformer = MaskGitTransformer(
            num_tokens=CODES,
            seq_len=self.side**2,
            dim=self.width,
            depth=self.depth,
            dim_head=64,
            heads=8,
            ff_mult=4,
            t5_name="bench",
        ).to(device())
        transformer.encode_text = lambda texts: torch.randn(len(texts), *self.text, device=device())
        return MaskGit(vae=self.vae, transformer=transformer, image_size=16 * self.side, cond_drop_prob=0.25).to(device())

    def train_tokenizer(self) -> dict[str, Any]:
        """Both turns."""
        vae, images = self.vae, self.images
        critic = set(vae.discr.parameters())
        first = peer_stepper([p for p in vae.parameters() if p not in critic], lambda: vae(images, return_loss=True))
        second = peer_stepper(list(critic), lambda: vae(images, return_discr_loss=True))
        return time_call(lambda: (first(), second()), self.num_pictures, **self.repeats)

    @torch.no_grad()
    def encode(self) -> dict[str, Any]:
        """Pictures to ids."""
        return time_call(lambda: self.vae.encode(self.images), self.num_pictures, **(self.repeats or {"repeats": 50}))

    def train_maskgit(self) -> dict[str, Any]:
        """One update from tokens."""
        maskgit = self.maskgit
        ids = torch.randint(0, CODES, (self.num_grids, self.side, self.side), device=device())
        text = torch.randn(self.num_grids, *self.text, device=device())
        parameters = list(maskgit.transformer.parameters())
        step = peer_stepper(parameters, lambda: maskgit(ids, text_embeds=text), bf16=False)
        count = sum(p.numel() for p in parameters if p.requires_grad)
        return time_call(step, self.num_grids, **self.repeats) | {"parameters_m": round(count / 1e6, 1)}

    def sample(self) -> dict[str, Any]:
        """18 steps with guidance 3, and the pixels."""

        def call() -> Any:
            return self.maskgit.generate(texts=["a"] * self.num_drawn, timesteps=18, cond_scale=3.0, fmap_size=self.side)

        return time_call(call, self.num_drawn, repeats=3, warm=1)


class VideoPeer:
    """phenaki-pytorch at the size its README shows."""

    def __init__(self) -> None:
        self.patch, self.side, self.frames = (8, 32, 5) if reduced() else (32, 256, 17)
        self.width, self.depth, self.layers, self.text = (64, 2, 1, (7, 64)) if reduced() else (512, 6, 4, (64, 768))
        self.num_clips, self.num_grids, self.num_drawn = (2, 2, 2) if reduced() else (4, 16, 4)
        self.repeats = {"repeats": 2, "warm": 1} if reduced() else {}

    @functools.cached_property
    def cvivit(self) -> Any:
        from phenaki_pytorch import CViViT

        vgg = torchvision.models.vgg16(weights=None)
        vgg.classifier = torch.nn.Sequential(*vgg.classifier[:-2])
        return CViViT(
            dim=self.width,
            codebook_size=CODES,
            image_size=self.side,
            patch_size=self.patch,
            temporal_patch_size=2,
            spatial_depth=self.layers,
            temporal_depth=self.layers,
            dim_head=64,
            heads=8,
            vgg=vgg,
        ).to(device())

    @functools.cached_property
    def clips(self) -> torch.Tensor:
        return torch.rand(self.num_clips, 3, self.frames, self.side, self.side, device=device())

    @functools.cached_property
    def phenaki(self) -> Any:
        from phenaki_pytorch import MaskGit, Phenaki, t5

        t5.T5_CONFIGS[t5.DEFAULT_T5_NAME] = {"config": SimpleNamespace(d_model=self.text[1])}
        maskgit = MaskGit(num_tokens=CODES, max_seq_len=1024, dim=self.width, dim_context=self.text[1], depth=self.depth)
        phenaki = Phenaki(cvivit=self.cvivit, maskgit=maskgit).to(device())
        self.cvivit.to(device())  # it left its tokenizer on the CPU
        phenaki.encode_texts = lambda texts, output_device=None: torch.randn(len(texts), *self.text, device=device())
        return phenaki

    def train_tokenizer(self) -> dict[str, Any]:
        """Both turns. VGG16 is trained with the tokenizer, as its trainer does."""
        cvivit, clips = self.cvivit.train(), self.clips
        critic = set(cvivit.discr.parameters())
        own = [p for p in cvivit.parameters() if p not in critic]
        first = peer_stepper(own, lambda: cvivit(clips))
        second = peer_stepper(list(critic), lambda: cvivit(clips, return_discr_loss=True))
        judge = {id(p) for p in cvivit.vgg.parameters()}
        count = sum(p.numel() for p in cvivit.parameters() if id(p) not in judge)
        row = time_call(lambda: (first(), second()), self.num_clips, **self.repeats)
        return row | {"parameters_m": round(count / 1e6, 1)}

    @torch.no_grad()
    def encode(self) -> dict[str, Any]:
        """Clips to ids in TF32, in eval mode, as its generator's training calls it; in train mode, as it is built, its quantizer
        computes an entropy as well."""

        def timed(training: bool) -> dict[str, Any]:
            net, repeats = self.cvivit.train(training), self.repeats or {"repeats": 50}
            return time_call(lambda: net(self.clips, return_only_codebook_ids=True), self.num_clips, **repeats)

        return timed(False) | {"ms_in_train_mode": timed(True)["ms"]}

    def train_maskgit(self) -> dict[str, Any]:
        """One update from tokens, bf16."""
        phenaki = self.phenaki
        grid = phenaki.cvivit.get_video_patch_shape(self.frames)
        ids = torch.randint(0, CODES, (self.num_grids, *grid), device=device())
        text = torch.randn(self.num_grids, *self.text, device=device())
        parameters = list(phenaki.maskgit.parameters())
        step = peer_stepper(parameters, lambda: phenaki(video_codebook_ids=ids, text_embeds=text))
        count = sum(p.numel() for p in parameters if p.requires_grad)
        return time_call(step, self.num_grids, **self.repeats) | {"parameters_m": round(count / 1e6, 1)}

    def sample(self) -> dict[str, Any]:
        """18 steps with guidance 5, and the pixels, bf16."""

        def call() -> Any:
            with torch.autocast(device().type, torch.bfloat16):
                return self.phenaki.sample(texts=["a"] * self.num_drawn, num_frames=self.frames, cond_scale=5.0)

        return time_call(call, self.num_drawn, repeats=3, warm=1)


class MeshPeer:
    """meshgpt-pytorch at its defaults, 512 random faces of 260 vertices."""

    num_faces, num_vertices = (16, 24) if reduced() else (512, 260)

    @functools.cached_property
    def autoencoder(self) -> Any:
        from meshgpt_pytorch import MeshAutoencoder

        return MeshAutoencoder(num_discrete_coors=128).to(device())

    @functools.cached_property
    def transformer(self) -> Any:
        from meshgpt_pytorch import MeshTransformer

        return MeshTransformer(self.autoencoder, dim=512, max_seq_len=6 * self.num_faces).to(device())

    def train_autoencoder(self) -> dict[str, Any]:
        """One update."""
        num = 2 if reduced() else 16
        vertices = torch.rand(num, self.num_vertices, 3, device=device()) * 2 - 1
        faces = torch.stack(
            [torch.stack([torch.randperm(self.num_vertices)[:3] for _ in range(self.num_faces)]) for _ in range(num)]
        ).to(device())
        step = peer_stepper(list(self.autoencoder.parameters()), lambda: self.autoencoder(vertices=vertices, faces=faces))
        return time_call(step, num * self.num_faces, repeats=3, warm=2, count=False)

    def train_transformer(self) -> dict[str, Any]:
        """One update from codes."""
        num = 2 if reduced() else 4
        parameters = [p for name, p in self.transformer.named_parameters() if not name.startswith("autoencoder")]
        codes = torch.randint(0, 16384, (num, 6 * self.num_faces), device=device())
        step = peer_stepper(parameters, lambda: self.transformer.forward_on_codes(codes, return_loss=True))
        return time_call(step, num * self.num_faces, repeats=3, warm=2, count=False)

    @torch.no_grad()
    def sample(self) -> dict[str, Any]:
        """One mesh of up to 64 faces with its cache; counted are the faces it returns."""
        self.transformer.eval()
        made: list[int] = []

        def call() -> None:
            with torch.autocast(device().type, torch.bfloat16):
                codes = self.transformer.generate(batch_size=1, max_seq_len=24 if reduced() else 384, return_codes=True)
            made.append(int((codes >= 0).sum()) // 6)

        row = time_call(call, 1, repeats=1, warm=1, count=False)
        return row | {"items_per_s": round(made[-1] / row["ms"] * 1e3, 1), "faces_made": made[-1]}


PEER_CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "image.tokenizer.train": Peer.train_tokenizer,
    "image.tokenizer.encode": Peer.encode,
    "image.maskgit.train": Peer.train_maskgit,
    "image.maskgit.sample": Peer.sample,
}
MESH_CASES: dict[str, Callable[[MeshPeer], dict[str, Any]]] = {
    "mesh.tokenizer.train": MeshPeer.train_autoencoder,
    "mesh.ar.train": MeshPeer.train_transformer,
    "mesh.ar.sample": MeshPeer.sample,
}
VIDEO_CASES: dict[str, Callable[[VideoPeer], dict[str, Any]]] = {
    "video.tokenizer.train": VideoPeer.train_tokenizer,
    "video.tokenizer.encode": VideoPeer.encode,
    "video.maskgit.train": VideoPeer.train_maskgit,
    "video.maskgit.sample": VideoPeer.sample,
}


def main() -> None:
    """One pair of rows a case."""
    everything: list[str] = [*PEER_CASES, *MESH_CASES, *VIDEO_CASES]
    for name in sys.argv[1:]:
        if name not in everything:
            sys.exit(f"the peers have no case {name!r}; there are {', '.join(everything)}")
    asked = sys.argv[1:] or everything
    peer, mesh_peer, video_peer = Peer(), MeshPeer(), VideoPeer()
    rows = {name: {"peer": case(peer)} for name, case in PEER_CASES.items() if name in asked}  # in order: MaskGit moves its vae
    rows |= {name: {"peer": case(mesh_peer)} for name, case in MESH_CASES.items() if name in asked}
    rows |= {name: {"peer": case(video_peer)} for name, case in VIDEO_CASES.items() if name in asked}
    del peer, mesh_peer, video_peer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.backends.cudnn.benchmark = True  # as our pipeline sets it; the peer's trainer does not
    for name, row in rows.items():
        torch.compiler.reset()  # another case's shapes would make this one's dynamic
        row["ours"] = CASES[name](None)
        ratio = row["ours"]["items_per_s"] / row["peer"]["items_per_s"]
        print(json.dumps({"case": name, **row, "ratio": round(ratio, 2), **device_facts()}), flush=True)


if __name__ == "__main__":
    main()
