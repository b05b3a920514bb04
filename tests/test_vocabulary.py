"""SentencePiece models and the tokenizers inside GGUF files: the same ids as their own programs give."""

import io
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from dynajax.checkpoint.sentencepiece_file import read_pieces
from dynajax.errors import ModelError
from dynajax.text import Tokenizer, load_tokenizer
from dynajax.vocabulary import SPLITTERS, from_gguf

HELDOUT = Path(__file__).parent / "data" / "heldout"
NASTY = [
    "",
    "a",
    " a",
    "  a",
    "a ",
    "a  ",
    " ",
    "  ",
    "\n",
    "\t",
    "a\nb",
    "a\n\n b",
    "\r\n",
    "\x00",
    "\x01\x02",
    "\x7f",
]
NASTY += [
    "😀",
    "👩‍🚀",
    "日本語テキスト",
    "é",
    "e\u0301",
    "ﬁ",
    "①",
    "Ａ",
    "\u00a0x",
    "▁",
    "▁a",
    "a▁b",
    " ▁",
    "x\u200dy",
    "\ufeff",
]
NASTY += ["aaaaaaa", "the thethethe", "....", "\U0010ffff", "a\u3000b", "1234567 89", "<0x41", "don't WE'LL", "naïve"]
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
KINDS = {
    "llama": LLAMA,
    "own symbols": LLAMA | {"user_defined_symbols": ["<sep>", "aee"], "max_sentencepiece_length": 8},
    "no prefix": LLAMA | {"add_dummy_prefix": False},
    "plain bpe": {"model_type": "bpe"},
    "unigram": LLAMA | {"model_type": "unigram"},
    "plain unigram": {"model_type": "unigram"},
}


def texts():
    """Nasty ones, random ones of letters that meet in merges, and prose."""
    rng = random.Random(0)
    letters = list("  aeethn sto\n.'é日😀▁x\t0")
    made = ["".join(rng.choice(letters) for _ in range(rng.randint(0, 30))) for _ in range(500)]
    return NASTY + made + prose()[:200]


def prose():
    paths = sorted(HELDOUT.glob("*.txt"))
    return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(name) -> (folder with tokenizer.model, sentencepiece's own processor)."""
    done = {}
    lines = prose()[:2000] + ["héllo wörld 日本語 😀 aaaa    bbbb"] * 20

    def train(name):
        if name not in done:
            raw = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=raw, vocab_size=700, minloglevel=2, **KINDS[name]
            )
            folder = tmp_path_factory.mktemp("spm")
            (folder / "tokenizer.model").write_bytes(raw.getvalue())
            done[name] = (folder, sentencepiece.SentencePieceProcessor(model_proto=raw.getvalue()))
        return done[name]

    return train


def settings(folder, tmp_path, **config):
    """A copy of the folder with a tokenizer_config.json."""
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


# --- SentencePiece ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_ids_and_text_are_those_of_sentencepiece(trained, tmp_path, name):
    folder, original = trained(name)
    tokenizer = load_tokenizer(settings(folder, tmp_path, add_bos_token=False))
    unknown = original.unk_id()
    for text in texts():
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids, text
        if unknown not in ids:
            assert tokenizer.decode(ids) == original.decode(ids), text
    assert tokenizer.size == original.vocab_size()


def test_what_a_model_file_says(trained):
    folder, original = trained("llama")
    pieces = read_pieces(folder / "tokenizer.model")
    count = original.vocab_size()
    assert pieces.texts == [original.id_to_piece(i) for i in range(count)]
    np.testing.assert_array_equal(np.float32(pieces.scores), np.float32([original.get_score(i) for i in range(count)]))
    assert [i for i, kind in enumerate(pieces.types) if kind == 6] == [i for i in range(count) if original.is_byte(i)]
    assert (pieces.kind, pieces.dummy_prefix, pieces.remove_extra_spaces, pieces.charsmap) == ("bpe", True, False, b"")
    assert (pieces.unknown_id, pieces.bos_id, pieces.eos_id) == (0, 1, 2)
    plain = read_pieces(trained("plain unigram")[0] / "tokenizer.model")
    assert plain.kind == "unigram" and plain.remove_extra_spaces and plain.charsmap


def test_llama_begins_with_bos_unless_the_config_says_no(trained, tmp_path):
    folder, original = trained("llama")
    ids = original.encode("hello")
    assert load_tokenizer(folder).encode("hello") == [1, *ids]
    assert load_tokenizer(folder).encode("hello", special=False) == ids
    assert load_tokenizer(folder).encode("") == [1]
    both = settings(folder, tmp_path, add_eos_token=True, tokenizer_class="LlamaTokenizer")
    assert load_tokenizer(both).encode("hello") == [1, *ids, 2]


def test_special_tokens_in_a_text_and_the_space_after_them(trained, tmp_path):
    folder, original = trained("llama")
    one = load_tokenizer(folder)
    ids = one.encode("<s>hello</s>", special=False)
    assert (ids[0], ids[-1], one.decode(ids)) == (1, 2, "hello")
    assert one.encode("<s>", special=False) == [1]
    old = load_tokenizer(settings(folder, tmp_path, legacy=True))
    assert old.encode("<s>hello", special=False) == [1, *original.encode("hello")]
    new = load_tokenizer(settings(folder, tmp_path, legacy=False))
    unprefixed = new.encode("<s>hello", special=False)
    assert unprefixed != old.encode("<s>hello", special=False)
    assert new._inner.decode(unprefixed) == "hello"


def test_streaming_pieces_makes_the_text(trained):
    tokenizer = load_tokenizer(trained("llama")[0])
    for text in texts()[:200]:
        ids = tokenizer.encode("x " + text)
        stream = tokenizer.stream(ids[:3])
        shown = tokenizer.decode(ids[:3]) + "".join(map(stream.push, ids[3:])) + stream.flush()
        assert shown == tokenizer.decode(ids)


def test_added_tokens_have_the_ids_they_are_given(trained, tmp_path):
    folder, original = trained("llama")
    count = original.vocab_size()
    table = {
        "1": {"content": "<s>", "special": True},
        str(count): {"content": "<|im_start|>", "special": True},
        str(count + 1): {"content": "<word>", "special": False, "lstrip": True},
    }
    tokenizer = load_tokenizer(settings(folder, tmp_path, added_tokens_decoder=table))
    assert tokenizer.size == count + 2
    assert tokenizer.encode("<|im_start|><word>", special=False) == [count, count + 1]
    assert tokenizer.decode([count, count + 1]) == "<word>"
    assert tokenizer.token_text(count) == "<|im_start|>" and tokenizer.token_text(count + 2) is None
    assert tokenizer.known_ids(count + 5).tolist() == [True] * (count + 2) + [False] * 3
    assert tokenizer.has_id(count + 1) and not tokenizer.has_id(count + 2)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<late>": count + 3}))
    with pytest.raises(ModelError, match="do not fit the 700 pieces"):
        load_tokenizer(tmp_path)
    table["5"] = {"content": "other"}
    (tmp_path / "added_tokens.json").unlink()
    with pytest.raises(ModelError, match="do not fit the 700 pieces"):
        load_tokenizer(settings(folder, tmp_path, added_tokens_decoder=table))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tokenizer_class": "T5Tokenizer"}, "of the class 'T5Tokenizer' is not supported"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder holds"),
        ({"added_tokens_decoder": {"700": 5}}, "added_tokens_decoder holds"),
    ],
)
def test_settings_that_make_no_sense(trained, tmp_path, config, words):
    with pytest.raises(ModelError) as caught:
        load_tokenizer(settings(trained("llama")[0], tmp_path, **config))
    assert words in str(caught.value)


def test_damaged_model_files(trained, tmp_path):
    """Never anything but a ModelError, whatever the bytes."""
    whole = (trained("llama")[0] / "tokenizer.model").read_bytes()
    path, rng = tmp_path / "tokenizer.model", random.Random(0)
    damaged = [b"", b"hello", b"\xff" * 40, whole[:-3], whole[:1000]]
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        damaged.append(bytes(raw))
    refused = 0
    for raw in damaged:
        path.write_bytes(raw)
        try:
            load_tokenizer(tmp_path)
        except ModelError:
            refused += 1
    assert refused > 10
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match="is missing or not a plain file"):
        load_tokenizer(tmp_path)


# --- GGUF ---------------------------------------------------------------------------------------------


def test_pieces_in_a_gguf(trained):
    """llama.cpp puts a space after special tokens too."""
    folder, original = trained("llama")
    pieces = read_pieces(folder / "tokenizer.model")
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces.texts, "[PAD700]", "[PAD701]"],
        "tokenizer.ggml.scores": np.float32([*pieces.scores, -1000, -1000]),
        "tokenizer.ggml.token_type": np.int32([*pieces.types, 5, 5]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = Tokenizer(from_gguf(metadata))
    for text in texts():
        assert tokenizer.encode(text) == [1, *original.encode(text)], text
    assert tokenizer.encode("<s>hello", special=False) == [1, *original.encode("hello")]
    assert tokenizer.size == 700  # padding is no token
    again = Tokenizer(HfTokenizer.from_str(tokenizer.to_json()))
    assert all(again.encode(text) == tokenizer.encode(text) for text in texts()[:100])
    for change, words in (
        ({"tokenizer.ggml.scores": None}, "scores must have a number for every token"),
        ({"tokenizer.ggml.token_type": np.int32([1])}, "token_type must have 702 entries, got 1"),
        ({"tokenizer.ggml.tokens": None}, "tokens must be a list"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
    ):
        with pytest.raises(ModelError, match=words):
            from_gguf(metadata | change)
    plain = Tokenizer(from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}))
    assert plain.encode("hello") == original.encode("hello")


@pytest.fixture(scope="session")
def byte_level():
    """A byte-level vocabulary with merges that would cross every border a splitter knows."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*prose()[:400], *["12345 6789 don't We'll x==y \n\n  a"] * 200], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.int32([3] + [1] * (len(tokens) - 1)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.mark.parametrize("pre", SPLITTERS)
def test_bytes_in_a_gguf_give_every_text_back(byte_level, pre):
    tokenizer = Tokenizer(from_gguf(byte_level | {"tokenizer.ggml.pre": pre}))
    bos = [0] if pre in ("llama-bpe", "llama3", "llama-v3") else []
    for text in texts():
        ids = tokenizer.encode(text)
        assert ids[: len(bos)] == bos
        assert tokenizer.decode(ids) == (text if pre != "qwen2" else text.replace("e\u0301", "é"))
    assert tokenizer.encode("<|end|>", special=False) == [0]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["don", "'t", " stop", " 12345", "!?", "\n\n", " x"]),
        ("smollm", ["don", "'t", " stop", " ", "1", "2", "3", "4", "5", "!?", "\n\n", " x"]),
        ("llama-bpe", ["don", "'t", " stop", " ", "123", "45", "!?\n\n", " x"]),
        ("qwen2", ["don", "'t", " stop", " ", "1", "2", "3", "4", "5", "!?\n\n", " x"]),
        ("default", ["don", "'", "t", " stop", " ", "123", "45", "!?", "\n\n", " x"]),
    ],
)
def test_where_a_splitter_cuts(byte_level, pre, words):
    inner = from_gguf(byte_level | {"tokenizer.ggml.pre": pre})
    text = "don't stop 12345!?\n\n x"
    cuts = [text[slice(*span)] for _, span in inner.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(cuts) == text
    assert cuts == words


def test_byte_level_kinds_that_are_not_known(byte_level):
    for change, words in (
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges must be a list of pairs"),
        ({"tokenizer.ggml.merges": None}, "merges must be a list of pairs"),
        ({"tokenizer.ggml.merges": ["nowhere found"]}, "tokenizer in the GGUF file is damaged"),
        ({"tokenizer.ggml.tokens": ["a"] * 901}, "token_type must have 901 entries"),
    ):
        with pytest.raises(ModelError, match=words):
            from_gguf(byte_level | change)


# --- real vocabularies --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.download
def test_a_published_vocabulary(tmp_path):
    """Mistral's first, out of the mistral-common wheel: 32,000 pieces with byte fallback."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", tmp_path, "mistral-common==1.13.1"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("tokenizer.model.v1"))
        raw = archive.read(name)
    (tmp_path / "tokenizer.model").write_bytes(raw)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    original = sentencepiece.SentencePieceProcessor(model_proto=raw)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == original.vocab_size() == 32_000
    for text in [*texts(), *prose()]:
        assert tokenizer.encode(text) == original.encode(text), text
        assert tokenizer.decode(original.encode(text)) == original.decode(original.encode(text)), text
