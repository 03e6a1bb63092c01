"""nuwa-pytorch 0.7.8: clips, token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from peers.steps import peer_stepper
from tessera.bench.images import reduced
from tessera.bench.timing import device, time_call, time_steps


class Peer:
    """Eight layers of width 512, with two feed-forwards each, on 10 x 16 x 16 tokens, window 5 x 3 x 3.

    What keeps it from running was set right. The text encoder is reversible: the plain one, its default, is called with an
    argument that it does not take. No size of pictures is given beside the tokenizer, as its README does: it refuses both. Codes
    are as wide as the tokenizer's last level: otherwise no pixels can be made of them. The tokenizer has neither VGG16 nor
    critic, which the generator deletes anyway.

    TF32: its bf16 fails. The tokenizer is frozen, and not given to the optimizer as the peer's trainer does. Guidance is timed as
    it is, both branches in every step: the second is fed what the first put out instead of tokens, which costs the same. Its
    progress bar is not drawn.
    """

    def __init__(self) -> None:
        self.side, self.frames, self.text = (32, 3, 8) if reduced() else (128, 10, 64)  # pixels, frames, words
        self.num_clips = 2

    def built(self, frames: int) -> Any:
        """For clips of so many frames; thin on a CPU."""
        from nuwa_pytorch import NUWA, VQGanVAE, nuwa_pytorch

        nuwa_pytorch.tqdm = iter
        width, heads, layers, depth = (64, 2, 1, 3) if reduced() else (512, 8, 6, 8)
        level = 16 if reduced() else 128
        vae = VQGanVAE(
            dim=level,
            image_size=self.side,
            num_layers=3,
            num_resnet_blocks=2,
            vq_codebook_size=8192,
            vq_codebook_dim=4 * level,
            use_vgg_and_gan=False,
        )
        return NUWA(
            vae=vae,
            dim=width,
            text_num_tokens=49408,
            text_enc_depth=layers,
            text_enc_heads=heads,
            text_max_seq_len=self.text,
            max_video_frames=frames,
            dec_depth=depth,
            dec_heads=heads,
            enc_reversible=True,
            dec_reversible=True,
            sparse_3dna_kernel_size=(5, 3, 3),
            sparse_3dna_dilation=(1, 2, 4),
            shift_video_tokens=True,
        ).to(device())

    @functools.cached_property
    def nuwa(self) -> Any:
        return self.built(self.frames)

    @property
    def num_tokens(self) -> int:
        """Of a frame."""
        return (self.side // 8) ** 2

    def words(self, num: int) -> torch.Tensor:
        """Captions that use the whole length."""
        return torch.randint(1, 49408, (num, self.text), device=device())

    def timed_training(self, video: torch.Tensor) -> dict[str, Any]:
        """One update."""
        parameters = [p for name, p in self.nuwa.named_parameters() if not name.startswith("vae")]
        text = self.words(self.num_clips)
        step = peer_stepper(parameters, lambda: self.nuwa(text=text, video=video, return_loss=True), bf16=False)
        repeats, warm = (2, 1) if reduced() else (10, 2)
        row = time_steps(step, self.num_clips * self.frames * self.num_tokens, repeats=repeats, warm=warm, count=False)
        return row | {"parameters_m": round(sum(p.numel() for p in parameters) / 1e6, 1)}

    def train(self) -> dict[str, Any]:
        """From pixels and words."""
        return self.timed_training(torch.rand(self.num_clips, self.frames, 3, self.side, self.side, device=device()))

    def train_tokens(self) -> dict[str, Any]:
        """From ids, which it takes in place of pixels."""
        return self.timed_training(torch.randint(0, 8192, (self.num_clips, self.frames * self.num_tokens), device=device()))

    def sample(self) -> dict[str, Any]:
        """One frame of one clip with guidance 2, among the most probable tenth of the codes, and the pixels. Built for two
        frames: it computes as many as there are tokens for, and its tables are smaller."""
        nuwa, text = self.built(2), self.words(1)
        return time_call(lambda: nuwa.generate(text=text, num_frames=1), self.num_tokens, repeats=1, warm=1, count=False)


CASES: dict[str, Callable[[Peer], dict[str, Any]]] = {
    "video.ar.train": Peer.train,
    "video.ar.train.tokens": Peer.train_tokens,
    "video.ar.sample": Peer.sample,
}
