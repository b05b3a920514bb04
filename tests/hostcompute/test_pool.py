"""What the pools refuse, how they open and close, and what happens without the library."""

import gc
import logging
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hostcompute import HostPool, NumpyPool, default_threads, library, open_pool
from tests.hostcompute.cases import ISAS, make_case, task_count

CASE = make_case(0, batch=2, shape=(6, 3, 1, 8), count=3)


@pytest.fixture(params=[HostPool, NumpyPool])
def either(request: pytest.FixtureRequest) -> Iterator[HostPool | NumpyPool]:
    with request.param(1) as pool:
        yield pool


def units(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


BAD_CALLS = {
    "x must be float32, got float64": {"x": CASE.x.astype(np.float64)},
    "x must have shape [any, 8], got [2, 7]": {"x": CASE.x[:, :7].copy()},
    "x must have shape [any, 8], got [8]": {"x": CASE.x[0]},
    "x must be C-contiguous": {"x": np.asfortranarray(CASE.x)},
    "bundle must be float32, float16 or bfloat16, or packed in uint8, got int8": {
        "bundle": CASE.bundle.astype(np.int8)
    },
    "a packed bundle must be uint8 [n,P,W,groups,34 (int8) or 18 (int4)], got shape (6, 3, 1, 8)": {
        "bundle": np.zeros((6, 3, 1, 8), np.uint8)
    },
    "a packed bundle must be uint8 [n,P,W,groups,34 (int8) or 18 (int4)], got shape (6, 3, 1, 2, 20)": {
        "bundle": np.zeros((6, 3, 1, 2, 20), np.uint8)
    },
    "bundle must be [n, 2 or 3, W >= 1, D >= 1], got shape (6, 4, 1, 2, 18)": {
        "bundle": np.zeros((6, 4, 1, 2, 18), np.uint8)
    },
    "x must have shape [any, 64], got [2, 8]": {"bundle": np.zeros((6, 3, 1, 2, 34), np.uint8)},
    "bundle must be float32, float16 or bfloat16, or packed in uint8, got >f4": {"bundle": CASE.bundle.astype(">f4")},
    "bundle must be [n, 2 or 3, W >= 1, D >= 1], got shape (6, 4, 1, 8)": {
        "bundle": np.zeros((6, 4, 1, 8), np.float32)
    },
    "bundle must be [n, 2 or 3, W >= 1, D >= 1], got shape (6, 3, 8)": {"bundle": CASE.bundle[:, :, 0]},
    "bundle must be C-contiguous": {"bundle": np.zeros((6, 3, 1, 16), np.float32)[..., ::2]},
    "units must be int32, got int64": {"units": np.arange(3)},
    "units must have shape [any], got [1, 3]": {"units": CASE.units[None]},
    "units must be C-contiguous": {"units": np.arange(6, dtype=np.int32)[::2]},
    "units must be in [0, 6), got 6 at index 1": {"units": units(5, 6, 7)},
    "units must be in [0, 6), got -1 at index 0": {"units": units(-1)},
    "activation must be one of relu, fatrelu, silu, drelu, got 'gelu'": {"activation": "gelu"},
    "threshold must be 0, or finite with fatrelu, got 0.5 with relu": {"threshold": 0.5},
    "threshold must be 0, or finite with fatrelu, got 0.5 with drelu": {"activation": "drelu", "threshold": 0.5},
    "bundle must have 3 parts (gate, up, down) with drelu, got 2": {
        "activation": "drelu",
        "bundle": np.zeros((6, 2, 1, 8), np.float32),
    },
    "threshold must be 0, or finite with fatrelu, got nan with fatrelu": {"activation": "fatrelu", "threshold": np.nan},
    "out must have shape [2, 8], got [1, 8]": {"out": np.empty((1, 8), np.float32)},
    "out must be float32, got float16": {"out": np.empty((2, 8), np.float16)},
    "out must be writeable": {"out": np.broadcast_to(np.float32(0), (2, 8)).copy()},
    "live must be uint8, got bool": {"live": np.empty((2, 3), np.bool_)},
    "live must have shape [2, 3], got [3, 2]": {"live": np.empty((3, 2), np.uint8)},
    "admit must be uint8, got bool": {"admit": np.ones((2, 3), np.bool_)},
    "admit must have shape [2, 3], got [3]": {"admit": np.ones(3, np.uint8)},
    "admit must be C-contiguous": {"admit": np.ones((3, 2), np.uint8).T},
    "weights must be float32, got float64": {"weights": np.ones((2, 3))},
    "weights must have shape [2, 3], got [3, 2]": {"weights": np.ones((3, 2), np.float32)},
    "weights must be C-contiguous": {"weights": np.ones((3, 2), np.float32).T},
    "values must be float32, got float64": {"values": np.empty((2, 3))},
    "values must have shape [2, 3], got [2, 8]": {"values": np.empty((2, 8), np.float32)},
    "values must be C-contiguous": {"values": np.empty((3, 2), np.float32).T},
    "values must be writeable": {"values": np.broadcast_to(np.float32(0), (2, 3)).copy()},
    "bundle must have W = 1 with values, got 4": {
        "bundle": np.zeros((6, 3, 4, 8), np.float32),
        "values": np.empty((2, 3), np.float32),
    },
}
BAD_CALLS["out must be writeable"]["out"].flags.writeable = False
BAD_CALLS["values must be writeable"]["values"].flags.writeable = False


@pytest.mark.parametrize("message", BAD_CALLS)
def test_ffn_names_what_is_wrong(either, message):
    arguments = {"x": CASE.x, "bundle": CASE.bundle, "units": CASE.units, "activation": "relu"} | BAD_CALLS[message]
    with pytest.raises(ValueError) as caught:
        either.ffn(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("out must have shape [3, 3, 1, 8]", {"out": np.empty((2, 3, 1, 8), np.float32)}),
        ("out must be float32, got float16", {"out": np.empty((3, 3, 1, 8), np.float16)}),
        ("units must be in [0, 6), got 9 at index 0", {"units": units(9, 0, 0)}),
    ],
)
def test_gather_names_what_is_wrong(either, message, bad):
    arguments = {"bundle": CASE.bundle, "units": CASE.units, "out": np.empty((3, 3, 1, 8), np.float32)} | bad
    with pytest.raises(ValueError) as caught:
        either.gather(**arguments)
    assert message in str(caught.value)


def test_nothing_is_written_when_a_unit_is_out_of_range(either):
    out = np.full((2, 8), 5, np.float32)
    with pytest.raises(ValueError, match="got 6 at index 1"):
        either.ffn(CASE.x, CASE.bundle, units(0, 6), activation="relu", out=out)
    assert (out == 5).all()


@pytest.mark.parametrize("kind", [HostPool, NumpyPool, open_pool])
@pytest.mark.parametrize("threads", [0, -1, 2000])
def test_the_number_of_threads_has_bounds(kind, threads):
    with pytest.raises(ValueError, match=rf"threads must be in \[1, 1024\], got {threads}"):
        kind(threads)


def test_a_closed_pool_refuses_calls_and_may_be_closed_again(either):
    either.close()
    with pytest.raises(ValueError, match="pool must be open"):
        either.ffn(CASE.x, CASE.bundle, CASE.units, activation="relu")
    either.close()


def test_threads_end_with_the_pool():
    """As many as no other test asks for: pools share theirs."""
    before = task_count()
    with HostPool(11):
        assert task_count() == before + 10
    assert task_count() == before


def test_threads_end_with_a_pool_that_nobody_closed():
    before = task_count()
    pool = HostPool(12)
    assert task_count() == before + 11
    del pool
    gc.collect()
    assert task_count() == before


def test_pools_of_as_many_threads_share_them():
    """They end with the last one; closing the first changes nothing for the other."""
    before, wanted = task_count(), CASE.reference()[0]
    first, second = HostPool(11), HostPool(11)
    assert task_count() == before + 10
    first.close()
    assert task_count() == before + 10
    np.testing.assert_allclose(second.ffn(CASE.x, CASE.bundle, CASE.units, **CASE.kind).y, wanted, atol=1e-4)
    second.close()
    assert task_count() == before


def test_pools_that_share_threads_may_be_used_side_by_side():
    """Their calls come one after the other."""
    wanted, wrong = CASE.reference()[0], []

    def compute() -> None:
        for _ in range(200):
            with HostPool(3) as pool:
                y = pool.ffn(CASE.x, CASE.bundle, CASE.units, **CASE.kind).y
            if not np.allclose(y, wanted, atol=1e-4):
                wrong.append(y)

    workers = [threading.Thread(target=compute) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong and not any(worker.is_alive() for worker in workers)


def test_a_dead_bundle_is_forgotten_and_its_id_may_come_back():
    """Many short-lived arenas of different contents: an entry of a dead one must never answer for a new one."""
    with HostPool(1) as pool:
        for seed in range(50):
            case = make_case(seed, batch=1, shape=(4 + seed % 3, 3, 1, 16), count=4)
            wanted, _ = case.reference()
            y = pool.ffn(case.x, case.bundle, case.units, **case.kind).y
            np.testing.assert_allclose(y, wanted, rtol=0, atol=case.tolerance())
            del case
        gc.collect()
        assert not pool._known


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("HOSTCOMPUTE_ISA", "sse9")
    with pytest.raises(ValueError, match="HOSTCOMPUTE_ISA must be portable, avx2, avx512 or avx512vnni, got 'sse9'"):
        HostPool(1)


def test_a_missing_instruction_set_is_refused_with_the_remedy():
    error = library.creation_error(library.MISSING_ISA, "avx512", 1)
    assert isinstance(error, RuntimeError)
    assert "HOSTCOMPUTE_ISA=avx512: this CPU lacks it; use portable or unset the variable" in str(error)


def test_an_empty_folder_holds_no_library(tmp_path):
    with pytest.raises(RuntimeError, match="no compiled library _native"):
        library.load_library(tmp_path)


def test_a_file_that_is_no_library_is_named(tmp_path):
    (tmp_path / "_native.so").write_text("not a library")
    with pytest.raises(RuntimeError, match=r"_native\.so: "):
        library.load_library(tmp_path)


def test_without_a_fitting_library_numpy_computes_after_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(library, "ABI_VERSION", 999)
    with caplog.at_level(logging.DEBUG), open_pool(2) as pool:
        assert isinstance(pool, NumpyPool)
        wanted, _ = CASE.reference()
        np.testing.assert_allclose(pool.ffn(CASE.x, CASE.bundle, CASE.units, **CASE.kind).y, wanted, atol=1e-4)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("hostcompute", logging.WARNING)
    assert "999 is needed" in record.message and "setup.py build_ext --inplace" in record.message


def test_open_pool_takes_the_library_when_it_is_there(caplog):
    with caplog.at_level(logging.DEBUG), open_pool(2) as pool:
        assert isinstance(pool, HostPool)
        assert (pool.threads, pool.isa in ISAS) == (2, True)
    assert not caplog.records


def test_default_threads_counts_the_cores_of_the_affinity_mask():
    cpus = os.sched_getaffinity(0)
    assert 1 <= default_threads() <= len(cpus)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        assert default_threads() == 1
    finally:
        os.sched_setaffinity(0, cpus)
