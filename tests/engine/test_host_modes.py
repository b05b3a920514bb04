"""Who computes the host's half, and from where: the answers, the figures and the errors are the same."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from dynajax import Engine
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.planning import resolve_dtypes
from dynajax.errors import UsageError
from dynajax.programs import Programs
from dynajax.testing.families import write
from hostcompute import ffi
from tests.engine.cases import PROMPT, SPECS

CTX = 256
OFFLOAD = ("threads", "callback", "ffi")


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """One model for each kind of activation."""
    drelu = write(tmp_path_factory.mktemp("drelu"), "bamboo", num_hidden_layers=2, intermediate_size=160)
    return {"relu": models["relu"], "drelu": drelu, "silu": models["silu"]}


def half_budget(folder, mode: str, **config) -> int:
    """For half of the units on the device."""
    whole = plan_for(str(folder), EngineConfig(ctx=CTX, host_mode=mode, **config))
    return whole.smallest_budget_bytes + whole.pool // 2


def opened(folder, mode: str, **config) -> Engine:
    """With half of the units on the device; all of them if the mode is `resident`, which only auto chooses."""
    if mode == "resident":
        return Engine.from_pretrained(str(folder), ctx=CTX, **config)
    config = {"ctx": CTX, "host_mode": mode, "vram_budget": half_budget(folder, mode), **config}
    return Engine.from_pretrained(str(folder), **config)


def mode_of(engine: Engine) -> str:
    return engine.stats()["host_mode"]


@pytest.mark.parametrize("kind", ["relu", pytest.param("drelu", marks=pytest.mark.slow), "silu"])
def test_every_mode_gives_the_same_tokens(folders, kind):
    found = {}
    for mode in (*OFFLOAD, "resident"):
        with opened(folders[kind], mode) as engine:
            assert mode_of(engine) == mode
            greedy = engine.generate(PROMPT, max_new_tokens=24)
            sampled = engine.generate(PROMPT, max_new_tokens=24, temperature=1.3, top_p=0.95, seed=5)
            assert (0.3 < greedy.units.computed_hot_share < 0.7) == (mode != "resident")
            found[mode] = greedy.token_ids, sampled.token_ids
    assert len(set(found.values())) == 1, found
    greedy, sampled = found["ffi"]
    assert len(greedy) == len(sampled) == 24 and greedy != sampled


def figures(result) -> dict:
    units = result.units
    return {
        "live_per_token": units.live_per_token,
        "hot_share": units.hot_share,
        "hot_share_layers_ge_1": units.hot_share_layers_ge_1,
        "computed_hot_share": units.computed_hot_share,
        "bytes_read": result.host["bytes_read"],
    }


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["relu", "drelu", "silu"])
def test_every_mode_counts_alike(folders, kind, batch):
    """Of a batch the second row ends long before the first: then it is neither computed nor counted."""
    prompts = [list(PROMPT[:3]), [9] * (CTX - 4)][:batch]
    found = {}
    for mode in ("threads", "ffi"):
        budget = half_budget(folders[kind], mode, batch=batch)
        with opened(folders[kind], mode, batch=batch, vram_budget=budget) as engine:
            results = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
            again = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
        assert figures(again[0]) == figures(results[0])  # counted anew
        assert [len(result.token_ids) for result in results] == [12, 4][:batch]
        assert results[0].ffn["cold_s"] > 0 and results[0].host["bytes_read"] > 0
        assert 0 < results[0].units.hot_share < 1
        found[mode] = figures(results[0])
    assert found["ffi"] == found["threads"]


def test_cold_units_skipped_are_not_read(folders):
    bytes_read = {}
    for sparsity in ("dense", "exact"):
        with opened(folders["relu"], "ffi", sparsity=sparsity) as engine:
            bytes_read[sparsity] = engine.generate(PROMPT, max_new_tokens=8).host["bytes_read"]
    assert 0 < bytes_read["exact"] < 0.9 * bytes_read["dense"]


# --- resident -------------------------------------------------------------------------------------------


def test_a_resident_model_leaves_no_unit_in_host_memory(folders, monkeypatch):
    arenas = []
    import dynajax.bundles as bundles

    allocate = bundles.allocate_arena

    def noted(shape, dtype):
        arena = allocate(shape, dtype)
        arenas.append((weakref.ref(arena.base), arena.nbytes))
        return arena

    monkeypatch.setattr(bundles, "allocate_arena", noted)
    spec = SPECS["relu"]
    with opened(folders["relu"], "resident") as engine:
        gc.collect()
        table = spec.vocab * spec.hidden * 4
        assert engine.generate(PROMPT, max_new_tokens=2).memory["host_bytes"] == table
        assert engine._parts.prepared.memory.host == {"units": 0, "embed": table, "staging": 0, "statistics": 0}
        assert engine._parts.store.nbytes == 0
        ((arena, size),) = arenas  # one, for a layer at a time, and it is gone
        assert size == spec.ffn * 3 * spec.hidden * 4 and arena() is None
        assert engine._parts.pool.nbytes == spec.layers * size


@pytest.mark.parametrize("mode", ["resident", "ffi", "callback"])
def test_a_step_is_one_program(folders, monkeypatch, mode):
    with opened(folders["relu"], mode) as engine:
        asked, get, step = [], Programs.get, engine._parts.stepper.step
        slots = engine._parts.pool.slots

        def noted(*args):
            with monkeypatch.context() as patch:
                patch.setattr(Programs, "get", lambda self, *key: asked.append(key) or get(self, *key))
                return step(*args)

        engine._parts.stepper.step = noted
        engine.generate(PROMPT, max_new_tokens=5)
    assert asked == [("token_rows", 256, *slots)] * 5


def test_threads_run_two_programs_a_layer(folders, monkeypatch):
    with opened(folders["relu"], "threads") as engine:
        asked, get = [], Programs.get
        monkeypatch.setattr(Programs, "get", lambda self, *key: asked.append(key[0]) or get(self, *key))
        engine._parts.stepper.step(np.array([5], np.int32), np.zeros(1, np.int32), np.ones(1, np.bool_))
    assert asked == ["attend_rows", *["hot_rows"] * 3, "head"]  # the first is fetched once for all layers


def test_resident_is_chosen_where_everything_fits_and_by_no_wish_of_the_users(folders):
    plan = plan_for(str(folders["relu"]), EngineConfig(ctx=CTX))
    assert plan.units_resident == plan.units_total and plan.host["units"] == 0
    tight = plan_for(str(folders["relu"]), EngineConfig(ctx=CTX, vram_budget=plan.budget_bytes - 1))
    assert tight.plan_bytes < plan.plan_bytes  # narrower chunks of a prompt
    budgets = (plan.budget_bytes, tight.plan_bytes, tight.plan_bytes - 1, "auto")
    for budget, mode in zip(budgets, ("resident", "resident", "ffi", "resident"), strict=True):
        with Engine.from_pretrained(str(folders["relu"]), ctx=CTX, vram_budget=budget) as engine:
            assert mode_of(engine) == mode
            assert (engine._parts.prepared.memory.units_resident == plan.units_total) == (mode == "resident")
    for mode in OFFLOAD:
        with Engine.from_pretrained(str(folders["relu"]), ctx=CTX, host_mode=mode) as engine:
            assert mode_of(engine) == mode
            assert engine._parts.prepared.memory.units_resident == plan.units_total
            assert engine._parts.store.nbytes > 0
    with Engine.from_pretrained(str(folders["relu"]), ctx=CTX, policy="none") as engine:
        assert mode_of(engine) == "ffi"


def test_every_smallest_budget_works(folders):
    """Also that of a plan in which everything is resident: an engine with so little runs other programs."""
    for mode in ("auto", *OFFLOAD):
        plan = plan_for(str(folders["relu"]), EngineConfig(ctx=CTX, host_mode=mode))
        small = plan_for(
            str(folders["relu"]), EngineConfig(ctx=CTX, host_mode=mode, vram_budget=plan.smallest_budget_bytes)
        )
        assert small.units_resident == 0 and small.smallest_budget_bytes == plan.smallest_budget_bytes


# --- ffi that cannot be had -----------------------------------------------------------------------------


def test_ffi_that_cannot_be_had_is_refused_and_auto_goes_by_threads(folders, monkeypatch, caplog):
    monkeypatch.setattr(ffi, "unavailable", lambda: "the library is too old")
    with pytest.raises(UsageError, match="--host-mode ffi cannot be used here: the library is too old; use threads"):
        plan_for(str(folders["relu"]), EngineConfig(ctx=CTX, host_mode="ffi"))
    with opened(folders["relu"], "resident") as engine:  # needs no host
        assert mode_of(engine) == "resident"
        expected = engine.generate(PROMPT, max_new_tokens=4).token_ids
    assert not [message for message in caplog.messages if "host mode" in message]
    with Engine.from_pretrained(
        str(folders["relu"]), ctx=CTX, vram_budget=half_budget(folders["relu"], "threads")
    ) as engine:
        assert mode_of(engine) == "threads"
        assert engine.generate(PROMPT, max_new_tokens=4).token_ids == expected
    said = [message for message in caplog.messages if "host mode" in message]
    assert said == ["host mode threads, which is slower than ffi: the library is too old"]


def test_ffi_is_of_the_cpu_backend(monkeypatch):
    from dynajax.engine.hosts import offload_mode

    assert offload_mode("auto", "gpu") == "threads"
    assert [offload_mode(mode, "gpu") for mode in ("threads", "callback")] == ["threads", "callback"]
    with pytest.raises(UsageError, match="--host-mode ffi runs on the CPU backend only: use threads with a GPU"):
        offload_mode("ffi", "gpu")


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", OFFLOAD)
def test_an_error_of_the_host_keeps_its_words_and_the_engine_goes_on(folders, mode):
    """A unit that does not exist; the prompt of one token has no prefill, so that it is the step that fails."""
    with opened(folders["relu"], mode) as engine:
        expected = engine.generate([5], max_new_tokens=4).token_ids
        units = engine._parts.pool.cold(1)
        kept = units[3]
        for _ in range(2):  # jax raises another type from the second run of a program on
            units[3] = 9999
            with pytest.raises(ValueError, match=r"units must be .*9999") as caught:
                engine.generate([5], max_new_tokens=4)
            if mode == "ffi":
                assert caught.value.__notes__ == ["in layer 1"]
            units[3] = kept
            result = engine.generate([5], max_new_tokens=4)
            assert result.token_ids == expected
            assert result.memory["peak_bytes"] <= result.memory["budget_bytes"]


def test_an_engine_that_is_closed_lets_go_of_the_others(folders):
    """One compiled program serves both; each has its own weights, and a closed one takes nothing from the other."""
    first, second = (opened(folders["relu"], "ffi") for _ in range(2))
    expected = first.generate(PROMPT, max_new_tokens=4).token_ids
    assert second.generate(PROMPT, max_new_tokens=4).token_ids == expected
    first.close()
    assert second.generate(PROMPT, max_new_tokens=4).token_ids == expected
    second.close()


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_a_16_bit_type_without_its_kernels_says_that_it_is_slow(monkeypatch, caplog, dtype, said):
    config = EngineConfig(dtype=dtype)
    assert resolve_dtypes(config, SPECS["relu"], "cpu")[0] == dtype
    assert not caplog.records
    monkeypatch.setattr("hostcompute.ffi.unavailable", lambda: "no library")
    resolve_dtypes(config, SPECS["relu"], "cpu")
    assert resolve_dtypes(config, SPECS["relu"], "gpu")[0] == dtype
    assert [record.message.endswith("are missing: no library") for record in caplog.records] == [True] * said


def test_auto_is_the_checkpoints_type_where_its_kernels_are(monkeypatch, caplog):
    spec, auto = replace(SPECS["relu"], dtype="bfloat16"), EngineConfig()
    assert resolve_dtypes(auto, spec, "cpu") == resolve_dtypes(auto, spec, "gpu") == ("bfloat16", "bfloat16")
    for host_dtype in ("float16", "float32"):  # which fill no bfloat16 pool
        assert resolve_dtypes(EngineConfig(host_dtype=host_dtype), spec, "cpu") == ("float32", host_dtype)
    monkeypatch.setattr("hostcompute.ffi.unavailable", lambda: "no library")
    assert not caplog.records
    assert resolve_dtypes(auto, spec, "cpu") == ("float32", "bfloat16")
    assert [record.message for record in caplog.records] == [
        "weights become float32, the kernels for bfloat16 are missing: no library"
    ]
    assert resolve_dtypes(auto, SPECS["relu"], "cpu") == ("float32", "float32") and len(caplog.records) == 1
