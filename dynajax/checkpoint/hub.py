"""Model repositories of the Hugging Face hub: listed, fetched into the hub's cache, found there without a network.

The cache is the one every hub tool shares (HF_HUB_CACHE): `models--USER--REPO/` with `blobs/HASH`, links to them in
`snapshots/COMMIT/`, and `refs/REVISION` holding a commit. huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynajax.checkpoint.aliases import did_you_mean
from dynajax.checkpoint.download import HubFile, download, is_whole, part_bytes
from dynajax.checkpoint.drafts import own_mark
from dynajax.checkpoint.hub_files import PICKLE_SUFFIX, SETTINGS_ONLY, Wanted
from dynajax.checkpoint.paths import is_plain_name
from dynajax.checkpoint.places import cache_folder
from dynajax.checkpoint.wording import listing, located, plain
from dynajax.errors import ModelError, StorageError

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
DEFAULT_REVISION = "main"
_REPO = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MIB = 2**20


class Unreachable(StorageError):
    """The network or the hub failed; a copy in the cache will do."""


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository at a revision, and its place in the cache."""

    name: str  # user/repo
    revision: str
    cache: Path

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def ref(self) -> Path:
        return self.folder / "refs" / self.revision

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def cached(self, wanted: Wanted) -> Path | None:
        """The snapshot of the revision as last seen, if it is complete."""
        try:
            commit = self.revision
            if not _COMMIT.fullmatch(commit):
                commit = self.ref.read_text(encoding="ascii").strip()
            folder = self.snapshot(commit)
            complete = bool(_COMMIT.fullmatch(commit)) and folder.is_dir() and wanted.is_complete(folder)
        except (OSError, ValueError):  # nothing there, a damaged index
            return None
        return folder if complete else None


def is_repo(name: str) -> bool:
    """Whether `name` can be user/repo[@revision]; nothing is looked up."""
    repo, at, revision = name.partition("@")
    plain_revision = bool(_REVISION.fullmatch(revision)) and not revision.endswith(".lock")
    return (
        bool(_REPO.fullmatch(repo)) and not re.search(r"--|\.\.|[.-](/|$)|\.git$", repo) and (not at or plain_revision)
    )


def snapshot_folder(name: str, wanted: Wanted, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The folder of user/repo[@revision] with the wanted files, every one of the listed size and hash.

    Offline, or with HF_HUB_OFFLINE, from the cache alone. If the hub fails a complete copy in the cache is used and
    one warning says so. A commit whose files are here is not looked up. ModelError: no such repository, revision or
    model, or access refused; StorageError: network, disk. What has come of a file stays for the next run.
    """
    from huggingface_hub import constants

    repo_name, _, revision = name.partition("@")
    repo = Repo(repo_name, revision or DEFAULT_REVISION, Path(constants.HF_HUB_CACHE))
    cached = repo.cached(wanted)
    if cached is not None and (offline or constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(repo.revision)):
        return cached
    if offline or constants.HF_HUB_OFFLINE:
        why = "--offline" if offline else "HF_HUB_OFFLINE"
        raise ModelError(f"{name} is not complete in {located(repo.cache)} and {why} is set: run once without it")
    try:
        with _explained(repo, cached):
            return _fetch(repo, wanted, progress or (lambda stage, done, total: None))
    except Unreachable as error:
        if cached is None:
            raise
        log.warning("%s; the copy of %s in the cache is used", error, name)
        return cached


def drop_damaged(snapshot: Path) -> list[str]:
    """Remove the files of a snapshot whose content is not what their blob is named after; -> their names.

    What is no link to a blob of the repository cannot be checked: it is removed too. The next run fetches it again.
    """
    blobs, dropped = (snapshot.parent.parent / "blobs").resolve(), []
    for path in sorted(snapshot.iterdir()):
        blob = path.resolve()
        is_blob = path.is_symlink() and blob.parent == blobs and bool(_DIGEST.fullmatch(blob.name))
        if is_blob and blob.is_file() and is_whole(blob, blob.name):
            continue
        path.unlink()
        if is_blob:
            blob.unlink(missing_ok=True)
        dropped.append(path.name)
    return dropped


def _fetch(repo: Repo, wanted: Wanted, progress: Progress) -> Path:
    commit, files = _listed(repo)
    snapshot, blobs = repo.snapshot(commit), repo.folder / "blobs"
    snapshot.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(exist_ok=True)
    try:
        for names in wanted.stages(files, snapshot):
            stage = [files[name] for name in names if not _is_here(snapshot / name, files[name].size)]
            _fetch_stage(repo, commit, stage, progress)
    except ModelError as error:
        raise ModelError(f"{repo.name}: {error}") from error
    if wanted is not SETTINGS_ONLY or not repo.ref.exists():  # a config alone must not hide an older whole model
        _write_ref(repo, commit)
    return snapshot


def _listed(repo: Repo) -> tuple[str, dict[str, HubFile]]:
    """(commit, files by name), from one request. Only plain names: what lies in folders is never needed."""
    from huggingface_hub import HfApi, constants

    api = HfApi(library_name="dynajax")
    try:
        info = api.model_info(
            repo.name, revision=repo.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # an answer, but not that of a hub
        if isinstance(error, OSError):
            raise
        reason = plain(" ".join(f"{type(error).__name__}: {error}".split()))
        raise Unreachable(f"{constants.ENDPOINT} does not answer as a Hugging Face hub does ({reason})") from error
    files = {}
    for sibling in info.siblings or []:
        if is_plain_name(sibling.rfilename):
            digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
            size = sibling.size if sibling.lfs is None else sibling.lfs.size
            if not isinstance(size, int) or size < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise StorageError(f"{constants.ENDPOINT} lists {plain(sibling.rfilename)} without size or hash")
            files[sibling.rfilename] = HubFile(sibling.rfilename, size, digest)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise StorageError(f"{constants.ENDPOINT} names no commit for {repo.name}")
    return info.sha, files


def _fetch_stage(repo: Repo, commit: str, files: list[HubFile], progress: Progress) -> None:
    """Download what is missing of these and link it into the snapshot."""
    from huggingface_hub import hf_hub_url

    blobs, total = repo.folder / "blobs", sum(file.size for file in files)
    _make_room(repo, files, total - sum(part_bytes(file, blobs) for file in files))
    done, total_mib = 0, -(-total // _MIB)

    def moved(count: int) -> None:
        nonlocal done
        done += count
        if total >= _MIB:
            progress("download", min(done // _MIB, total_mib - 1), total_mib)

    for file in files:
        url = hf_hub_url(repo.name, file.name, revision=commit)
        blob = download(file, url, blobs, moved)
        _link(blob, repo.snapshot(commit) / file.name)
    if total >= _MIB:
        progress("download", total_mib, total_mib)


def _make_room(repo: Repo, files: list[HubFile], missing_bytes: int) -> None:
    """Refuse what cannot fit; say what will be downloaded. Pickles need their size again for the conversion."""
    pickles = sum(file.size for file in files if file.name.endswith(PICKLE_SUFFIX))
    here, there = _existing(repo.folder), _existing(cache_folder())
    same_disk = here.stat().st_dev == there.stat().st_dev
    needs = [(here, missing_bytes + (pickles if same_disk else 0)), (there, 0 if same_disk else pickles)]
    for place, needed in needs:
        free = shutil.disk_usage(place).free
        if needed > free:
            also = ", its conversion included" if pickles else ""
            raise StorageError(
                f"{repo.name} needs {needed} bytes ({_size(needed)}){also} in {located(place)}, {free} bytes "
                f"({_size(free)}) are free: make room, or set {'HF_HOME' if place == here else 'DYNAJAX_CACHE'}"
            )
    if missing_bytes >= _MIB:
        names, free = listing(file.name for file in files), shutil.disk_usage(here).free
        log.info(
            "downloading %s@%s: %s; %s (%d bytes) to %s, where %s are free",
            *(repo.name, repo.revision, names, _size(missing_bytes), missing_bytes, located(repo.folder), _size(free)),
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / _MIB:.1f} MiB"


def _is_here(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _link(blob: Path, path: Path) -> None:
    """The snapshot's name for a blob; on a file system without links the blob itself."""
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(Path("..", "..", "blobs", blob.name))
    except FileExistsError:  # another process, the same link
        return
    except OSError:
        blob.replace(path)


def _write_ref(repo: Repo, commit: str) -> None:
    if _COMMIT.fullmatch(repo.revision):
        return
    repo.ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = repo.ref.with_name(f"{repo.ref.name}.{own_mark()}.tmp")
    fresh.write_text(commit, encoding="ascii")
    fresh.replace(repo.ref)


@contextmanager
def _explained(repo: Repo, cached: Path | None) -> Generator[None]:
    """What the hub and the disk raise, as errors with a remedy. DynajaxErrors and signals pass."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except (ModelError, StorageError):
        raise
    except HfHubHTTPError as error:
        raise _refused(error, repo, cached) from error
    except HTTPError as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Unreachable(
            f"cannot download {repo.name} from {constants.ENDPOINT} ({plain(reason)}): check the network and "
            "run again, the download resumes"
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room and run again, the download resumes" if full else "check the folder, or set HF_HOME"
        reason = f"cannot write {repo.name} to {located(repo.cache)}: {error.strerror or error}"
        raise StorageError(f"{reason}: {remedy}") from error


def _refused(error: Exception, repo: Repo, cached: Path | None) -> ModelError | StorageError:
    """What an error status of the hub means for who typed the name."""
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    page = f"{constants.ENDPOINT}/{repo.name}"
    rest = "; the copy in the cache runs with --offline" if cached else ""
    match error:
        case errors.GatedRepoError():
            return ModelError(
                f"{repo.name} is gated: accept its licence on {page}, then set HF_TOKEN to a token of yours{rest}"
            )
        case errors.RevisionNotFoundError():
            return ModelError(f"{repo.name} has no revision {plain(repo.revision)}: name a branch, a tag or a commit")
        case errors.RepositoryNotFoundError():
            return ModelError(
                f"no model {repo.name} on the hub, nor a folder of that name; if it is private or gated, set HF_TOKEN "
                f"to a token that may read it{did_you_mean(repo.name)}{rest}"
            )
    if status in (401, 403):
        return ModelError(
            f"the hub refuses access to {repo.name} ({status}): accept its licence on {page} if it has one, and set "
            f"HF_TOKEN to a valid token{rest}"
        )
    if status == 429 or status >= 500:
        return Unreachable(f"the hub cannot serve {repo.name} now ({status}): run again, the download resumes")
    return ModelError(f"the hub does not serve {repo.name} ({status}){rest}")
