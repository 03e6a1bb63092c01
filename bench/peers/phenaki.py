"""phenaki-pytorch: clips, masked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from peers.steps import peer_stepper
from tessera.bench.images import reduced
from tessera.bench.timing import device, time_call, time_steps

CODES = 65536


class Peer:
    """phenaki-pytorch at the size its README shows."""

    def __init__(self) -> None:
        self.patch, self.side, self.frames = (8, 32, 5) if reduced() else (32, 256, 17)
        self.width, self.depth, self.layers, self.text = (64, 2, 1, (7, 64)) if reduced() else (512, 6, 4, (64, 768))
        self.num_clips, self.num_grids, self.num_drawn = (2, 2, 2) if reduced() else (4, 16, 4)
        self.repeats = {"repeats": 2, "warm": 1} if reduced() else {}

    @functools.cached_property
    def cvivit(self) -> Any:
        import torchvision
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
        row = time_steps(lambda: (first(), second()), self.num_clips, **self.repeats)
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
        return time_steps(step, self.num_grids, **self.repeats) | {"parameters_m": round(count / 1e6, 1)}

    def sample(self) -> dict[str, Any]:
        """18 steps with guidance 5, and the pixels, bf16."""

        def call() -> Any:
            with torch.autocast(device().type, torch.bfloat16):
                return self.phenaki.sample(texts=["a"] * self.num_drawn, num_frames=self.frames, cond_scale=5.0)

        return time_call(call, self.num_drawn, repeats=3, warm=1)


CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "video.tokenizer.train": Peer.train_tokenizer,
    "video.tokenizer.encode": Peer.encode,
    "video.maskgit.train": Peer.train_maskgit,
    "video.maskgit.sample": Peer.sample,
}
