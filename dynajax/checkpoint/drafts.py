"""Files and folders that are whole or not there: written under a hidden name beside the final one, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dynajax.checkpoint.wording import located
from dynajax.errors import StorageError, UsageError

DRAFT_SUFFIX = ".partial"


def own_mark() -> str:
    """Of this thread, among all that may write the same file at once."""
    return f"{os.getpid()}-{threading.get_ident()}"


@contextmanager
def draft_file(path: Path, needed_bytes: int) -> Generator[BinaryIO, None, None]:
    """A file beside `path` that takes its place if the block ends well: readers see the old one or the new one, whole.

    StorageError, which names `needed_bytes`, if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{own_mark()}.tmp")
    try:
        try:
            with draft.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"cannot write {located(path)} ({needed_bytes} bytes): {reason}") from error


def refuse_unwritable(path: Path) -> None:
    """StorageError, before hours of work, if `draft_file` could not write there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise StorageError(f"cannot write {located(path)}: there is no folder {located(folder)}")
    if path.is_dir():
        raise StorageError(f"cannot write {located(path)}: it is a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {located(path)}: the folder cannot be written")


@contextmanager
def draft_of(target: Path, needed_bytes: int) -> Generator[Path, None, None]:
    """An empty folder `.NAME.partial` beside `target`: becomes `target` if the block ends well, else is removed.

    What a killed run left there is removed first. UsageError: `target` exists and is not an empty folder, or
    another process is writing it. StorageError: fewer than `needed_bytes` are free, or writing fails.
    """
    target = target.absolute()
    draft = target.with_name(f".{target.name}{DRAFT_SUFFIX}")
    lock, moved = None, False
    try:
        _refuse_taken(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(draft, target)
        free = shutil.disk_usage(draft).free
        if free < needed_bytes:
            raise StorageError(f"{located(target)} needs {needed_bytes} bytes of disk, {free} are free: make room")
        yield draft
        _refuse_taken(target)
        draft.rename(target)
        moved = True
    except (UsageError, StorageError):
        raise
    except OSError as error:
        hint = ": make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        raise StorageError(f"cannot write {located(target)}: {error.strerror or error}{hint}") from error
    finally:
        if lock is not None:
            if not moved:
                shutil.rmtree(draft, ignore_errors=True)
            os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, such that half of it is never seen under its name."""
    if folder.is_dir():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _refuse_taken(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise UsageError(f"{located(target)} exists and is not a folder: name a new one")
    if next(target.iterdir(), None) is not None:
        raise UsageError(f"{located(target)} exists and is not empty: name a new folder, or remove it first")


def _claim(draft: Path, target: Path) -> int:
    """Make `draft` an empty folder that only this process writes; the file descriptor holds the claim."""
    draft.mkdir(exist_ok=True)
    lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in draft.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except BlockingIOError as error:
        os.close(lock)
        raise UsageError(f"another process is writing {located(target)}: wait for it to end") from error
    except BaseException:
        os.close(lock)
        raise
    return lock
