"""A hub on this machine: what a client needs to list and download model folders, and the troubles a hub can have.

with HubServer({"user/repo": folder}) as hub: ...   # hub.url is the endpoint
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "maker/some-model"  # what the tests call theirs
PIECE_BYTES = 2**14


@dataclass
class Trouble:
    """What goes wrong from now on; the defaults are a good day."""

    cut_after: int | None = None  # bytes of a file's body, then the connection ends; counted per response
    cuts: int = 10**9  # how often
    bytes_per_s: int | None = None
    api_status: int | None = None  # instead of a listing
    file_status: int | None = None  # instead of a file
    headers: dict[str, str] = field(default_factory=dict)  # of these two
    ignore_range: bool = False
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)  # file name -> what its listing says otherwise
    flip: str | None = None  # this file's last byte is wrong


@dataclass
class Seen:
    """One request for a file."""

    path: str
    start: int  # first byte asked for
    sent: int = 0
    token: str | None = None


class HubServer:
    """Serves folders as repositories; every revision in `revisions` is another folder (`main` is the first)."""

    def __init__(self, repos: Mapping[str, Path | Mapping[str, Path]], large_bytes: int = 2**12):
        self._repos = {name: {"main": r} if isinstance(r, Path) else dict(r) for name, r in repos.items()}
        self._large_bytes = large_bytes  # files of this size and more are listed with a SHA-256, as LFS files are
        self.trouble, self.listings, self.files = Trouble(), 0, list[Seen]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server._answer(self, body=True)

            def do_HEAD(self):
                server._answer(self, body=False)

            def log_message(self, format, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="hub")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def requests(self) -> int:
        return self.listings + len(self.files)

    def sent(self, name: str = "") -> int:
        """Bytes of files' bodies that went out, of one file or of all."""
        return sum(seen.sent for seen in self.files if seen.path.endswith(name))

    def forget(self) -> None:
        self.listings, self.files = 0, []

    def commit(self, repo: str, revision: str = "main") -> str:
        """The 40 digits that stand for a revision."""
        if revision not in self._repos[repo]:  # a commit itself
            return next((c for r in self._repos[repo] if (c := self.commit(repo, r)) == revision), "")
        folder = self._repos[repo][revision]
        state = [(path.name, self.digest(path)) for path in sorted(folder.iterdir())]
        return hashlib.sha1(repr(state).encode()).hexdigest()

    def _folder(self, repo: str, revision: str) -> Path | None:
        revisions = self._repos.get(repo, {})
        return next((f for r, f in revisions.items() if revision in (r, self.commit(repo, r))), None)

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(request.path).path.split("/")[1:]]
        if parts[:2] == ["api", "models"] and len(parts) in (4, 6):
            self._list(request, "/".join(parts[2:4]), parts[5] if len(parts) == 6 else "main")
        elif len(parts) == 5 and parts[2] == "resolve":
            self._file(request, "/".join(parts[:2]), parts[3], parts[4], body=body)
        else:
            self._status(request, 404, {})

    def _list(self, request: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        self.listings += 1
        if self.trouble.api_status:
            return self._status(request, self.trouble.api_status, self.trouble.headers)
        if repo not in self._repos:
            return self._status(request, 401, {"X-Error-Code": "RepoNotFound"})
        folder = self._folder(repo, revision)
        if folder is None:
            return self._status(request, 404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [self._sibling(path) for path in sorted(folder.iterdir())]
        siblings += [{"rfilename": name, **said} for name, said in self.trouble.listed.items() if "size" in said]
        value = {"id": repo, "modelId": repo, "sha": self.commit(repo, revision), "siblings": siblings}
        return self._send(request, 200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _sibling(self, path: Path) -> dict[str, Any]:
        content, digest = path.read_bytes(), self.digest(path)
        entry = {"rfilename": path.name, "size": len(content), "blobId": digest}
        if len(digest) == 64:
            entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 130}
        return entry

    def digest(self, path: Path) -> str:
        """As the hub names a file: SHA-256 for large ones, the git blob for others."""
        content = path.read_bytes()
        if len(content) >= self._large_bytes:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def _file(self, request: BaseHTTPRequestHandler, repo: str, revision: str, name: str, *, body: bool) -> None:
        asked = request.headers.get("Range")
        start = 0 if asked is None or self.trouble.ignore_range else int(asked.split("=")[1].rstrip("-"))
        seen = Seen(f"{repo}/{name}", start, token=request.headers.get("Authorization"))
        self.files.append(seen)
        if self.trouble.file_status:
            return self._status(request, self.trouble.file_status, self.trouble.headers)
        folder = self._folder(repo, revision)
        if folder is None or not (folder / name).is_file():
            return self._status(request, 404, {"X-Error-Code": "EntryNotFound"})
        content = (folder / name).read_bytes()
        headers = {"ETag": f'"{self.digest(folder / name)}"', "X-Repo-Commit": self.commit(repo, revision)}
        headers["Accept-Ranges"] = "bytes"
        if self.trouble.flip == name:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(request, 206 if start else 200, headers, content[start:], seen if body else None)

    def _send(self, request, status: int, headers: dict[str, str], content: bytes, seen: Seen | None = None) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(key, value)
        request.end_headers()
        if seen is None:
            if request.command == "GET":
                request.wfile.write(content)
            return
        cut = self.trouble.cut_after if self.trouble.cuts > 0 else None
        allowed = content if cut is None else content[:cut]
        for begin in range(0, len(allowed), PIECE_BYTES):
            piece = allowed[begin : begin + PIECE_BYTES]
            try:
                request.wfile.write(piece)
            except OSError:  # the client has gone
                request.close_connection = True
                return
            seen.sent += len(piece)
            if self.trouble.bytes_per_s:
                time.sleep(len(piece) / self.trouble.bytes_per_s)
        if len(allowed) < len(content):
            self.trouble.cuts -= 1
            request.close_connection = True

    def _status(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str]) -> None:
        self._send(request, status, headers, b'{"error": "as told"}')
