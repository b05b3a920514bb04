"""Where tokenizer and embedding disagree about how many tokens there are, and what generation_config.json changes."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from dynajax import Engine
from dynajax.errors import ModelError, UsageError

WORDS = 40
FAVOURITE = 100  # from here on rows of the table that no token names, louder than those of the first tokens


def tokenizer_of(words: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def padded(models, tmp_path_factory):
    """A table of 128 rows whose tokenizer knows 40, and whose head prefers one of the others at every step."""
    folder = shutil.copytree(models["relu"], tmp_path_factory.mktemp("padded") / "model")
    tokenizer_of(WORDS).save(str(folder / "tokenizer.json"))
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "lm_head.weight" in tensors:
            head = tensors["lm_head.weight"]
            head[FAVOURITE:] = 3 * head[: len(head) - FAVOURITE]
            save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_rows_without_a_token_are_never_chosen(padded, temperature):
    with Engine.from_pretrained(str(padded), ctx=64) as engine:
        ids = engine.generate("w1 w2 w3", max_new_tokens=40, temperature=temperature, seed=1).token_ids
    assert max(ids) < WORDS


def test_without_its_tokenizer_the_same_model_chooses_them(padded, tmp_path):
    bare = shutil.copytree(padded, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with Engine.from_pretrained(str(bare), ctx=64) as engine:
        ids = engine.generate([1, 2, 3], max_new_tokens=40).token_ids
    assert max(ids) >= FAVOURITE


def test_a_tokenizer_with_more_tokens_than_rows_is_refused_at_the_prompt(padded, tmp_path):
    folder = shutil.copytree(padded, tmp_path / "long")
    tokenizer_of(300).save(str(folder / "tokenizer.json"))
    with Engine.from_pretrained(str(folder), ctx=64) as engine:
        with pytest.raises(UsageError, match=r"prompt ids must be in \[0, 128\), got 299"):
            engine.generate("w1 w299")
        assert len(engine.generate("w1 w2", max_new_tokens=3).token_ids) == 3


def test_generation_config_ends_a_text_and_advises(padded, tmp_path):
    folder = shutil.copytree(padded, tmp_path / "advised")
    settings = {"max_new_tokens": 30, "temperature": 30.0, "seed": 4}
    with Engine.from_pretrained(str(folder), ctx=64) as engine:
        free = engine.generate("w1 w2", **settings).token_ids
    stop = next(token for token in free if free.index(token) > 3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop], "do_sample": True}))
    with Engine.from_pretrained(str(folder), ctx=64) as engine:
        ended = engine.generate("w1 w2", **settings)
    assert ended.token_ids == free[: free.index(stop) + 1]
    assert ended.finish_reason == "stop"
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "do_sample": True}))
    with Engine.from_pretrained(str(folder), ctx=64) as engine:
        greedy = engine.generate("w1 w2", max_new_tokens=30).token_ids
        assert engine.generate("w1 w2", **settings).token_ids == greedy != free
        assert engine.generate("w1 w2", top_k=0, **settings).token_ids == free


def test_generation_config_with_ids_beyond_the_table_is_refused(padded, tmp_path):
    folder = shutil.copytree(padded, tmp_path / "beyond")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 128}))
    with pytest.raises(ModelError, match=r"generation_config.json names token 128, the model has 128"):
        Engine.from_pretrained(str(folder), ctx=64)


def test_a_conversation_becomes_a_prompt(padded, tmp_path):
    folder = shutil.copytree(padded, tmp_path / "chatty")
    with Engine.from_pretrained(str(folder), ctx=64) as engine, pytest.raises(UsageError, match="no chat template"):
        engine.chat_ids([{"role": "user", "content": "w1"}])
    (folder / "chat_template.jinja").write_text("{% for m in messages %}w5 {{ m.content }} {% endfor %}w6")
    with Engine.from_pretrained(str(folder), ctx=64) as engine:
        ids = engine.chat_ids([{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}])
    assert ids == [5, 1, 5, 2, 6]
