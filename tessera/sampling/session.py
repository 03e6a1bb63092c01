"""A trained model in use: prompts in, samples out; or pictures or clips in, and tokens or the same through them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from tessera.batches import from_uint8, to_uint8
from tessera.config import Layer, UserError
from tessera.contracts import Chunk, Draw, Recipe, Scene, Tokenizer
from tessera.media.clip_facts import DEFAULT_FPS
from tessera.media.clips import Clip
from tessera.media.images import Channels, Pixels, UnreadableImage, fit, read_image, resize, to_array, to_picture
from tessera.media.meshes import Mesh, TrimeshMissing, UnreadableMesh, mesh_from, read_mesh
from tessera.recipes.precision import full_precision
from tessera.sampling import clips
from tessera.sampling.masks import redraw_of
from tessera.sampling.request import Request, make_request
from tessera.sampling.stored import Stored, build_nets, open_stored
from tessera.sampling.vectors import is_vector, read_vector

CHUNK = 64  # pictures that go through a net at once

Picture: TypeAlias = "Path | str | Image.Image | npt.NDArray[Any]"

PLURALS = {"picture": "pictures", "clip": "clips", "mesh": "meshes"}
TAKEN_BY = {  # key of a request -> the media whose requests have it
    "image": ("picture", "clip"), "mask": ("picture",), "towards": ("picture",), "outpaint": ("picture",), "mesh": ("mesh",),
    "scenes": ("clip",), "keyframes": ("clip",), "sketch": ("clip",),
}  # fmt: skip


def load(path: Path | str, *, device: str | torch.device = "auto", checkpoint: str | None = None) -> Session:
    """Opens a run or an export: averaged weights where there are any, in fp32, ready to use.

    `device` is `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:1`. Of a run, `checkpoint` may be `latest`, `best`
    or `step-N`.
    """
    return Session(open_stored(path, checkpoint), pick_device(device))


class Session:
    """The trained stages of a run or an export, and what can be done with them."""

    recipe: Recipe
    nets: Mapping[str, Mapping[str, nn.Module]]  # stage -> net -> module
    steps: Mapping[str, int]  # stage -> the step of its weights

    def __init__(self, stored: Stored, device: torch.device) -> None:
        self.path, self.recipe, self.config, self.device = stored.path, stored.recipe, stored.config, device
        self.steps = {name: stage.step for name, stage in stored.stages.items()}
        self.hashes = {name: stage.hash for name, stage in stored.stages.items()}
        self._draw: Draw | None = None
        self.nets = {
            name: {net: module.to(device) for net, module in build_nets(stage).items()} for name, stage in stored.stages.items()
        }

    def __repr__(self) -> str:
        stages = ", ".join(f"{name} of step {step}" for name, step in self.steps.items())
        return f"Session({str(self.path)!r}: {self.recipe.name}, {stages}, on {self.device})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The net that turns pictures into tokens and back."""
        net: Any = self.nets.get("tokenizer", {}).get("tokenizer")
        if not isinstance(net, Tokenizer):
            raise UserError(f"{self.path} has no trained tokenizer; its stages are {', '.join(self.nets)}")
        return net

    @property
    def draw(self) -> Draw:
        """What draws, opened once."""
        if self._draw is None:
            if self.recipe.opens is None:
                raise UserError(f"recipe {self.recipe.name} draws nothing")
            self._draw = self.recipe.opens(self.config, self.nets, self.device)
        return self._draw

    def sample(
        self, prompts: str | Sequence[str] = (), n: int = 1, *, seed: int = 0, negative: str | None = None,
        image: clips.Footage | None = None, mask: Picture | None = None, towards: Picture | None = None,
        at: float | None = None, outpaint: Mapping[str, float] | None = None, mesh: Path | str | Mesh | None = None,
        frames: int | None = None, scenes: Sequence[Scene | Mapping[str, Any]] = (),
        keyframes: Mapping[int, clips.Footage] | None = None, sketch: clips.Footage | Mapping[int, clips.Footage] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """n samples of each prompt, prompt by prompt, PIL pictures, `Clip`s or `Mesh`es; `options` are values of the sample
        section: {"guidance": 3}. Pictures may start from an image, with a mask or outpaint, or lie on the way from it
        `towards` another, all n with one seed, or all `at` one place (0 to 1) of it; meshes may start from a part of one.

        Clips have so many `frames`, go on from an image or a clip, and hold `keyframes` where they are given: {0: FIRST,
        -1: LAST}. A story has `scenes` and no prompts: [{"prompt": "a", "frames": 20}, ...], and n samples of the whole. Models
        that learned from sketches follow a `sketch` of the first frames, or of some: {0: FIRST, 8: LATER}.
        """
        if not isinstance(prompts, Iterable):
            raise UserError(f"prompts is {prompts!r}; expected text, or a list of texts")
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        changes = [Layer.of({"sample": dict(options)}, "options")] if options else []
        if frames is not None:
            changes.append(Layer.of({"sample": {"frames": frames}}, "frames"))
        request = make_request(
            self.config.sample, asked, n=n, seed=seed, negative=negative, image=image, mask=mask, towards=towards,
            at=at, outpaint=outpaint, mesh=mesh, scenes=scenes, keyframes={} if keyframes is None else keyframes, sketch=sketch,
            changes=changes,
        )  # fmt: skip
        return self.serve(request)

    def serve(self, request: Request) -> list[Any]:
        """What a request asks for, prompt by prompt."""
        return self.draw_rows(request.rows(), request)

    def draw_rows(self, rows: Sequence[tuple[str, int]], request: Request) -> list[Any]:
        """Prompts and seeds in chunks of one size, the last one padded: so a sample is the same whatever else is asked. Of meshes
        what only fills up may be left out (`leave`), and the others are the same up to rounding."""
        self.refuse_other_keys(request)
        draw, size, start, mesh = self.draw, request.options.chunk, self.start_of(request), self.mesh_of(request)
        known, (sketch, sketched) = self.given_of(request), self.sketch_of(request)
        towards, places = self.towards_of(request), request.places()
        made: list[Any] = []
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            padded = [*some, *[some[0]] * (size - len(some))]
            at = places[first : first + size]
            chunk = Chunk(
                captions=[prompt for prompt, _ in padded],
                seeds=torch.tensor([seed for _, seed in padded], device=self.device),
                options=request.options,
                negatives=None if request.negative is None else [request.negative] * size,
                pictures=None if start is None else start[0].expand(size, *start[0].shape[1:]),
                redraw=None if start is None or start[1] is None else start[1].expand(size, -1, -1),
                towards=None if towards is None else towards.expand(size, *towards.shape[1:]),
                at=None if None in at else torch.tensor([*at, *at[:1] * (size - len(at))], device=self.device),
                mesh=mesh,
                frames=None if known is None else known[0].expand(size, -1, -1, -1, -1),
                given=None if known is None else known[1],
                scenes=request.scenes or None,
                sketch=None if sketch is None else sketch.expand(size, *sketch.shape[1:]),
                sketched=sketched,
                num_asked=len(some),
            )
            made += draw(chunk)[: len(some)]
        return made

    @property
    def draws(self) -> bool:
        """Whether a generator has been trained."""
        return "base" in self.nets and self.recipe.opens is not None

    def refuse_meshes(self) -> None:
        """Some calls are about pixels."""
        if self.recipe.medium == "mesh":
            raise UserError(f"recipe {self.recipe.name} is about meshes, and this call is about pictures or clips")

    def refuse_other_keys(self, request: Request) -> None:
        """A request may have keys that mean nothing to what is drawn here."""
        for key, media in TAKEN_BY.items():
            given = getattr(request, key)
            if self.recipe.medium not in media and given is not None and not (isinstance(given, (tuple, dict)) and not given):
                others = " and ".join(PLURALS[medium] for medium in media)
                raise UserError(
                    f"recipe {self.recipe.name} draws {PLURALS[self.recipe.medium]}; {key} is for {others}: leave it out"
                )

    @property
    def resolution(self) -> int:
        """Height of what is drawn, or of what the tokenizer was trained on."""
        self.refuse_meshes()
        draw: Any = self.draw if self.draws and self.recipe.medium == "picture" else None  # a clip has that of the data
        return int(self.config.data.resolution if draw is None else draw.resolution)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the same."""
        size: tuple[int, int] = self.config.data.at(self.resolution).size
        return size

    @property
    def fps(self) -> float:
        """Frames a second of clips that the model makes."""
        return self.config.sample.fps or self.config.data.fps or DEFAULT_FPS

    @torch.no_grad()
    def through_tokens(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """n h w c -> the same through the tokenizer of what is drawn, at any size that its stride divides."""
        tokenizer: Any = self.nets["fine_tokenizer"]["tokenizer"] if "fine_tokenizer" in self.nets else self.tokenizer
        made = []
        with full_precision(self.device):
            for chunk in torch.from_numpy(pixels).permute(0, 3, 1, 2).split(CHUNK):
                made.append(to_uint8(tokenizer.decode(tokenizer.encode(from_uint8(chunk.to(self.device))))).cpu())
        return torch.cat(made).permute(0, 2, 3, 1).numpy()

    def mesh_of(self, request: Request) -> Mesh | None:
        """The part of a mesh that drawing goes on with, turned as training data is, and as large as it is given."""
        if request.mesh is None:
            return None
        if isinstance(request.mesh, Mesh):
            try:
                return mesh_from(request.mesh.vertices, request.mesh.faces)
            except ValueError as error:
                raise UserError(f"the mesh cannot be read: {error}") from None
        if not isinstance(request.mesh, (str, Path)):
            raise UserError(f"mesh is a {type(request.mesh).__name__}; expected a file or a Mesh")
        try:
            return read_mesh(Path(request.mesh), self.config.data.up).mesh
        except (UnreadableMesh, TrimeshMissing) as error:
            raise UserError(str(error)) from None

    def start_of(self, request: Request) -> tuple[Tensor, Tensor | None] | None:
        """The picture that drawing starts from, 1 c h w in [-1, 1], as large as the recipe asks, and where it is redrawn; or
        the embedding of one, 1 e."""
        if request.image is None or self.recipe.medium != "picture":
            return None
        draw: Any = self.draw
        if is_vector(request.image):
            if request.mask is not None or request.outpaint:
                raise UserError("an embedding has no pixels that could stay; give the picture, or leave mask and outpaint out")
            return self.vector_of(request.image, "image"), None
        size = draw.start_size(request.options)
        whole = self.read_for(request.image, size)
        picture, redraw = fit(whole, size), None
        if request.mask is not None:
            name = f"mask {request.mask}" if isinstance(request.mask, (str, Path)) else "mask"
            mask = self.read(request.mask, max(size), channels=4)
            redraw = torch.from_numpy(redraw_of(mask, (whole.shape[0], whole.shape[1]), size, name)[None])
        if request.outpaint:
            picture, redraw = shrunk(picture, request.outpaint)
        return self.pixels_of(picture), None if redraw is None else redraw.to(self.device)

    def towards_of(self, request: Request) -> Tensor | None:
        """The picture at the other end, 1 c h w in [-1, 1], as large as the one that drawing starts from; or its embedding."""
        if request.towards is None:
            return None
        draw: Any = self.draw
        if is_vector(request.towards):
            return self.vector_of(request.towards, "towards")
        return self.pixels_of(self.prepare(request.towards, draw.start_size(request.options)))

    def vector_of(self, given: Any, key: str) -> Tensor:
        """An embedding, 1 e of length 1 on the device."""
        return read_vector(given, getattr(self.draw, "embedding_width", None), key).to(self.device)

    def pixels_of(self, picture: Pixels) -> Tensor:
        """h w c -> 1 c h w in [-1, 1] on the device."""
        return torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].to(self.device).float().div(127.5).sub(1)

    def given_of(self, request: Request) -> tuple[Tensor, Tensor] | None:
        """Frames of a clip that are given, 1 c t h w in [-1, 1], and which ones these are, t."""
        if self.recipe.medium != "clip":
            return None
        tokenizer: Any = self.tokenizer
        return clips.given_frames(request, self.config.data, tokenizer.time_stride, self.device)

    def sketch_of(self, request: Request) -> tuple[Tensor | None, Tensor | None]:
        """The sketch as ids, 1 k h w, and which latent frames of it are there, k."""
        if request.sketch is None:
            return None, None
        if self.config.data.sketch == "none":
            raise UserError(
                f"this model ({self.path.name}, recipe {self.recipe.name}) learned nothing from sketches: leave the sketch out, "
                f"or train one that does: recipe nuwa (base.model.kind=autoregressive) with data.sketch=edges or files and "
                f"base.model.sketch_window=3"
            )
        return clips.sketch_ids(request, self.config.data, self.tokenizer, self.device)

    @torch.no_grad()  # not inference_mode: ids from there could not be used in anybody's training
    def encode(self, *pictures: clips.Footage) -> Tensor:
        """b pictures -> b h w ids on the CPU; b h w q where a place has several codes. b clips -> b t h w ids.

        A picture is a file, a PIL image or a uint8 array of height x width (x 1, 3 or 4), of any size: it is scaled and cut to
        the middle of the model's proportions, as training data is. A clip is a file, a `Clip` or a uint8 array of frames
        x height x width x channels, of any length: shorter ones, and what a latent frame lacks, are filled with last frames.
        """
        self.refuse_meshes()
        tokenizer = self.tokenizer
        if self.recipe.medium == "clip":
            return clips.encode_clips(tokenizer, [clip.frames for clip in self.prepare_clips(pictures)], self.device)
        prepared = [self.prepare(picture) for picture in pictures]
        if not prepared:
            raise UserError("no picture given; encode and reconstruct take one or more: files, PIL images or uint8 arrays")
        pixels = torch.from_numpy(np.stack(prepared)).permute(0, 3, 1, 2)
        with full_precision(self.device):
            chunks = [tokenizer.encode(from_uint8(chunk.to(self.device))).cpu() for chunk in pixels.split(CHUNK)]
        return torch.cat(chunks)

    @torch.no_grad()
    def decode(self, ids: Tensor | npt.NDArray[Any]) -> list[Any]:
        """Ids as `encode` made them, or a generator, -> b pictures, or `Clip`s."""
        self.refuse_meshes()
        tokenizer, ids = self.tokenizer, torch.as_tensor(ids)
        whole = not (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool)
        moving, quantizer = self.recipe.medium == "clip", getattr(tokenizer, "quantizer", None)
        links = len(getattr(quantizer, "links", ()))  # of a residual one
        fits = ids.ndim == 3 + moving + bool(links) and (not links or ids.shape[-1] <= links)
        if not fits or not whole or not ids.numel():
            wanted = "clips x time x height x width" if moving else "pictures x height x width"
            wanted += f" x codes of a place, up to {links}" if links else ""
            raise UserError(f"ids are {ids.dtype} shaped {list(ids.shape)}; expected whole numbers, {wanted}")
        if not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise UserError(
                f"ids reach from {int(ids.min())} to {int(ids.max())}; this tokenizer's are 0 to {tokenizer.vocab_size - 1}"
            )
        if moving:
            return clips.decode_clips(tokenizer, ids, self.fps, self.device)
        with full_precision(self.device):
            chunks = [to_uint8(tokenizer.decode(chunk.long().to(self.device))).cpu() for chunk in ids.split(CHUNK)]
        return [to_picture(array) for array in torch.cat(chunks).permute(0, 2, 3, 1).numpy()]

    def reconstruct(self, *pictures: clips.Footage) -> list[Any]:
        """Pictures or clips -> what the tokenizer keeps of them; a clip is as long as it was."""
        if self.recipe.medium != "clip":
            return self.decode(self.encode(*pictures))
        given = self.prepare_clips(pictures)
        made = self.decode(self.encode(*given))
        return [Clip(clip.frames[: len(was.frames)], was.fps) for clip, was in zip(made, given, strict=True)]

    def prepare_clips(self, footage: Sequence[clips.Footage]) -> list[Clip]:
        """Clips as the model sees them."""
        if not footage:
            raise UserError("no clip given; encode and reconstruct take one or more: files, Clips or uint8 arrays")
        return [clips.prepare(clip, self.config.data, fps=self.fps) for clip in footage]

    def prepare(self, picture: clips.Footage, size: tuple[int, int] | None = None) -> Pixels:
        """A picture as the model sees it: height x width x channels, uint8, by default at the size of the data."""
        size = size or self.config.data.size
        return fit(self.read_for(picture, size), size)

    def read_for(self, picture: clips.Footage, size: tuple[int, int]) -> Pixels:
        """A whole picture, with as many pixels as that size needs."""
        return self.read(picture, round(max(size) * self.config.data.zoom), self.config.data.channels)

    def read(self, picture: clips.Footage, min_side: int, channels: Channels) -> Pixels:
        """A file, an image or an array, uint8 height x width x channels; a JPEG perhaps smaller, not below `min_side`."""
        background = self.config.data.background
        if isinstance(picture, (str, Path)):
            try:
                return read_image(picture, min_side=min_side, channels=channels, background=background)
            except UnreadableImage as error:
                raise UserError(f"{error}; expected a png, jpg, webp or gif") from None
        image = picture if isinstance(picture, Image.Image) else to_picture(checked_pixels(picture))
        return to_array(image, channels=channels, background=background)


def shrunk(picture: Pixels, outpaint: Mapping[str, float]) -> tuple[Pixels, Tensor]:
    """A picture made smaller inside its own frame, and where the frame is empty: outpainting at a fixed resolution.

    The picture keeps its proportions: it fills the larger of the two spans, and its middle is that of what is left for it.
    """
    height, width = picture.shape[:2]
    left, right, top, bottom = (outpaint.get(name, 0.0) for name in ("left", "right", "top", "bottom"))
    rows, columns = (max(1, round(side * min(1 - left - right, 1 - top - bottom))) for side in (height, width))
    x = round(width * left + (width * (1 - left - right) - columns) / 2)
    y = round(height * top + (height * (1 - top - bottom) - rows) / 2)
    small = resize(picture, rows, columns)
    framed, redraw = np.empty_like(picture), torch.ones(1, height, width, dtype=torch.bool)
    framed[:] = picture.reshape(-1, picture.shape[2]).mean(0).astype(np.uint8)
    framed[y : y + rows, x : x + columns] = small
    redraw[:, y : y + rows, x : x + columns] = False
    return framed, redraw


def checked_pixels(array: Any) -> Pixels:
    """A uint8 array of height x width (x 1, 3 or 4), or the user's error."""
    found = f"{array.dtype} shaped {array.shape}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim not in (2, 3) or 0 in array.shape:
        raise UserError(f"a picture is {found}; expected a file, a PIL image or uint8, height x width (x 1, 3 or 4)")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        raise UserError(f"a picture is {found}; expected 1, 3 or 4 channels on the last axis")
    return array


def pick_device(name: str | torch.device) -> torch.device:
    """A device that is there."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device is called {str(name)!r}; expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device} is not there: {torch.cuda.device_count()} GPUs are visible; use cpu, or leave it out")
    return device
