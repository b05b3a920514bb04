"""Opening a model folder: what is accepted, and one line for every fault a folder can have."""

import json
import logging
import os
import pickle
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax.checkpoint import Checkpoint
from dynajax.errors import ModelError
from dynajax.testing import TINY, TINY_TIED, make_checkpoint
from dynajax.testing.families import write

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def refusal(folder):
    """The one line with which the folder is refused."""
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 4000
    return text


def change_tensors(folder, **changes):
    """Rewrite the single shard with tensors replaced, added, or (None) dropped; "__" stands for "."."""
    tensors = load_file(folder / FILE)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / FILE)


def change_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in {**index["weight_map"], **changes}.items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def tiny(tmp_path):
    return make_checkpoint(tmp_path, TINY)


@pytest.fixture
def sharded(tmp_path):
    return make_checkpoint(tmp_path, TINY, shards=4)


# --- accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 4])
def test_open(tmp_path, shards):
    folder = make_checkpoint(tmp_path, TINY, shards=shards)
    checkpoint = Checkpoint.open(str(folder))
    assert (checkpoint.spec, checkpoint.folder) == (TINY, folder)
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    assert checkpoint.parameters == sum(t.size for t in tensors.values())
    assert sum(stored.nbytes for stored in checkpoint.tensors.values()) == 4 * checkpoint.parameters


def test_rotary_frequencies_are_ignored(tiny):
    change_tensors(tiny, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float64))
    assert Checkpoint.open(tiny).parameters == sum(t.size for t in load_file(tiny / FILE).values()) - 4


def test_a_tied_model_may_carry_a_head(tmp_path, caplog):
    folder = make_checkpoint(tmp_path, TINY_TIED)
    change_tensors(folder, lm_head__weight=np.zeros((TINY.vocab, TINY.hidden), np.float32))
    with caplog.at_level(logging.INFO):
        assert Checkpoint.open(folder).head("float32") is None
    assert "lm_head.weight is stored although config.json ties it" in caplog.text
    change_tensors(folder, lm_head__weight=np.zeros((TINY.vocab, 8), np.float32))
    assert "1 tensors are unknown: lm_head.weight" in refusal(folder)


def test_hub_cache_layout_is_accepted_and_no_other_link(tmp_path):
    real = make_checkpoint(tmp_path / "models--a--b" / "blobs", TINY)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", FILE):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert Checkpoint.open(snapshot).spec == TINY
    (tmp_path / "link").symlink_to(snapshot)  # the folder itself may be reached through a link
    assert Checkpoint.open(tmp_path / "link").spec == TINY
    elsewhere = tmp_path / "plain"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_bytes((real / "config.json").read_bytes())
    (elsewhere / FILE).symlink_to(real / FILE)
    assert f"{FILE} is a link that leads outside the model folder" in refusal(elsewhere)


def test_a_read_only_folder_is_enough(tiny):
    before = sorted(path.name for path in tiny.iterdir())
    tiny.chmod(0o555)
    try:
        Checkpoint.open(tiny).fingerprint()
    finally:
        tiny.chmod(0o755)
    assert sorted(path.name for path in tiny.iterdir()) == before


def test_fingerprint(tmp_path):
    first = Checkpoint.open(make_checkpoint(tmp_path / "a", TINY, shards=2))
    same = Checkpoint.open(make_checkpoint(tmp_path / "b", TINY, shards=2, rope_spelling="old", dtype="float32"))
    assert len(first.fingerprint()) == 64
    assert first.fingerprint() == same.fingerprint()
    others = [
        make_checkpoint(tmp_path / "seed", TINY, shards=2, seed=1),
        make_checkpoint(tmp_path / "eps", TINY, shards=2, config={"rms_norm_eps": 1e-6}),
        make_checkpoint(tmp_path / "type", TINY, shards=2, dtype="bfloat16"),
    ]
    assert len({Checkpoint.open(folder).fingerprint() for folder in others} | {first.fingerprint()}) == 4


# --- fault 1, 9: damaged shards -----------------------------------------------------------------------


def test_truncated_shard_is_named_with_both_sizes(sharded):
    path = sharded / "model-00002-of-00004.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 10)
    text = refusal(sharded)
    assert f"model-00002-of-00004.safetensors is truncated or corrupt: expected {size} bytes, found {size - 10}" in text


@pytest.mark.parametrize("family", ["llama", "opt", "falcon-40b"])
def test_a_shard_cut_by_one_byte(tmp_path, family):
    path = write(tmp_path, family) / FILE
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert f"{FILE} is truncated or corrupt: expected {size} bytes, found {size - 1}" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 20])
def test_a_shard_cut_inside_its_header(tiny, keep):
    os.truncate(tiny / FILE, keep)
    assert f"{FILE} is truncated or corrupt: expected at least" in refusal(tiny)


def with_header(folder, edit):
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = edit(raw[8 : 8 + length])
    (folder / FILE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def edit_entry(**changes):
    def edit(header):
        entries = json.loads(header)
        entries["model.norm.weight"] |= changes
        return json.dumps(entries).encode()

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (edit_entry(shape=[2**40, 2**40, 3]), "overflow"),
        (edit_entry(shape=[33]), "invalid shape"),
        (edit_entry(shape=[-32]), "corrupt"),
        (edit_entry(data_offsets=[0, 128]), "corrupt"),
        (edit_entry(data_offsets=[128, 0]), "corrupt"),
        (edit_entry(dtype="F7\n"), "corrupt"),
        (lambda header: header.rstrip()[:-1] + b', "model.norm.weight": {"dtype":"F32"}}', "corrupt"),
        (lambda header: b"[" * 100_000, "corrupt"),
        (lambda header: b"\xff" + header, "corrupt"),
        (lambda header: header + b" " * 2**22, "a header of"),
    ],
)
def test_headers_that_lie(tiny, edit, named):
    with_header(tiny, edit)
    assert named in refusal(tiny)


def test_a_tensor_listed_twice_is_refused(tiny):
    def twice(header):
        entry = json.loads(header)["model.norm.weight"]
        return header.rstrip()[:-1] + b', "model.norm.weight": ' + json.dumps(entry).encode() + b"}"

    with_header(tiny, twice)
    assert "appears twice" in refusal(tiny)


def test_header_length_of_a_terabyte(tiny):
    raw = (tiny / FILE).read_bytes()
    (tiny / FILE).write_bytes(struct.pack("<Q", 2**40) + raw[8:])
    assert f"expected at least {2**40 + 8} bytes" in refusal(tiny)


def test_trailing_bytes(tiny):
    size = (tiny / FILE).stat().st_size
    with (tiny / FILE).open("ab") as file:
        file.write(b"x")
    assert f"expected {size} bytes, found {size + 1}" in refusal(tiny)


def fuzz(folder, count):
    """Flip bytes of the header; every outcome is a clean refusal or a model of the same parameters."""
    raw = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    rng = np.random.default_rng(0)
    parameters = Checkpoint.open(folder).parameters
    tracemalloc.start()
    for _ in range(count):
        mutated = bytearray(raw)
        for position in rng.integers(0, 8 + length, rng.integers(1, 4)):
            mutated[position] = rng.integers(0, 256)
        (folder / FILE).write_bytes(mutated)
        try:
            outcome = str(Checkpoint.open(folder).parameters)
        except ModelError as error:
            outcome = str(error)
        assert outcome.isprintable()
        assert outcome == str(parameters) or FILE in outcome or " tensors " in outcome
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20


def test_mutated_headers(tiny):
    fuzz(tiny, 150)


@pytest.mark.slow
def test_many_mutated_headers(tiny):
    fuzz(tiny, 2000)


# --- fault 2, 3, 8: index and shards ------------------------------------------------------------------


def test_all_missing_shards_are_listed(sharded):
    for number in (1, 3):
        (sharded / f"model-0000{number}-of-00004.safetensors").unlink()
    text = refusal(sharded)
    assert "2 of 4 shards are missing: model-00001-of-00004.safetensors, model-00003-of-00004.safetensors" in text


def test_a_broken_link_is_a_missing_shard(tiny):
    (tiny / FILE).unlink()
    (tiny / FILE).symlink_to("nowhere.safetensors")
    assert f"1 of 1 shards are missing: {FILE}" in refusal(tiny)


def test_index_and_shards_disagree(sharded):
    change_index(sharded, **{"model.extra.weight": "model-00001-of-00004.safetensors", "model.norm.weight": None})
    text = refusal(sharded)
    assert "lists 1 tensors that the shards lack: model.extra.weight in model-00001-of-00004.safetensors" in text
    assert "1 tensors that model.safetensors.index.json does not list: model.norm.weight in model-00004" in text


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors", "x\n.safetensors", 5],
)
def test_shard_names_must_be_plain(sharded, name):
    change_index(sharded, **{"model.norm.weight": name})
    assert "not plain .safetensors files in the folder" in refusal(sharded)


def test_shard_link_out_of_the_folder(sharded, tmp_path_factory):
    path = sharded / "model-00002-of-00004.safetensors"
    outside = tmp_path_factory.mktemp("outside") / "x.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    assert "model-00002-of-00004.safetensors is a link that leads outside" in refusal(sharded)


@pytest.mark.parametrize("raw", [b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"[1]", b"nonsense"])
def test_an_index_that_is_none(sharded, raw):
    (sharded / INDEX).write_bytes(raw)
    assert INDEX in refusal(sharded)


def test_a_fifo_does_not_hang_the_loader(tiny):
    (tiny / FILE).unlink()
    os.mkfifo(tiny / FILE)
    assert f"1 of 1 shards are missing: {FILE}" in refusal(tiny)


# --- fault 3, 4, 7, 12: tensors -----------------------------------------------------------------------


def test_missing_unknown_and_misshapen_tensors_in_one_line(tiny):
    tensors = load_file(tiny / FILE)
    change_tensors(
        tiny,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__bias=np.zeros(32, np.float32),
        model__layers__1__mlp__gate_proj__weight=tensors["model.layers.1.mlp.gate_proj.weight"].T.copy(),
    )
    text = refusal(tiny)
    assert "1 tensors are missing: model.norm.weight" in text
    assert "1 tensors are unknown: model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.1.mlp.gate_proj.weight (32, 48), expected (48, 32)" in text


def test_kv_heads_of_another_model(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    text = refusal(tiny)
    assert "4 tensors have the wrong shape" in text
    assert "model.layers.0.self_attn.k_proj.weight (32, 32), expected (16, 32)" in text


def test_more_layers_declared_than_stored(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40}))
    text = refusal(tiny)
    assert "342 tensors are missing: model.layers.10.input_layernorm.weight, " in text
    assert "and 332 more" in text


def test_fewer_layers_declared_than_stored(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert "9 tensors are unknown: model.layers.1.input_layernorm.weight" in refusal(tiny)


def test_an_untied_model_without_a_head(tiny):
    change_tensors(tiny, lm_head__weight=None)
    text = refusal(tiny)
    assert "1 tensors are missing: lm_head.weight" in text
    assert "tie_word_embeddings" in text


@pytest.mark.parametrize("kind", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_unsupported_types(tiny, kind):
    change_tensors(tiny, model__norm__weight=np.ones(32).astype(kind))
    text = refusal(tiny)
    assert "1 tensors have an unsupported type: model.norm.weight" in text
    assert "expected F32/F16/BF16" in text


def test_zero_size_tensors(tiny):
    change_tensors(tiny, model__norm__weight=np.zeros(0, np.float32), x=np.zeros((0, 3), np.float32))
    text = refusal(tiny)
    assert "model.norm.weight (0,), expected (32,)" in text
    assert "1 tensors are unknown: x" in text


def test_names_with_control_characters_do_not_reach_the_terminal(tiny):
    change_tensors(tiny, **{"a\nb\x1b[31m": np.zeros(1, np.float32)})
    assert r"'a\nb\x1b[31m'" in refusal(tiny)


# --- fault 10: nothing to read ------------------------------------------------------------------------


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_named_and_never_opened(tiny, tmp_path):
    (tiny / FILE).unlink()
    canary = tmp_path / "ran"
    (tiny / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    text = refusal(tiny)
    assert "pytorch_model.bin" in text and "convert" in text
    assert not canary.exists()


def test_nothing_to_load(tiny, tmp_path):
    (tiny / FILE).rename(tiny / "weights.safetensors")
    assert "it has weights.safetensors" in refusal(tiny)
    (tiny / "weights.safetensors").unlink()
    assert "the weights are not there" in refusal(tiny)
    assert "is not a folder" in refusal(tmp_path / "absent")
