"""Engines of int8 and int4 compute what the plain float64 forward does with the weights that these stand for."""

import logging
from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine
from dynajax.budget import unit_bytes
from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.places import quantised_file
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.errors import UsageError
from dynajax.testing import families, make_checkpoint, make_moe
from dynajax.testing.oracle import family_logits
from dynajax.testing.quantised import write_dequantised
from tests.engine.cases import SPECS

IDS = np.random.default_rng(3).integers(3, 90, 45).tolist()
CTX = 128
SIZES = {"hidden_size": 64, "num_attention_heads": 4}
MIXTURE = {**SIZES, "num_key_value_heads": 4}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(model, bits) -> the folder, and its logits [T, V] with the weights that packed ones stand for."""
    root, found = tmp_path_factory.mktemp("quantised"), {}

    def pair(name: str, bits: int) -> tuple[Path, np.ndarray]:
        folder = root / name
        if not folder.exists():
            if name in SPECS:
                make_checkpoint(folder, SPECS[name], shards=2)
            elif name in families.FAMILIES:
                families.write(folder, name, **SIZES, **({"word_embed_proj_dim": 64} if name == "opt" else {}))
            else:
                sizes = {"qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32} if name == "deepseek_v2" else {}
                make_moe(folder, name, **MIXTURE, **sizes)
        if (name, bits) not in found:
            exact = write_dequantised(folder, root / f"{name}-{bits}", bits)
            found[name, bits] = family_logits(exact, IDS)
        return folder, found[name, bits]

    return pair


def logits(folder: Path, bits: int, share: float, **settings) -> np.ndarray:
    """[2, V] at the last two positions, prefilled before; with that share of the units on the device, 1: resident."""
    settings = {"ctx": CTX, "dtype": f"int{bits}", **settings}
    if share < 1:
        plan = plan_for(str(folder), EngineConfig(**{"policy": "none", "vram_budget": "64GiB", **settings}))
        unit = unit_bytes(read_spec(folder), f"int{bits}")
        settings["vram_budget"] = plan.smallest_budget_bytes + int(plan.units_total * share) * unit
    with Engine.from_pretrained(str(folder), **settings) as engine:
        parts = engine._parts
        resident = parts.prepared.memory.units_resident / parts.prepared.memory.units_total
        assert (resident == 1) == (share == 1) and (resident == 0) == (share == 0)
        parts.stepper.prefill(0, IDS[:-2], lambda *_: None)
        active = np.ones(1, np.bool_)
        at = len(IDS) - 2
        return np.stack(
            [
                parts.stepper.step(np.array([IDS[i]], np.int32), np.array([i], np.int32), active)[0].copy()
                for i in (at, at + 1)
            ]
        )


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected[-2:], rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("model", "bits"), [("relu", 4), ("relu-tied", 8), ("relu-tied", 4), ("silu", 8), ("opt", 4), ("falcon-40b", 4)]
)
def test_every_placement_computes_what_the_weights_stand_for(pairs, model, bits):
    folder, expected = pairs(model, bits)
    for share in (0, 0.4, 1):
        assert_close(logits(folder, bits, share), expected)


@pytest.mark.parametrize("mode", ["threads", "callback", "ffi"])
def test_every_host_mode(pairs, mode):
    folder, expected = pairs("relu", 4)
    assert_close(logits(folder, 4, 0.5, host_mode=mode), expected)


@pytest.mark.parametrize("model", ["mixtral", "qwen2_moe", "deepseek_v2"])
def test_experts(pairs, model):
    folder, expected = pairs(model, 4)
    for share in (0, 0.5, 1):
        assert_close(logits(folder, 4, share), expected)


def test_experts_that_move(pairs):
    folder, expected = pairs("mixtral", 8)
    assert_close(logits(folder, 8, 0.5, policy="scan", host_mode="threads"), expected)


def test_neurons_that_move(pairs):
    folder, expected = pairs("relu", 4)
    settings = {"policy": "dynamic", "sparsity": "exact", "deterministic": True, "predictor": "gate"}
    forced = {"swap_rule": "paper", "window_units": 4}
    assert_close(logits(folder, 4, 0.5, host_mode="threads", set=forced, **settings), expected)


def test_the_tolerance_notices_one_wrong_scale(pairs, monkeypatch):
    folder, expected = pairs("relu", 4)
    fill = Checkpoint.fill_bundle

    def wrong(self, layer, out):
        fill(self, layer, out)
        if layer == 1:
            row = out[7, 2, 0].reshape(-1)  # a view: the neuron's down row, its scales last
            row[-1] += 4  # the exponent: twice as large

    monkeypatch.setattr(Checkpoint, "fill_bundle", wrong)
    monkeypatch.setattr("dynajax.engine.opening.packed_copy", lambda checkpoint, dtype, progress: checkpoint)
    for share in (0, 1):
        with pytest.raises(AssertionError):
            assert_close(logits(folder, 4, share), expected)


def test_the_cache_is_made_once_and_read_without_the_weights(pairs, monkeypatch, caplog):
    folder, expected = pairs("relu-tied", 8)
    checkpoint = Checkpoint.open(folder)
    path = quantised_file(checkpoint.fingerprint(), "int8")
    path.unlink(missing_ok=True)
    assert_close(logits(folder, 8, 0.4), expected)
    stamp = path.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "_read", None)
        patch.setattr(Checkpoint, "fill_bundle", None)
        assert_close(logits(folder, 8, 0.4), expected)
    assert path.stat().st_mtime_ns == stamp and [p.suffix for p in path.parent.glob("*.tmp")] == []
    for damage in (lambda raw: raw[:-1], lambda raw: raw[:-9] + bytes(9), lambda raw: b"", lambda raw: raw[9:]):
        path.write_bytes(damage(path.read_bytes()))
        with caplog.at_level(logging.WARNING):
            assert_close(logits(folder, 8, 0.4), expected)
        assert caplog.text.count("quantising again") == 1, caplog.text
        caplog.clear()


def test_a_copy_of_other_weights_is_refused(pairs, caplog):
    folder, expected = pairs("relu", 8)
    mine = quantised_file(Checkpoint.open(folder).fingerprint(), "int8")
    logits(pairs("fatrelu", 8)[0], 8, 1)
    other = quantised_file(Checkpoint.open(pairs("fatrelu", 8)[0]).fingerprint(), "int8")
    mine.write_bytes(other.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert_close(logits(folder, 8, 1), expected)
    assert "not a copy of these weights: quantising again" in caplog.text


@pytest.mark.parametrize("why", ["full", "readonly"])
def test_without_room_for_a_copy_it_works_as_well(pairs, monkeypatch, caplog, tmp_path, why):
    folder, expected = pairs("relu", 4)
    cache = tmp_path / "cache"
    if why == "full":
        monkeypatch.setattr("dynajax.checkpoint.quantised.shutil.disk_usage", lambda path: Usage(10, 10, 0))
    else:
        cache.write_bytes(b"")  # a file where the folder should be
    monkeypatch.setenv("DYNAJAX_CACHE", str(cache))
    with caplog.at_level(logging.WARNING):
        assert_close(logits(folder, 4, 0.4), expected)
    assert caplog.text.count("quantising again every time") == 1


class Usage(tuple):
    """What `shutil.disk_usage` returns."""

    def __new__(cls, *sizes: int):
        return super().__new__(cls, sizes)

    free = property(lambda self: self[2])


def test_what_is_refused(pairs, tmp_path):
    folder, _ = pairs("relu", 4)
    for changes, message in (
        ({"dtype": "int4", "host_dtype": "int8"}, "--host-dtype int8 cannot fill a int4 pool"),
        ({"dtype": "float32", "host_dtype": "int8"}, "--host-dtype int8 cannot fill a float32 pool"),
        ({"dtype": "int8", "host_dtype": "float16"}, "--host-dtype float16 cannot fill a int8 pool"),
        ({"dtype": "int8", "host_dense": "blas"}, "--host-dense blas multiplies no int8 weights"),
    ):
        with pytest.raises(UsageError, match=message):
            plan_for(str(folder), EngineConfig(ctx=CTX, **changes))
    odd = make_moe(tmp_path / "odd", "mixtral")
    with pytest.raises(UsageError, match="--dtype int4 needs rows of a multiple of 32, this model has some of 40"):
        plan_for(str(odd), EngineConfig(ctx=CTX, dtype="int4"))


@pytest.mark.parametrize("model", ["relu", "relu-tied", "opt", "mixtral", "deepseek_v2"])
def test_the_plan_counts_every_byte(pairs, model):
    folder, _ = pairs(model, 4)
    plan = plan_for(str(folder), EngineConfig(ctx=CTX, dtype="int4", policy="none"))
    with Engine.from_pretrained(str(folder), ctx=CTX, dtype="int4", policy="none") as engine:
        parts = engine._parts
        weights, state = parts.stepper.weights, parts.stepper.state
        dense = [*(leaf for leaves in (*weights.layers, *weights.routing) for leaf in leaves), *weights.norm]
        dense += [weights.table, *weights.tables[1:]]
        assert sum(array.nbytes for array in dense) == plan.device["dense"]
        assert sum(array.nbytes for array in (*state.ks, *state.vs)) == plan.device["kv"]
        assert parts.store.nbytes == plan.host["units"]
        assert sum(table.nbytes for table in weights.host_tables) == plan.host["embed"]
