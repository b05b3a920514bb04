"""The corpus and its tokenizer, on small made-up inputs; only the slow test touches a network."""

import gzip
import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dynajax.errors import StorageError
from dynajax.training import corpus, tokenizer

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "heldout"


def r_strings(*strings: str | None) -> bytes:
    """An R character vector as `serialize` writes it; None is NA."""
    data = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for string in strings:
        raw = b"" if string is None else string.encode()
        data += struct.pack(">ii", 0x40009, -1 if string is None else len(raw)) + raw
    return data


def r_block(*strings: str | None) -> bytes:
    data = r_strings(*strings)
    return struct.pack(">I", len(data)) + zlib.compress(data)


# --- text ---------------------------------------------------------------------------------------------


def test_clean_makes_quotes_and_spaces_plain():
    assert corpus.clean("  “It’s—well…\n   odd–ly”\t") == '"It\'s--well... odd-ly"'
    assert corpus.clean("  one \n\n    two  x", keep_lines=True) == "one\ntwo x"


def test_blocks_keep_the_indentation_of_their_first_line():
    assert corpus.blocks("\n\nprose\nmore\n \t\n    verse\n    verse\n\n\n\nend\n") == [
        "prose\nmore",
        "    verse\n    verse",
        "end\n",
    ]


def test_join_and_documents_of_are_inverse():
    documents = [["CHAPTER I", "one\nverse", "two"], ["CHAPTER II", "three"]]
    read_back = [document.split("\n\n") for document in corpus.documents_of(corpus.join(documents) + "\n")]
    assert read_back == documents


def test_gather_opens_a_document_at_the_first_of_several_headings():
    paragraphs = ["VOLUME I", "CHAPTER I", "a", "b", "CHAPTER II", "c"]
    assert corpus.gather(paragraphs, str.isupper) == [["VOLUME I", "CHAPTER I", "a", "b"], ["CHAPTER II", "c"]]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_split_tail_holds_out_the_end_at_a_paragraph(share):
    rng = np.random.default_rng(int(share * 100))
    documents: corpus.Documents = [
        ["x" * int(rng.integers(1, 40)) for _ in range(int(rng.integers(1, 9)))] for _ in range(60)
    ]
    text = corpus.join(documents)
    train, heldout = corpus.split_tail(text, share)
    assert text.startswith(train) and text.endswith(heldout)
    assert text[len(train) : -len(heldout)].strip("\n") == "" and len(text) - len(train) - len(heldout) in (2, 3)
    assert 0 <= len(heldout) + 3 - share * len(text) <= 40 + 3  # never less than the share, by at most a paragraph


def test_split_tail_refuses_what_it_cannot_split():
    with pytest.raises(ValueError, match="paragraph boundary"):
        corpus.split_tail("one paragraph only")
    with pytest.raises(ValueError, match="share must be between 0 and 1, got 1.5"):
        corpus.split_tail("a\n\nb", 1.5)


# --- extractors ---------------------------------------------------------------------------------------


def test_austen_reads_every_novel_of_the_database():
    database = r_block("EMMA", "", "CHAPTER I", "", "She _was_", "rich.", None, "Very.", "", "CHAPTER II", "", "So.")
    database += r_block("PERSUASION", "", "Chapter 1", "", "Sir Walter.")
    assert corpus.extract_austen({"data/Rdata.rdb": database}) == [
        ["EMMA"],
        ["CHAPTER I", "She was rich.", "Very."],
        ["CHAPTER II", "So."],
        ["PERSUASION"],
        ["Chapter 1", "Sir Walter."],
    ]


def test_r_strings_of_another_version_are_refused():
    with pytest.raises(ValueError, match="XDR version 3, got b'X.n' version 2"):
        corpus.read_r_strings(b"X\n" + struct.pack(">iiii", 2, 0, 0, 0))


def test_moby_dick_is_in_the_order_of_the_book():
    names = ["epilogue", "chapter_10", "chapter_2", "extracts", "etymology"]
    documents = corpus.extract_moby_dick({f"data/{name}.txt": f"{name}\n\ntext\n".encode() for name in names})
    assert [heading for heading, _text in documents] == ["etymology", "extracts", "chapter_2", "chapter_10", "epilogue"]


def test_speeches_get_paragraphs_that_end_with_a_sentence():
    sentence = "We met Mr. Speaker in the year 1790. And then we went on working for the people of this land."
    speeches = {
        f"data/{year}_a.json": json.dumps({"text": " ".join([sentence] * 30)}).encode() for year in (1791, 1790)
    }
    documents = corpus.extract_sotu(speeches)
    assert len(documents) == 2
    for paragraphs in documents:
        assert len(paragraphs) > 2 and " ".join(paragraphs) == " ".join([sentence] * 30)
        assert all(paragraph.endswith("land.") for paragraph in paragraphs)
        assert all(len(paragraph) > 800 for paragraph in paragraphs[:-1])


OSIS = """<div canonical="true" osisID="Ruth" sID="gen1" type="book"/> <title level="1" type="main">Ruth</title>
<div sID="gen2" type="x-p"/><chapter n="1" osisID="Ruth.1" sID="Ruth.1"/><w lemma="strong:H1">In</w> <w>days</w>,<note
placement="foot"><reference>1:1</reference>a note</note><w>he</w> said, <div eID="gen2" type="x-p"/><lg sID="gen3"/>
<l level="1" sID="gen4"/>“Go,<l eID="gen4" level="1"/> <l level="2" sID="gen5"/>go .”<l eID="gen5" level="2"/>
<lg eID="gen3"/><chapter eID="Ruth.1"/><chapter n="2" osisID="Ruth.2" sID="Ruth.2"/>Naomi had a kinsman."""
RUTH = [["Ruth", "In days, he said,", '"Go,\ngo."'], ["Naomi had a kinsman."]]


def test_osis_becomes_chapters_without_notes_and_verse_keeps_its_lines():
    assert corpus.documents_of_osis(OSIS) == RUTH


def test_bible_is_read_from_its_blocks_old_testament_first():
    packed = zlib.compress(OSIS.encode())
    old = {"m/ot.bzs": struct.pack("<6I", 0, 0, 0, 0, len(packed), len(OSIS)), "m/ot.bzz": packed}
    new = {"m/nt.bzs": b"", "m/nt.bzz": b""}
    assert corpus.extract_web_bible({**new, **old}) == RUTH


JARGON = """                          The Jargon File

   Table of Contents

   I. Introduction

                             Part I. Introduction

   Table of Contents

   1. Slang

Chapter 1. Slang

   Table of Contents

   Verbs

   This document is a collection of slang terms used by some subcultures of
   hackers, see {kluge}.

     x = 1;
     y = 2;

      if (x)
      done;

   ┌───┐
   │ a │
   └───┘

  A

   abbrev

   :abbrev: /@·breev'/, n.

   Short.

  B

   B

   bug

   :bug report: n.

   A thing.
"""


def test_jargon_keeps_prose_and_entries_but_no_contents_and_no_tables():
    documents = corpus.extract_jargon(
        {"jargon.txt.gz": gzip.compress(JARGON.replace("Part I. ", "Part I.\u00a0").encode())}
    )
    prose = "This document is a collection of slang terms used by some subcultures of hackers, see kluge."
    assert documents == [
        ["Part I. Introduction", "Chapter 1. Slang", prose, "x = 1; y = 2;", "if (x)\ndone;"],
        ["A", "abbrev: /@·breev'/, n.", "Short."],
        ["B", "bug report: n.", "A thing."],
    ]


DEVIL = """header
                              PREFACE

_The Dictionary_ was begun
in 1881.
    Meantime, more.

ABASEMENT, n.  A decent
attitude.

    Poor Isabella
    Set all tongues.
                          G.J.

BACK, n.  That part.

 abcdef
"""


def test_devils_dictionary_tells_verse_from_indented_paragraphs():
    documents = corpus.extract_devils_dictionary({"devil.dict.dz": gzip.compress(DEVIL.encode())})
    assert documents == [
        ["PREFACE", "The Dictionary was begun in 1881.", "Meantime, more."],
        ["ABASEMENT, n. A decent attitude.", "Poor Isabella\nSet all tongues.\nG.J."],
        ["BACK, n. That part."],
    ]


# --- archives and the folder --------------------------------------------------------------------------


def test_archive_with_another_hash_is_refused(tmp_path):
    path = tmp_path / "a.deb"
    path.write_bytes(b"text")
    corpus.check_sha256(path, hashlib.sha256(b"text").hexdigest())
    with pytest.raises(StorageError, match=f"sha256 of a.deb must be {'0' * 64}, got "):
        corpus.check_sha256(path, "0" * 64)


def test_package_that_is_not_found_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 100, stdout="", stderr="E: Version not found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        StorageError, match=r"^package a 1\.0 not found by apt-get: run `apt-get update` as root[^\n]*$"
    ):
        corpus.fetch(corpus.Archive("apt", "a", "1.0", ""), tmp_path)


@pytest.fixture
def two_sources(monkeypatch):
    """Sources whose archives are plain text files made on the spot."""

    def fetch(archive, into):
        path = into / f"{archive.package}.txt"
        path.write_text("\n\n".join(f"{archive.package} paragraph {i}" for i in range(200)))
        return path

    def extract(files):
        (data,) = files.values()
        paragraphs = corpus.blocks(data.decode())
        return [paragraphs[at : at + 20] for at in range(0, len(paragraphs), 20)]

    monkeypatch.setattr(corpus, "fetch", fetch)
    monkeypatch.setattr(corpus, "read_members", lambda path, wanted: {path.name: path.read_bytes()})
    return tuple(corpus.Source(name, corpus.Archive("apt", name, "1", "0"), "", extract, "PD") for name in ("a", "b"))


def test_build_writes_both_splits_and_a_manifest_and_replaces_an_old_corpus(tmp_path, two_sources):
    out = tmp_path / "corpus"
    manifest = corpus.build(out, two_sources)
    assert json.loads((out / "manifest.json").read_text()) == manifest
    for name in ("a", "b"):
        train, heldout = ((out / side / f"{name}.txt").read_text() for side in ("train", "heldout"))
        assert train.endswith(f"{name} paragraph 195\n") and heldout.startswith(f"{name} paragraph 196\n")
        assert (manifest[name]["train_bytes"], manifest[name]["heldout_bytes"]) == (len(train), len(heldout))
    (out / "tokens").mkdir()
    assert corpus.build(out, two_sources) == manifest
    assert sorted(path.name for path in out.iterdir()) == ["heldout", "manifest.json", "train"]


def test_build_that_fails_leaves_nothing_and_keeps_the_old_corpus(tmp_path, two_sources):
    def broken(files):
        raise StorageError("broken")

    out = tmp_path / "corpus"
    corpus.build(out, two_sources[:1])
    before = sorted(tmp_path.rglob("*"))
    bad = corpus.Source("b", two_sources[1].archive, "", broken, "PD")
    with pytest.raises(StorageError, match="broken"):
        corpus.build(out, (two_sources[0], bad))
    assert sorted(tmp_path.rglob("*")) == before


def test_build_does_not_replace_a_folder_that_is_no_corpus(tmp_path, two_sources):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(StorageError, match="exists and is not a corpus"):
        corpus.build(tmp_path, two_sources)


def test_sample_takes_equal_shares_from_the_start_of_the_heldout_files(tmp_path, two_sources):
    with pytest.raises(StorageError, match="build the corpus first"):
        corpus.write_sample(tmp_path / "corpus", tmp_path / "sample")
    corpus.build(tmp_path / "corpus", two_sources)
    sizes = corpus.write_sample(tmp_path / "corpus", tmp_path / "sample", total_bytes=80)
    assert (tmp_path / "sample" / "a.txt").read_text() == "a paragraph 196\n\na paragraph 197\n"
    assert sizes == {"a": 33, "b": 33}


def test_committed_sample_is_there_and_small():
    paths = {path.stem: path for path in SAMPLE.glob("*.txt")}
    assert sorted(paths) == sorted(source.name for source in corpus.SOURCES)
    assert all(path.stat().st_size > 5_000 for path in paths.values())
    assert sum(path.stat().st_size for path in paths.values()) <= 220_000
    for path in paths.values():
        text = path.read_text(encoding="utf-8")
        assert not set("\u2018\u2019\u201c\u201d\u2014\t\f\u00a0") & set(text)
        assert text.endswith("\n") and not text.endswith("\n\n") and "\n\n\n\n" not in text


def test_script_ends_with_one_line_and_exit_code_6_when_there_is_no_corpus(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "build_corpus.py", "--out", tmp_path / "none", "--sample", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (6, "", 1)
    assert done.stderr.startswith("error: no held-out text in ")


# --- tokenizer ----------------------------------------------------------------------------------------


def test_training_the_tokenizer_twice_gives_the_same_file(tmp_path, two_sources):
    corpus.build(tmp_path / "corpus", two_sources)
    files = []
    for name in ("one", "two"):
        tokenizer.train_tokenizer(tmp_path / "corpus", tmp_path / name, vocab=280)
        files.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert files[0] == files[1]
    with pytest.raises(ValueError, match="vocab must be between 257 and 65536, got 100"):
        tokenizer.train_tokenizer(tmp_path / "corpus", tmp_path / "three", vocab=100)


def test_encoded_corpus_marks_documents_and_gives_the_text_back(tmp_path, two_sources):
    folder = tmp_path / "corpus"
    corpus.build(folder, two_sources)
    trained = tokenizer.train_tokenizer(folder, tmp_path / "model", vocab=280)
    ids = tokenizer.encode_corpus(folder, tmp_path / "model" / "tokenizer.json")
    assert {split: sorted(streams) for split, streams in ids.items()} == {"train": ["a", "b"], "heldout": ["a", "b"]}
    for split, streams in ids.items():
        for name, stream in streams.items():
            assert stream.dtype == np.uint16 and stream[0] == 0
            documents = corpus.documents_of((folder / split / f"{name}.txt").read_text())
            starts = np.flatnonzero(stream == 0)
            assert [trained.decode(part[1:].tolist()) for part in np.split(stream, starts)[1:]] == documents
            assert np.array_equal(np.load(tokenizer.cache_file(folder, split, name)), stream)


def test_encoded_corpus_is_read_from_its_cache_until_the_text_changes(tmp_path, two_sources):
    folder, model = tmp_path / "corpus", tmp_path / "model"
    corpus.build(folder, two_sources)
    tokenizer.train_tokenizer(folder, model, vocab=280)
    first = tokenizer.encode_corpus(folder, model / "tokenizer.json")["heldout"]["a"]
    for path in (folder / "heldout" / "a.txt", model / "tokenizer.json"):
        os.utime(path, (0, 0))
    np.save(tokenizer.cache_file(folder, "heldout", "a"), first[:3])
    assert len(tokenizer.encode_corpus(folder, model / "tokenizer.json")["heldout"]["a"]) == 3
    (folder / "heldout" / "a.txt").write_text("other text\n")
    assert len(tokenizer.encode_corpus(folder, model / "tokenizer.json")["heldout"]["a"]) > 3


def test_missing_corpus_names_the_script(tmp_path):
    with pytest.raises(StorageError, match="run scripts/build_corpus.py first"):
        tokenizer.train_tokenizer(tmp_path, tmp_path / "model")


def test_shipped_tokenizer_loads_with_transformers():
    transformers = pytest.importorskip("transformers")
    shipped = transformers.AutoTokenizer.from_pretrained(ROOT / "dynajax" / "assets" / "tiny-relullama")
    assert (len(shipped), shipped.bos_token_id, shipped.eos_token_id, shipped.pad_token_id) == (4096, 0, 0, 0)
    text = 'Once upon a time,\n\n"héllo" 日本 123  x'
    assert shipped.decode(shipped(text).input_ids) == text


@pytest.mark.slow
@pytest.mark.download
def test_real_sources_give_the_committed_sample(tmp_path):
    """Downloads 45 MB with apt-get and npm; run `apt-get update` first."""
    manifest = corpus.build(tmp_path / "corpus")
    sizes = {name: entry["train_bytes"] + entry["heldout_bytes"] for name, entry in manifest.items()}
    assert sum(sizes.values()) == 22_706_390
    sample = corpus.write_sample(tmp_path / "corpus", tmp_path / "sample")
    assert sorted(sample) == sorted(sizes)
    for name in sample:
        assert (tmp_path / "sample" / f"{name}.txt").read_bytes() == (SAMPLE / f"{name}.txt").read_bytes()
