"""The activation statistics file: round trip, other models' files, damaged files, and failed writes."""

import pickle
import resource
import subprocess
import sys

import numpy as np
import pytest

from dynajax.checkpoint import Checkpoint, read_stats, write_stats
from dynajax.errors import MismatchError, StorageError
from dynajax.testing import TINY, make_checkpoint

OWNER = "ab" * 32
SHAPE = (TINY.layers, TINY.ffn)


def frequencies(seed=0):
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


def refusal(path, spec=TINY, fingerprint=OWNER):
    with pytest.raises(MismatchError) as caught:
        read_stats(path, spec, fingerprint)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 5
    return str(caught.value)


def raw_stats(path, **changes):
    """A file written past `write_stats` and its checks; None drops a member."""
    members = {"version": 1, "fingerprint": OWNER, "frequency": frequencies(), "tokens": 100} | changes
    np.savez(path, **{key: value for key, value in members.items() if value is not None})
    return path


def test_round_trip(tmp_path):
    path = tmp_path / "activations.npz"
    write_stats(path, fingerprint=OWNER, frequency=frequencies(), tokens=1000)
    write_stats(path, fingerprint=OWNER, frequency=frequencies(1), tokens=1000)
    found = read_stats(path, TINY, OWNER)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, frequencies(1))
    np.testing.assert_array_equal(read_stats(path, TINY, None), frequencies(1))  # a plan without the weights
    assert [file.name for file in tmp_path.iterdir()] == ["activations.npz"]


def test_statistics_go_with_one_checkpoint(tmp_path):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path / "a", TINY))
    path = tmp_path / "a" / "activations.npz"
    write_stats(path, fingerprint=checkpoint.fingerprint(), frequency=frequencies(), tokens=5)
    np.testing.assert_array_equal(read_stats(path, TINY, checkpoint.fingerprint()), frequencies())
    other = Checkpoint.open(make_checkpoint(tmp_path / "b", TINY, seed=1))
    with pytest.raises(MismatchError, match="was made for the model"):
        read_stats(path, TINY, other.fingerprint())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": "cd" * 32}, "was made for the model cdcdcdcdcdcd, this one is abababababab"),
        ({"version": 2}, "has version"),
        ({"version": np.ones((3, 3))}, "has version"),
        ({"tokens": np.ones((3, 3), int)}, "tokens"),
        ({"frequency": frequencies()[:1]}, "float32 (2, 48), got float32 (1, 48)"),
        ({"frequency": frequencies()[:, :40]}, "(2, 40)"),
        ({"frequency": frequencies().astype(np.float64)}, "float64"),
        ({"frequency": np.where(np.arange(48) == 3, np.nan, frequencies()).astype(np.float32)}, "between 0 and 1"),
        ({"frequency": frequencies() - np.float32(0.5)}, "between 0 and 1"),
        ({"frequency": frequencies() * np.float32(500)}, "between 0 and 1"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
        ({"frequency": None}, "is not a statistics file"),
        ({"fingerprint": None}, "is not a statistics file"),
        ({"extra": np.zeros(10**6)}, "too many"),
    ],
)
def test_files_that_do_not_belong(tmp_path, changes, named):
    assert named in refusal(raw_stats(tmp_path / "s.npz", **changes))


def test_objects_are_not_unpickled(tmp_path):
    path = raw_stats(tmp_path / "s.npz", frequency=np.array([{"a": 1}], dtype=object))
    assert "is not a statistics file" in refusal(path)


def test_damaged_files(tmp_path):
    path = raw_stats(tmp_path / "s.npz")
    whole = path.read_bytes()
    for raw in (b"", b"nonsense", whole[:100], whole[:-30], pickle.dumps({"a": 1})):
        path.write_bytes(raw)
        assert "is not a statistics file" in refusal(path)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + b"\xff" * 8 + whole[middle + 8 :])  # the checksum notices
    assert "is not a statistics file" in refusal(path)


def test_an_unreadable_file(tmp_path):
    with pytest.raises(StorageError, match="no statistics file"):
        read_stats(tmp_path / "absent.npz", TINY, OWNER)


def test_only_sound_statistics_are_written(tmp_path):
    with pytest.raises(ValueError, match="between 0 and 1"):
        write_stats(tmp_path / "s.npz", fingerprint=OWNER, frequency=frequencies() * 9, tokens=5)
    with pytest.raises(ValueError, match="tokens"):
        write_stats(tmp_path / "s.npz", fingerprint=OWNER, frequency=frequencies(), tokens=0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A file size limit stands in for the full disk; in a child, because the limit cannot be lifted again."""
    path = raw_stats(tmp_path / "s.npz")
    before = path.read_bytes()
    code = f"""
import resource, signal, numpy as np
from pathlib import Path
from dynajax.checkpoint import write_stats
from dynajax.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
try:
    write_stats(Path({str(path)!r}), fingerprint="x", frequency=np.zeros((50, 1000), np.float32), tokens=1)
except StorageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout and "265536 bytes" in done.stdout
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["s.npz"]
