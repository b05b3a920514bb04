"""A byte-level BPE tokenizer trained on the corpus, and the corpus as token ids.

`<|endoftext|>` is id 0 and serves as bos, eos and padding. It stands before every document, nowhere else.
"""

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dynajax.errors import StorageError
from dynajax.training.corpus import documents_of

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
SPLITS = ("train", "heldout")


def text_files(corpus_dir: Path, split: str) -> list[Path]:
    """The text files of one split, by name; at least one."""
    paths = sorted((corpus_dir / split).glob("*.txt"))
    if not paths:
        raise StorageError(f"no text in {corpus_dir / split}: run scripts/build_corpus.py first")
    return paths


def train_tokenizer(corpus_dir: Path, out_dir: Path, vocab: int = 4096) -> Tokenizer:
    """Train on the train split and write tokenizer.json and tokenizer_config.json. Same texts, same file."""
    if not 257 <= vocab <= 65536:
        raise ValueError(f"vocab must be between 257 and 65536, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = (
        document
        for path in text_files(corpus_dir, "train")
        for document in documents_of(path.read_text(encoding="utf-8"))
    )
    tokenizer.train_from_iterator(documents, trainer)
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def encode_text(text: str, tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:  # [T]
    """The ids of a corpus text: <|endoftext|> before every document, paragraphs kept apart by their newlines."""
    ids = []
    for encoding in tokenizer.encode_batch(documents_of(text)):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.uint16)


def encode_corpus(corpus_dir: Path, tokenizer_file: Path) -> dict[str, dict[str, npt.NDArray[np.uint16]]]:
    """{"train": {source: ids [T]}, "heldout": {source: ids [T]}}, cached under tokens/.

    A cached array is used while it is newer than its text and the tokenizer file.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if tokenizer.get_vocab_size() > 65536 or tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise ValueError(f"{tokenizer_file} must have at most 65536 tokens and {END_OF_TEXT} as id {END_OF_TEXT_ID}")
    return {
        split: {
            path.stem: _encode_cached(path, cache_file(corpus_dir, split, path.stem), tokenizer_file, tokenizer)
            for path in text_files(corpus_dir, split)
        }
        for split in SPLITS
    }


def cache_file(corpus_dir: Path, split: str, source: str) -> Path:
    """tokens/<source>.npy for train, tokens/heldout/<source>.npy for held out."""
    folder = corpus_dir / "tokens"
    return (folder if split == "train" else folder / split) / f"{source}.npy"


def _encode_cached(text_file: Path, cache: Path, tokenizer_file: Path, tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    newest = max(text_file.stat().st_mtime_ns, tokenizer_file.stat().st_mtime_ns)
    if cache.exists() and cache.stat().st_mtime_ns > newest:
        return np.load(cache)
    ids = encode_text(text_file.read_text(encoding="utf-8"), tokenizer)
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(".partial.npy")
    np.save(partial, ids)
    os.replace(partial, cache)
    return ids
