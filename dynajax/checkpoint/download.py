"""One file from the hub into the hub's own cache, such that an interrupted download goes on where it stopped.

huggingface_hub writes to a file with a random name and deletes it when a download fails; with shards of 10 GB that is
not good enough. Here the part that came stays as `blobs/HASH.incomplete`, whatever ended the program, and the next
run asks for the rest. The finished file must have the hash that the hub listed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dynajax.checkpoint.wording import plain
from dynajax.errors import StorageError

RETRY_S = (1.0, 2.0, 4.0, 8.0)  # waits between attempts that bring no byte; then the download fails
POLL_S = 0.2
_READ_BYTES = 2**22
_TRANSIENT = (408, 416, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub lists it. digest: 64 hex digits of SHA-256, or the 40 of a git blob."""

    name: str
    size: int
    digest: str


def download(file: HubFile, url: str, blobs: Path, moved: Callable[[int], None]) -> Path:
    """The file's blob, complete and with the right hash; taken as it is if it is there.

    moved(bytes) tells of every piece, those of an earlier run too; it is also called with 0 while waiting, and may
    raise to end the download. Raises StorageError for wrong content, the hub's errors as they are, OSError.
    """
    blob, partial = blobs / file.digest, blobs / f"{file.digest}.incomplete"
    if blob.is_file() and blob.stat().st_size == file.size:
        moved(file.size)
        return blob
    with partial.open("a+b") as out, _sole_writer(out, lambda: moved(0)):
        if blob.is_file() and blob.stat().st_size == file.size:  # another process was faster
            partial.unlink(missing_ok=True)
            moved(file.size)
            return blob
        part = _Part(out, file, moved)
        _complete(part, url)
        if part.digest() != file.digest:
            partial.unlink()
            raise StorageError(f"{plain(file.name)} arrived damaged, its hash is not the one listed: run again")
        out.flush()
        os.fsync(out.fileno())
        partial.replace(blob)
    return blob


def part_bytes(file: HubFile, blobs: Path) -> int:
    """How many bytes of the file are here already."""
    for path in (blobs / file.digest, blobs / f"{file.digest}.incomplete"):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def is_whole(path: Path, digest: str) -> bool:
    """Whether the file's content has this digest. Reads all of it."""
    content = _new_hash(digest, path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            content.update(chunk)
    return content.hexdigest() == digest


def _new_hash(digest: str, size: int) -> hashlib._Hash:
    """Of the kind that `digest` is, for a file of this size; git names a file by its size and content."""
    if len(digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


class _Part:
    """What is here of a file: grows at its end and knows its hash."""

    def __init__(self, out: BinaryIO, file: HubFile, moved: Callable[[int], None]):
        self.file, self.size = file, 0
        self._out, self._moved = out, moved
        self._begin()
        if os.fstat(out.fileno()).st_size > file.size:
            self.clear()
        out.seek(0)
        while chunk := out.read(_READ_BYTES):
            self._count(chunk)

    def _begin(self) -> None:
        self._hash = _new_hash(self.file.digest, self.file.size)

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.size += len(chunk)
        self._moved(len(chunk))

    def add(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self.file.size:
            raise StorageError(f"{plain(self.file.name)}: more came than the {self.file.size} bytes listed: run again")
        self._out.write(chunk)
        self._count(chunk)

    def clear(self) -> None:
        self._out.truncate(0)
        self._moved(-self.size)
        self.size = 0
        self._begin()

    def wait(self, seconds: float) -> None:
        self._out.flush()
        self._moved(0)
        time.sleep(seconds)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _complete(part: _Part, url: str) -> None:
    """Connect and read until all is here; give up when several connections in a row brought nothing."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    waits = iter(RETRY_S)
    while part.size < part.file.size:
        before, failure = part.size, None
        try:
            _read_on(part, url)
        except HfHubHTTPError as error:
            if error.response.status_code not in _TRANSIENT:
                raise
            failure = error
        except HTTPError as error:
            failure = error
        if part.size > before:
            waits = iter(RETRY_S)
        elif (seconds := next(waits, None)) is not None:
            part.wait(seconds)
        elif failure is not None:
            raise failure
        else:
            raise StorageError(
                f"{plain(part.file.name)}: {part.size} bytes came and {part.file.size} are listed: run again"
            )


def _read_on(part: _Part, url: str) -> None:
    """One request for what is missing. The client drops the token where the hub redirects to another host."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = {**build_hf_headers(library_name="dynajax"), "Accept-Encoding": "identity"}
    if part.size:
        headers["Range"] = f"bytes={part.size}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        if response.status_code >= 400:
            response.read()
        if response.status_code == 416:
            part.clear()
        hf_raise_for_status(response)
        if part.size and not response.headers.get("Content-Range", "").startswith(f"bytes {part.size}-"):
            part.clear()  # the whole file comes, or another part than was asked for
        for chunk in response.iter_bytes():
            part.add(chunk)


@contextmanager
def _sole_writer(out: BinaryIO, waiting: Callable[[], None]) -> Generator[None]:
    """Hold the file's lock. Where the file system has none, two writers are found out by the hash."""
    while True:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            time.sleep(POLL_S)
            continue
        except OSError:
            pass
        break
    yield
