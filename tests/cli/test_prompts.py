import io
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, processors

from dynajax.chat import chat_ids
from dynajax.cli.prompts import default_ctx, prompt_ids, prompt_text
from dynajax.config import ModelSpec
from dynajax.errors import StorageError, UsageError
from dynajax.text import load_tokenizer

SPEC = ModelSpec(
    layers=1, hidden=8, ffn=16, heads=1, kv_heads=1, head_dim=8, vocab=4096, max_positions=20_000, eos_ids=(0,)
)


def small_vocab(vocab):
    return ModelSpec(layers=1, hidden=8, ffn=16, heads=1, kv_heads=1, head_dim=8, vocab=vocab)


def said(text):
    return [{"role": "user", "content": text}]


def feed_stdin(monkeypatch, raw):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


def test_prompt_is_the_argument_or_stdin(monkeypatch):
    assert prompt_text("naïve -") == "naïve -"
    feed_stdin(monkeypatch, "two\nlines ☃".encode())
    assert prompt_text("-") == "two\nlines ☃"


def test_prompt_that_is_not_utf8_is_refused(monkeypatch):
    feed_stdin(monkeypatch, b"abc\xff")
    with pytest.raises(UsageError, match="must be UTF-8, byte 3 is not"):
        prompt_text("-")
    with pytest.raises(UsageError, match="must be UTF-8, byte 1 is not"):
        prompt_text("a\udcff")  # how Python hands over an argument that is not UTF-8


def test_random_ids_depend_on_the_seed_alone_and_cover_the_vocabulary():
    first = prompt_ids("random:20000", SPEC, 3)
    np.testing.assert_array_equal(first, prompt_ids("random:20000", SPEC, 3))
    assert (first != prompt_ids("random:20000", SPEC, 4)).any()
    assert (first.dtype, first.min(), first.max()) == (np.int32, 0, 4095)


def test_topic_ids_keep_to_a_topic():
    ids = prompt_ids("topics:20000", SPEC, 0)
    assert ids.dtype == np.int32
    assert 512 <= ids.min() < 600
    assert 4000 < ids.max() < 4096
    topic = ids % 16
    assert 0.84 < (topic[1:] == topic[:-1]).mean() < 0.86
    assert len(set(topic.tolist())) == 16
    counts = np.bincount(topic)
    assert counts.min() > 0.5 * counts.mean()  # none of them is rare
    assert prompt_ids("topics:1", SPEC, 0).shape == (1,)


def test_topic_ids_need_a_vocabulary():
    assert set(prompt_ids("topics:100", small_vocab(528), 0).tolist()) <= set(range(512, 528))
    with pytest.raises(UsageError, match="vocabulary of 528 or more, the model has 527"):
        prompt_ids("topics:100", small_vocab(527), 0)


@pytest.mark.parametrize(
    "source", ["random:0", "random:-1", "random:x", "topics:", "random:20001", "topics:1" + "0" * 40]
)
def test_counts_out_of_range_are_refused(source):
    with pytest.raises(UsageError, match="must be between 1 and the model's context 20000, got"):
        prompt_ids(source, SPEC, 0)


@pytest.mark.parametrize("text", ["1 2 4095", "1,2,4095", " 1\n2,\n 4095\n"])
def test_ids_from_a_text_file(tmp_path, text):
    (tmp_path / "ids.txt").write_text(text)
    ids = prompt_ids(str(tmp_path / "ids.txt"), SPEC, 0)
    assert (ids.tolist(), ids.dtype) == ([1, 2, 4095], np.int32)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">i4"])
def test_ids_from_an_npy_file(tmp_path, dtype):
    np.save(tmp_path / "ids.npy", np.array([7, 0, 300], dtype))
    ids = prompt_ids(str(tmp_path / "ids.npy"), SPEC, 0)
    assert (ids.tolist(), ids.dtype) == ([7, 0, 300], np.int32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no ids"),
        (b"1 two", "must be a .npy file or integers in text"),
        (b"1 \xff", "must be a .npy file or integers in text"),
        (b"1 " + b"9" * 30, "must be a .npy file or integers in text"),
        (b"1 4096", "must be between 0 and 4095, got 4096"),
        (b"-1 4096", "must be between 0 and 4095, got -1"),
        (b"\x93NUMPY\x01\x00junk", "must be a .npy file or integers in text"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, content, message):
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        prompt_ids(str(tmp_path / "ids"), SPEC, 0)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(np.zeros((2, 3), np.int32)), r"one row of integers, got int32 of shape \(2, 3\)"),
        (npy(np.zeros(3, np.float32)), "one row of integers, got float32"),
        (npy(np.array([print], object)), "must be a .npy file or integers in text"),
        (npy(np.zeros(3, np.int32)).replace(b"(3,)", b"(9,)"), "must be a .npy file or integers in text"),
        (
            npy(np.zeros(3, np.int32)).replace(b"(3,), }" + b" " * 12, b"(9" + b"0" * 12 + b",), }"),
            "must be a .npy file",
        ),
    ],
)
def test_arrays_of_something_else_are_refused(tmp_path, content, message):
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        prompt_ids(str(tmp_path / "ids"), SPEC, 0)


def test_a_missing_file_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        prompt_ids(str(tmp_path / "none"), SPEC, 0)
    with pytest.raises(StorageError, match="directory"):
        prompt_ids(str(tmp_path), SPEC, 0)


@pytest.mark.parametrize(
    ("prompt", "new", "expected"), [(1, 0, 256), (128, 128, 256), (129, 128, 512), (1000, 24, 1024), (1000, 25, 1200)]
)
def test_default_context(prompt, new, expected):
    assert default_ctx(prompt, new, 1200) == expected


def test_a_chat_prompt_is_encoded_as_rendered(tmp_path):
    """The template writes the special tokens; the tokenizer must not put its own around them again."""
    tokenizer = HfTokenizer(models.WordLevel({"<s>": 0, "[": 1, "hi": 2, "]": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="has no chat template: leave --chat out"):
        chat_ids(tmp_path, loaded, said("hi"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[ {{ m.content }} ]{% endfor %}"
    )
    assert loaded.encode("[ hi ]") == [0, 1, 2, 3]
    assert chat_ids(tmp_path, loaded, said("hi")) == [0, 1, 2, 3]
    assert chat_ids(tmp_path, loaded, said("hi {{ bos_token }}")) == [0, 1, 2, 4, 4, 4, 3]  # a message is no template
