"""A GGUF file as a Hugging Face folder: the same values, the same ids, nothing half done."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dynajax.chat import load_chat
from dynajax.checkpoint import read_spec
from dynajax.checkpoint.checksums import read_checksums
from dynajax.checkpoint.generation import read_generation_config
from dynajax.convert.gguf import convert_gguf
from dynajax.errors import ModelError, NumericalError, UsageError
from dynajax.testing import random_tensors
from dynajax.text import load_tokenizer
from tests.gguf_maker import KINDS, SPEC, make_gguf

TENSORS = random_tensors(SPEC, seed=5)
WORDS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 126))]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [-float(i) for i in range(len(WORDS))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(WORDS) - 3)],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
}


def values(kind, name):
    from gguf.quants import dequantize, quantize

    value = TENSORS[name]
    return dequantize(quantize(value, KINDS[kind]), KINDS[kind]) if value.ndim == 2 and kind != "F32" else value


@pytest.mark.parametrize(("kind", "matrices"), [("F32", "float32"), ("F16", "float16"), ("Q4_1", "float16")])
def test_a_folder_like_any_other(tmp_path, kind, matrices):
    source = make_gguf(tmp_path / "m.gguf", TENSORS, kind=kind, metadata=VOCABULARY)
    steps = []
    folder = convert_gguf(source, tmp_path / "out", progress=lambda *step: steps.append(step), files={"LICENSE": b"x"})
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == TENSORS.keys() == read_checksums(folder).keys()
    for name, value in tensors.items():
        assert value.dtype == (matrices if value.ndim == 2 else "float32")  # norms cost nothing
        np.testing.assert_array_equal(value, values(kind, name).astype(value.dtype))
    assert read_spec(folder).dtype == matrices
    assert read_spec(folder).hidden == SPEC.hidden
    assert steps[-1] == ("convert", len(tensors), len(tensors))
    assert read_generation_config(folder) == {"bos_token_id": 1, "eos_token_id": [2]}
    assert (folder / "LICENSE").read_bytes() == b"x"


def test_bfloat16_stays_and_dtype_decides_for_all(tmp_path):
    source = make_gguf(tmp_path / "m.gguf", TENSORS, kind="BF16")
    assert read_spec(convert_gguf(source, tmp_path / "kept")).dtype == "bfloat16"
    folder = convert_gguf(source, tmp_path / "wide", dtype="float32")
    for name, value in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(value, values("BF16", name))


def test_the_tokenizer_and_the_template_go_along(tmp_path):
    source = make_gguf(tmp_path / "m.gguf", TENSORS, metadata=VOCABULARY)
    folder = convert_gguf(source, tmp_path / "out")
    inside, outside = load_tokenizer(source), load_tokenizer(folder)
    for text in ("a", "a b", "<s>x", "~~ !", ""):
        assert (
            inside.encode(text)
            == outside.encode(text)
            == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["chat_template"] == (folder / "chat_template.jinja").read_text()
    assert (
        load_chat(folder).render([{"content": "hi"}])
        == load_chat(source, inside).render([{"content": "hi"}])
        == "<s>[hi]"
    )


def test_without_a_tokenizer(tmp_path):
    source = make_gguf(tmp_path / "m.gguf", TENSORS)
    assert load_tokenizer(source) is None
    folder = convert_gguf(source, tmp_path / "out")
    assert load_tokenizer(folder) is None
    assert not (folder / "tokenizer_config.json").exists()


def test_a_failure_leaves_nothing(tmp_path):
    large = TENSORS | {"lm_head.weight": np.full_like(TENSORS["lm_head.weight"], 1e6)}
    source = make_gguf(tmp_path / "m.gguf", large)
    with pytest.raises(NumericalError, match="lm_head.weight holds 1e\\+06, beyond float16"):
        convert_gguf(source, tmp_path / "out", dtype="float16")
    with pytest.raises(ModelError, match="is missing"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(UsageError, match="exists and is not empty"):
        convert_gguf(source, tmp_path / "out")


def test_the_folder_computes_what_the_file_says(tmp_path):
    """transformers on the folder, against transformers on the values that the file holds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = convert_gguf(make_gguf(tmp_path / "m.gguf", TENSORS, kind="Q8_0"), tmp_path / "out", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    other = transformers.LlamaForCausalLM(model.config).eval()
    other.load_state_dict({name: torch.from_numpy(values("Q8_0", name)) for name in TENSORS})
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        np.testing.assert_allclose(model(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)
