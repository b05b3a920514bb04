"""A training run on disk, beside its output: what it was begun with, and the newest states of its trainer.

OUT.partial/run.json holds the settings, OUT.partial/states/ what orbax writes, one folder a state, named by tokens. A
state is whole or invisible.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import orbax.checkpoint as ocp

from dynajax.checkpoint.drafts import draft_file, remove_folder
from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.wording import listing, located
from dynajax.errors import ModelError, StorageError, UsageError
from predictors.folder import storage_error

RECORD_NAME, STATES_NAME = "run.json", "states"
_RECORD_BYTES = 2**20


class Kept(Protocol):
    """A trainer whose state a run keeps."""

    tokens: int

    def state(self) -> dict[str, Any]:
        """NumPy arrays in dicts."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def refuse_taken(out: Path) -> None:
    """UsageError if there is something at `out` that a run must not replace."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"--out {out} exists and is not a folder: name a new one")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out {out} exists and is not empty: name a new folder, or remove it first")


class Run:
    """Use it as a context manager: one process at a time trains for one output."""

    def __init__(self, out: Path):
        self.folder = out.absolute().with_name(f"{out.name}.partial")
        self._lock = -1
        self._states: ocp.CheckpointManager | None = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError(f"another process is training into {located(self.folder)}: wait for it to end") from error
        except OSError as error:
            raise StorageError(f"cannot write {located(self.folder)}: {error.strerror}") from error
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._states is not None:
            kept = self._states.latest_step() is not None
            self._states.close()
            if not kept:
                shutil.rmtree(self.folder, ignore_errors=True)  # nothing was learned yet
        elif self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
        os.close(self._lock)

    def begin(self, record: dict[str, Any], *, resume: bool) -> None:
        """Write down what the run is begun with, or compare it with that; UsageError says what differs."""
        record = json.loads(json.dumps(record))
        path = self.folder / RECORD_NAME
        known = read_json(path, _RECORD_BYTES) if path.exists() else None
        manager = self._manager()
        if known is not None and manager.latest_step() is not None:
            if not resume:
                raise UsageError(f"{located(self.folder)} holds an unfinished run: add --resume, or remove it first")
            if wrong := sorted(name for name in known.keys() | record.keys() if known.get(name) != record.get(name)):
                told = [f"{name} {known.get(name)}, now {record.get(name)}" for name in wrong]
                raise UsageError(
                    f"{located(self.folder)} was begun with other settings ({listing(told)}): give the same, or remove "
                    "it first"
                )
        with draft_file(path, _RECORD_BYTES) as file:
            file.write(json.dumps(record, indent=2).encode())

    def restore(self, trainer: Kept) -> None:
        """Put the newest state into the trainer, if there is one."""
        manager = self._manager()
        step = manager.latest_step()
        if step is None:
            return
        try:
            trainer.restore(dict(manager.restore(step, args=ocp.args.StandardRestore(trainer.state()))))
        except Exception as error:  # whatever orbax's and tensorstore's parsers stumble over
            raise ModelError(f"{located(self.folder)} is damaged: remove it and train again") from error

    def save(self, trainer: Kept) -> None:
        """Keep the trainer's state; those before it go once it is there."""
        manager = self._manager()
        if manager.latest_step() == trainer.tokens:
            return
        state = trainer.state()
        needed = _nbytes(state)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise StorageError(f"{located(self.folder)} needs {needed} bytes of disk, {free} are free: make room")
        try:
            manager.save(trainer.tokens, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise storage_error(self.folder, error) from error

    def remove(self) -> None:
        """The run is over."""
        if self._states is not None:
            self._states.close()
            self._states = None
        remove_folder(self.folder)

    def _manager(self) -> ocp.CheckpointManager:
        if self._states is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
            self._states = ocp.CheckpointManager(self.folder / STATES_NAME, options=options)
        return self._states


def _nbytes(tree: Any) -> int:
    return sum(map(_nbytes, tree.values())) if isinstance(tree, dict) else tree.nbytes
