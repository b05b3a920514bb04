"""PyTorch's zip files: right values, nothing run, and no number in the file believed."""

import os
import pickle
import tarfile
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynajax.convert.torch_zip import TorchFile
from dynajax.errors import DynajaxError, ModelError
from tests.convert import torch_files
from tests.convert.torch_files import Raw, dictionary, pickled, save, save_zip, tensor, text

VALUES = np.random.default_rng(0).standard_normal(24).astype(np.float32)


def refusal(path):
    with pytest.raises(ModelError) as caught:
        TorchFile.open(path)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1500
    return message


def only(path):
    (found,) = TorchFile.open(path).tensors.values()
    return found


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8"])
def test_types(tmp_path, dtype):
    array = (VALUES * 8).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(2, 3, 4)
    found = only(save(tmp_path / "m.bin", {"a.weight": array}))
    assert (found.name, found.dtype, found.shape, found.is_float) == ("a.weight", dtype, (2, 3, 4), dtype[0] in "fb")
    read = found.read()
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_layouts(tmp_path):
    """Transposed, sliced, a window inside a storage, a scalar, one of no items, a broken-up block order."""
    cube = VALUES.reshape(2, 3, 4)
    cases = {
        "transposed": (Raw(VALUES, (4, 6), (1, 4)), VALUES.reshape(6, 4).T),
        "columns": (Raw(VALUES, (6, 2), (4, 2)), VALUES.reshape(6, 4)[:, ::2]),
        "window": (Raw(VALUES, (2, 4), (4, 1), 8), VALUES.reshape(6, 4)[2:4]),
        "axes": (Raw(VALUES, (4, 2, 3), (1, 12, 4)), cube.transpose(2, 0, 1)),
        "one row": (Raw(VALUES, (1, 24), (999, 1)), VALUES[None]),
        "scalar": (Raw(VALUES[:1], (), ()), VALUES[0]),
        "none": (Raw(VALUES[:0], (0, 4), (4, 1)), np.empty((0, 4), np.float32)),
    }
    file = TorchFile.open(save(tmp_path / "m.bin", {name: raw for name, (raw, _) in cases.items()}))
    for name, (_, expected) in cases.items():
        np.testing.assert_array_equal(file.tensors[name].read(), expected, err_msg=name)


def test_blocks_are_smaller_than_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("dynajax.convert.torch_zip.BLOCK_BYTES", 32)
    tensors = {"plain": VALUES.reshape(6, 4), "turned": Raw(VALUES, (4, 6), (1, 4))}
    file = TorchFile.open(save(tmp_path / "m.bin", tensors))
    for name, expected in (("plain", VALUES.reshape(6, 4)), ("turned", VALUES.reshape(6, 4).T)):
        blocks = [block.copy() for block in file.tensors[name].blocks()]
        assert len(blocks) >= 3 and max(block.nbytes for block in blocks) <= 32
        np.testing.assert_array_equal(np.concatenate([b.reshape(-1) for b in blocks]), expected.reshape(-1))


def test_shared_storages_have_one_place(tmp_path):
    both = Raw(VALUES, (6, 4), (4, 1), key="0")
    file = TorchFile.open(save(tmp_path / "m.bin", {"a": both, "b": both, "c": VALUES.reshape(6, 4)}))
    places = [tensor.place for tensor in file.tensors.values()]
    assert places[0] == places[1] != places[2]


def test_a_bare_tensor_and_dictionaries_in_dictionaries(tmp_path):
    assert only(save(tmp_path / "a.pt", VALUES)).name == ""
    for outer in ("state_dict", "model", "whatever"):
        assert only(save(tmp_path / "m.pt", {"w": VALUES}, outer=outer)).name == "w"
    body = dictionary({"w": tensor(Raw.of(VALUES), "0")})
    several = pickled(b"}(" + text("model") + body + text("ema") + body + b"u")
    assert "several dictionaries of tensors (ema, model)" in refusal(
        save_zip(tmp_path / "m.pt", several, {"0": VALUES})
    )


# --- nothing is run -----------------------------------------------------------------------------------


def attacks(path):
    """name -> (pickle that would create `path`, what the refusal names)."""
    order = f"touch {path}".encode()
    said = b"X" + len(order).to_bytes(4, "little") + order
    opened = text(str(path)) + text("w") + b"\x86R"
    inner = dictionary({"w": tensor(Raw.of(VALUES), "0")})
    hooks = tensor(Raw.of(VALUES), "0").replace(torch_files.ORDERED, b"cos\nsystem\n" + said + b"\x85R")

    class Reducer:
        def __reduce__(self):
            return os.system, (f"touch {path}",)

    return {
        "GLOBAL": (b"\x80\x02cos\nsystem\n" + said + b"\x85R.", "os.system"),
        "posix": (b"\x80\x02cposix\nsystem\n" + said + b"\x85R.", "posix.system"),
        "eval": (b"\x80\x02cbuiltins\neval\n" + text(f"open({str(path)!r}, 'w')") + b"\x85R.", "builtins.eval"),
        "open": (b"\x80\x02cio\nopen\n" + opened + b".", "io.open"),
        "STACK_GLOBAL": (b"\x80\x04" + text("os") + text("system") + b"\x93" + said + b"\x85R.", "os.system"),
        "dotted": (b"\x80\x04" + text("torch._utils") + text("sys.modules") + b"\x93.", "torch._utils.sys.modules"),
        "torch import": (
            b"\x80\x02ctorch._utils\n_import_dotted_name\n" + text("os.system") + b"\x85R.",
            "dotted_name",
        ),
        "torch load": (b"\x80\x02ctorch\nload\n" + said + b"\x85R.", "torch.load"),
        "storage load": (b"\x80\x02ctorch.storage\n_load_from_bytes\n" + said + b"\x85R.", "_load_from_bytes"),
        "INST": (b"\x80\x02(" + said + b"ios\nsystem\n.", "INST os.system"),
        "OBJ": (b"\x80\x02(ccollections\nOrderedDict\no.", "OBJ"),
        "OBJ os": (b"\x80\x02(cos\nsystem\n" + said + b"o.", "os.system"),
        "NEWOBJ": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
        "NEWOBJ_EX": (b"\x80\x04ccollections\nOrderedDict\n)}\x92.", "NEWOBJ_EX"),
        "EXT1": (b"\x80\x02\x82\x01.", "EXT1"),
        "PERSID": (b"\x80\x02Pos.system\n.", "PERSID"),
        "persistent id": (b"\x80\x02(" + text("storage") + b"cos\nsystem\n" + said + b"tQ.", "os.system"),
        "persistent text": (b"\x80\x02" + said + b"Q.", "its storage is described by"),
        "persistent wrong": (
            b"\x80\x02(" + text("module") + b"ctorch\nFloatStorage\ntQ.",
            "its storage is described by",
        ),
        "BUILD on a dict": (b"\x80\x02}}" + text("a") + said + b"sb.", "sets attributes of a dict"),
        "BUILD on a tensor": (
            b"\x80\x02" + tensor(Raw.of(VALUES), "0") + b"}" + text("__class__") + said + b"sb.",
            "sets attributes of a View",
        ),
        "BUILD on a name": (
            b"\x80\x02ccollections\nOrderedDict\n}" + text("role") + text("tensor") + b"sb.",
            "sets attributes of a _Name",
        ),
        "call a storage": (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls something"),
        "call a tensor": (b"\x80\x02" + tensor(Raw.of(VALUES), "0") + b")R.", "calls something"),
        "OrderedDict(x)": (b"\x80\x02ccollections\nOrderedDict\n" + said + b"\x85R.", "calls something"),
        "in a hook": (b"\x80\x02" + hooks + b".", "os.system"),
        "after the tensors": (b"\x80\x02" + inner + b"0cos\nsystem\n" + said + b"\x85R.", "POP"),
        "second pickle": (pickled(inner) + b"cos\nsystem\n" + said + b"\x85R.", "does not end where it should"),
        "pickle module": (pickle.dumps(Reducer(), protocol=4), ".system"),
        "pickle module 0": (pickle.dumps(Reducer(), protocol=0), ".system"),
    }


@pytest.mark.parametrize("name", attacks("x"))
def test_nothing_in_the_file_is_run(tmp_path, name):
    canary = tmp_path / "canary"
    raw, named = attacks(canary)[name]
    message = refusal(save_zip(tmp_path / "evil.bin", raw, {"0": VALUES}))
    assert named in message and "nothing of it was run" in message
    assert not canary.exists()


def test_the_canary_can_sing(tmp_path):
    """The attacks are real ones: the pickle module falls for them."""
    canary = tmp_path / "canary"
    pickle.loads(attacks(canary)["GLOBAL"][0])
    assert canary.exists()


# --- numbers that lie ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (Raw(VALUES, (25,), (1,)), "reaches beyond"),
        (Raw(VALUES, (24,), (1,), offset=1), "reaches beyond"),
        (Raw(VALUES, (4,), (1,), offset=-1), "out of range"),
        (Raw(VALUES, (4,), (-1,), offset=5), "out of range"),
        (Raw(VALUES, (-4,), (1,)), "out of range"),
        (Raw(VALUES, (2, 2), (23, 2)), "reaches beyond"),
        (Raw(VALUES, (2**40,), (0,)), "reaches beyond"),
        (Raw(VALUES, (25, 1), (0, 1)), "reaches beyond"),
        (Raw(VALUES, (2**200,), (2**100,)), "out of range"),
        (Raw(VALUES, (2**33, 2**31), (1, 1)), "out of range"),
        (Raw(VALUES, (0, 2**62), (1, 1)), "out of range"),
        (Raw(VALUES, (1,), (1,), offset=2**2000), "reaches beyond"),
        (Raw(VALUES, (2,) * 9, (1,) * 9), "do not go together"),
        (Raw(VALUES, (2, 3), (1,)), "do not go together"),
        (Raw(VALUES, (24,), (1,), numel=25), "its storage has 96 bytes, not 25 x 4"),
        (Raw(VALUES, (24,), (1,), numel=2**62), "its storage has 96 bytes"),
        (Raw(VALUES, (24,), (1,), numel=-24), "its storage has 96 bytes"),
        (Raw(np.zeros(1000, np.float32), (2,), (999,)), "spread"),
    ],
)
def test_hostile_numbers(tmp_path, raw, named):
    assert named in refusal(save(tmp_path / "m.bin", {"w": raw}))


def test_a_storage_that_is_not_there(tmp_path):
    body = pickled(dictionary({"w": tensor(Raw.of(VALUES), "../../etc/passwd")}))
    assert "its storage '../../etc/passwd' is missing" in refusal(save_zip(tmp_path / "m.bin", body, {"0": VALUES}))


def test_instructions_cost_no_memory(tmp_path):
    """A memo index of 2**31 makes the pickle module allocate tens of GB."""
    raw = b"\x80\x02}r\xff\xff\xff\x7f."
    assert "holds no tensors" in refusal(save_zip(tmp_path / "m.bin", raw, {}))
    deep = b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."
    assert "holds a list" in refusal(save_zip(tmp_path / "m.bin", deep, {}))
    assert "bytes of m/data.pkl" in refusal(save_zip(tmp_path / "m.bin", b"]" * (2**22 + 1), {}))


# --- files that are something else, or damaged --------------------------------------------------------


def test_other_formats(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." + b"x" * 100)
    assert "before 1.6" in refusal(path) and "torch.save(" in refusal(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    assert "bare pickle" in refusal(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git-lfs pointer" in refusal(path)
    path.write_bytes(b"")
    assert "not a PyTorch zip file" in refusal(path)
    (tmp_path / "x").write_bytes(b"x")
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "x", "storages")
    assert "tar file" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "x")
    assert "not a PyTorch checkpoint" in refusal(path)
    body = pickled(dictionary({"w": tensor(Raw.of(VALUES), "0")}))
    assert "TorchScript" in refusal(save_zip(path, body, {"0": VALUES}, **{"code/a.py": b"x"}))
    assert "byte order b'big'" in refusal(save_zip(path, body, {"0": VALUES}, byteorder=b"big"))
    assert only(save_zip(path, body, {"0": VALUES}, byteorder=None)).shape == (24,)


def test_zip_members_that_are_refused(tmp_path):
    path = tmp_path / "m.bin"
    body = pickled(dictionary({"w": tensor(Raw.of(VALUES), "0")}))
    for bad in ("../x", "data/../../x", "data//0", "/x", "a\\b"):
        assert "was refused" in refusal(save_zip(path, body, {"0": VALUES}, **{bad: b"x"})), bad
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", body)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("m/data.pkl", body)
    assert "twice" in refusal(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:  # a bomb needs compression
        archive.writestr("m/data.pkl", body)
        archive.writestr("m/data/0", bytes(10**6))
    assert "is compressed" in refusal(path)
    whole = save(path, {"w": VALUES}).read_bytes()
    path.write_bytes(whole + b"PK")
    assert "truncated or corrupt" in refusal(path)
    path.write_bytes(b"PK\x03\x04" + bytes(10) + whole)  # offsets that are all off by the same amount
    assert "truncated or corrupt" in refusal(path)


def test_overlapping_members(tmp_path):
    """Two directory entries for one piece of the file."""
    path = save(tmp_path / "m.bin", {"a": VALUES, "b": VALUES})
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        places = {info.filename: info.header_offset for info in archive.infolist()}
    first, second = (places[f"m/data/{i}"].to_bytes(4, "little") for i in (0, 1))
    at = raw.rindex(second + b"m/data/1")
    local = raw[: places["m/data/0"]] + raw[places["m/data/0"] :].replace(b"m/data/0", b"m/data/1", 1)
    path.write_bytes(local[:at] + first + local[at + 4 :])
    assert "not where its directory says" in refusal(path) or "overlap" in refusal(path)


def test_truncated_anywhere(tmp_path):
    path = save(tmp_path / "m.bin", {"w": VALUES})
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 22, len(whole) // 2, 40, 5):
        path.write_bytes(whole[:length])
        assert "truncated or corrupt" in refusal(path)


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = save(tmp_path / "m.bin", {"w": VALUES})
    found = only(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="changed while"):
        found.read()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutations_give_the_right_values_or_an_error(tmp_path, data):
    path = tmp_path / "m.bin"
    tensors = {"a": VALUES.reshape(6, 4), "b": Raw(VALUES, (4, 6), (1, 4))}
    raw = bytearray(save(path, tensors).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "cut", "drop", "copy"])):
            case "set":
                raw[at] = data.draw(st.integers(0, 255))
            case "cut":
                del raw[at:]
                raw.append(0)
            case "drop":
                del raw[at : at + data.draw(st.integers(1, 8))]
                raw.append(0)
            case "copy":
                raw[at:at] = raw[max(0, at - 8) : at]
    path.write_bytes(raw)
    try:
        found = {name: tensor.read() for name, tensor in TorchFile.open(path).tensors.items()}
    except DynajaxError:
        return
    assert found.keys() == {"a", "b"}
    np.testing.assert_array_equal(found["a"], VALUES.reshape(6, 4))
    np.testing.assert_array_equal(found["b"], VALUES.reshape(6, 4).T)


@pytest.mark.parametrize("code", [b"c", b"i"])
@pytest.mark.parametrize("name", [rb"torch\o" + b"\nX\n", b"torch\n" + rb"\x41" + b"\n"])
def test_a_backslash_in_a_name_is_refused_and_not_undone(tmp_path, code, name):
    path = save_zip(tmp_path / "m.bin", b"\x80\x02(" + code + name + b".", {"0": VALUES})
    with pytest.raises(ModelError, match="a name with a backslash"):
        _ = TorchFile.open(path).tensors


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_pickles_end_in_a_model_error_or_in_tensors(tmp_path, data):
    """With a fitting checksum, so that the mutation reaches the pickle machine."""
    raw = bytearray(pickled(dictionary({"a": tensor(Raw.of(VALUES.reshape(6, 4)), "0")})))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = save_zip(tmp_path / "m.bin", bytes(raw), {"0": VALUES})
    try:
        for found in TorchFile.open(path).tensors.values():
            assert np.isin(found.read().view(np.uint8), VALUES.view(np.uint8)).all()  # nothing from elsewhere
    except DynajaxError:
        pass


# --- what torch writes --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [2, 4])
def test_files_of_torch_itself(tmp_path, protocol):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    state = model.state_dict()
    state["half"] = torch.randn(9, 3).half()
    state["brain"] = torch.randn(4, 6).bfloat16().T
    state["double"] = torch.randn(3).double()
    state["parameter"] = torch.nn.Parameter(torch.randn(2, 2))
    state["view"] = torch.arange(100.0).reshape(10, 10)[2:5, 1:4]
    state["tied"] = state["0.weight"]
    state["empty"] = torch.empty(0, 3)
    torch.save(state, tmp_path / "m.bin", pickle_protocol=protocol)
    file = TorchFile.open(tmp_path / "m.bin")
    assert list(file.tensors) == list(state)
    for name, expected in state.items():
        found = file.tensors[name].read()
        assert str(expected.dtype) == f"torch.{file.tensors[name].dtype}"
        np.testing.assert_array_equal(found.astype(np.float64), expected.detach().double().numpy(), err_msg=name)
    assert file.tensors["tied"].place == file.tensors["0.weight"].place
    torch.save(
        {"state_dict": state, "epoch": 1, "optimizer": {"state": {0: {"step": state["half"]}}}}, tmp_path / "n.pt"
    )
    assert list(TorchFile.open(tmp_path / "n.pt").tensors) == list(state)


@pytest.mark.slow
def test_what_torch_writes_and_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "before 1.6" in refusal(tmp_path / "old.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert "torch.nn.modules.linear.Linear" in refusal(tmp_path / "module.pt")
    torch.save({"a": torch.zeros(2).to_sparse()}, tmp_path / "sparse.pt")
    assert "_rebuild_sparse_tensor" in refusal(tmp_path / "sparse.pt")
    torch.save({"a": torch.ones(1).expand(50)}, tmp_path / "expanded.pt")
    assert "reaches beyond" in refusal(tmp_path / "expanded.pt")
