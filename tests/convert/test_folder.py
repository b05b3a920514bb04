"""The writer every converter ends in: shards, index, checksums, and whole folders or none."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dynajax.checkpoint.checksums import read_checksums, write_checksums
from dynajax.checkpoint.reading import DTYPES
from dynajax.convert.folder import Tensor, write_folder
from dynajax.convert.numbers import converted
from dynajax.errors import ModelError, NumericalError, StorageError, UsageError

ROOT = Path(__file__).parents[2]


def tensor(name, array):
    dtype = next(key for key, kind in DTYPES.items() if kind == array.dtype)
    flat = array.reshape(-1)
    return Tensor(name, dtype, array.shape, lambda: (flat[i : i + 5] for i in range(0, flat.size, 5)))


def arrays(dtypes=("float32", "float16", "bfloat16", "float32")):
    rng = np.random.default_rng(0)
    return {f"t{i}.weight": rng.standard_normal((4, 3)).astype(DTYPES[dtype]) for i, dtype in enumerate(dtypes)}


def write(target, **changes):
    wanted = {"config": {"a": 1}, "files": {}} | changes
    tensors = wanted.pop("tensors", None) or [tensor(name, array) for name, array in arrays().items()]
    return write_folder(target, tensors, **wanted)


def stored(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_one_file(tmp_path):
    calls = []
    folder = write(tmp_path / "m", files={"tokenizer.json": b"{}"}, progress=lambda *what: calls.append(what))
    assert sorted(p.name for p in folder.iterdir()) == [
        "checksums.json", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert_equal(stored(folder), arrays())
    assert calls == [("convert", i, 4) for i in range(1, 5)]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_shards_and_index(tmp_path):
    sizes = [array.nbytes for array in arrays().values()]  # 48, 24, 24, 48
    folder = write(tmp_path / "m", shard_bytes=sizes[0] + sizes[1])
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(p.name for p in folder.glob("*.safetensors")) == names
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert list(index["weight_map"].values()) == [names[0], names[0], names[1], names[1]]
    assert_equal(stored(folder), arrays())
    large = write(tmp_path / "n", shard_bytes=1)  # every tensor is larger than a shard may be
    assert len(list(large.glob("*.safetensors"))) == 4


def test_checksums_are_of_the_bytes_as_written(tmp_path):
    folder = write(tmp_path / "m")
    expected = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays().items()}
    assert read_checksums(folder) == expected
    assert json.loads((folder / "checksums.json").read_text()) == {"version": 1, "tensors": expected}


def test_the_config_names_the_type_of_most_bytes(tmp_path):
    config = json.loads((write(tmp_path / "m") / "config.json").read_text())
    assert config == {"a": 1, "dtype": "float32"}
    halves = [tensor(name, array) for name, array in arrays(["float32", "float16", "float16", "float16"]).items()]
    folder = write(tmp_path / "n", tensors=halves, config={"torch_dtype": "float64", "dtype": "x"})
    assert json.loads((folder / "config.json").read_text()) == {"torch_dtype": "float16", "dtype": "float16"}


def test_equal_input_gives_equal_files(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_what_is_taken_is_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name, named in (("full", "is not empty"), ("file", "is not a folder"), ("link", "is not a folder")):
        with pytest.raises(UsageError, match=named):
            write(tmp_path / name)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert (write(tmp_path / "empty") / "config.json").exists()
    assert (write(tmp_path / "new" / "deep") / "config.json").exists()


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def broken():
        yield np.ones(5, np.float32)
        raise KeyboardInterrupt

    good, bad = tensor("good", np.ones((2, 2), np.float32)), Tensor("bad", "float32", (10,), broken)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m", tensors=[good, bad])
    assert list(tmp_path.iterdir()) == []
    short = Tensor("short", "float32", (10,), lambda: [np.ones(5, np.float32)])
    with pytest.raises(ValueError, match="blocks gave 20 bytes, expected 40"):
        write(tmp_path / "m", tensors=[short])
    with pytest.raises(ValueError, match="a block of float64"):
        write(tmp_path / "m", tensors=[Tensor("wide", "float32", (5,), lambda: [np.ones(5)])])
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys, numpy as np
from pathlib import Path
from dynajax.convert.folder import Tensor, write_folder
def blocks():
    yield np.ones(5, np.float32)
    os.kill(os.getpid(), 9)
write_folder(Path(sys.argv[1]), [Tensor("a", "float32", (10,), blocks)], config={}, files={})
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "m"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == [".m.partial"]
    assert_equal(stored(write(tmp_path / "m")), arrays())  # the next run starts over
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_two_at_once(tmp_path):
    draft = tmp_path / ".m.partial"
    draft.mkdir()
    (draft / "half").write_text("x")
    lock = os.open(draft, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another process is writing"):
        write(tmp_path / "m")
    assert (draft / "half").exists()
    os.close(lock)
    write(tmp_path / "m")


def test_a_full_disk(tmp_path, monkeypatch):
    huge = Tensor("a", "float32", (2**60,), list)
    with pytest.raises(StorageError, match="needs 46116860184.* bytes of disk, .* are free"):
        write(tmp_path / "m", tensors=[huge])
    monkeypatch.setattr("dynajax.convert.folder.os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(StorageError, match="No space: make room"):
        write(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_names(tmp_path):
    one = tensor("a", np.ones(3, np.float32))
    with pytest.raises(ModelError, match="of one name twice: a"):
        write(tmp_path / "m", tensors=[one, one])
    with pytest.raises(ModelError, match="cannot be named __metadata__"):
        write(tmp_path / "m", tensors=[tensor("__metadata__", np.ones(3, np.float32))])
    for bad in ("../x", "config.json", "a/b"):
        with pytest.raises(ValueError, match="cannot be copied"):
            write(tmp_path / "m", tensors=[one], files={bad: b""})
    with pytest.raises(ModelError, match="no tensors"):
        write_folder(tmp_path / "m", [], config={}, files={})
    odd = {'quote"\n\\ \u00e9': np.ones(3, np.float32)}
    folder = write(tmp_path / "m", tensors=[tensor(*pair) for pair in odd.items()])
    assert_equal(stored(folder), odd)
    assert read_checksums(folder).keys() == odd.keys()


# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_rounding(source, target):
    values = np.array([[0.0, -1.5, 1e-3], [3.14159, 1000.0, -0.1]]).astype(DTYPES.get(source, np.float64))
    found = converted(values, target, "w")
    assert found.dtype == DTYPES[target]
    np.testing.assert_array_equal(found, values.astype(DTYPES[target]))
    for bad in (np.nan, np.inf, -np.inf):
        broken = values.copy()
        broken[1, 1] = bad
        with pytest.raises(NumericalError, match=r"^w holds NaN or infinity"):
            converted(broken, target, "w")


@pytest.mark.parametrize(
    ("value", "target"), [(65520.0, "float16"), (-1e6, "float16"), (1e39, "float32"), (3.4e38, "bfloat16")]
)
def test_overflow(value, target):
    with pytest.raises(NumericalError, match=rf"^w holds .*, beyond {target}"):
        converted(np.array([1.0, value]), target, "w")
    converted(np.array([1.0, 65504.0]), target, "w")


# --- checksums.json -----------------------------------------------------------------------------------


def test_checksums_file(tmp_path):
    assert read_checksums(tmp_path) is None
    write_checksums(tmp_path, {"b": "0" * 64, "a": "f" * 64})
    assert read_checksums(tmp_path) == {"a": "f" * 64, "b": "0" * 64}
    assert [p.name for p in tmp_path.iterdir()] == ["checksums.json"]
    with pytest.raises(ValueError, match="64 hex digits"):
        write_checksums(tmp_path, {"a": "F" * 64})


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 2, "tensors": {}}', '{"version": true, "tensors": {}}', '{"version": 1}', '{"tensors": {}}',
     '{"version": 1, "tensors": []}', '{"version": 1, "tensors": {"a": 5}}', '{"version": 1, "tensors": {"a": "ab"}}'],
)  # fmt: skip
def test_damaged_checksums(tmp_path, text):
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(ModelError):
        read_checksums(tmp_path)
