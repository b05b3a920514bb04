"""Random FFN cases whose gates are exact in float32, so that what is live is never a matter of rounding."""

import os
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from hostcompute import HostPool, NumpyPool, ffn_reference
from hostcompute.packed import GROUP, GROUP_BYTES, is_packed, unpack
from hostcompute.reference import values_reference, wanted_pairs

ISAS = ("portable", "avx2", "avx512", "avx512vnni")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
TYPES = (*DTYPES, *GROUP_BYTES)  # the packed ones by name


def make_pool(isa: str, threads: int) -> HostPool:
    """A pool of one instruction set; skips the test if this CPU lacks it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTCOMPUTE_ISA", isa)
        try:
            return HostPool(threads)
        except RuntimeError as error:
            if "this CPU lacks it" not in str(error):
                raise
            pytest.skip(str(error))


@dataclass(frozen=True, eq=False)
class Case:
    x: np.ndarray  # [B,D]
    bundle: np.ndarray  # [n,P,W,D], or packed
    units: np.ndarray  # [C]
    activation: str
    threshold: float
    admit: np.ndarray | None = None  # [B,C]
    weights: np.ndarray | None = None  # [B,C]

    @property
    def kind(self) -> dict:
        return {"activation": self.activation, "threshold": self.threshold}

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return ffn_reference(self.x, self.bundle, self.units, self.activation, self.threshold, self.admit, self.weights)

    def neurons(self) -> "Case":
        """The same with each inner row a unit, which changes nothing but what is counted."""
        n, parts, inner, *row = self.bundle.shape
        rows = self.bundle.swapaxes(1, 2).reshape(n * inner, parts, 1, *row)
        units = (self.units[:, None] * inner + np.arange(inner)).ravel()
        marks = [None if one is None else np.repeat(one, inner, axis=1) for one in (self.admit, self.weights)]
        return replace(self, bundle=rows, units=units, admit=marks[0], weights=marks[1])

    def live_count(self) -> np.ndarray:
        """[B] What the pools count: live units, with weights live neurons."""
        return (self if self.weights is None else self.neurons()).reference()[1].sum(axis=1)

    def tolerance(self) -> float:
        """What rounding in float32 may add up to: a few parts in a million of the sum of all terms' sizes."""
        sizes = np.abs(unpack(self.bundle) if is_packed(self.bundle) else self.bundle.astype(np.float64))
        weights = None if self.weights is None else np.abs(self.weights)
        y, _ = ffn_reference(np.abs(self.x), sizes, self.units, self.activation, weights=weights)
        return 3e-6 * float(y.max(initial=1.0))


def make_case(
    seed: int,
    *,
    batch: int,
    shape: tuple[int, int, int, int],  # [n,P,W,D]
    count: int,
    dtype: type | str = np.float32,
    activation: str = "relu",
    threshold: float = 0.0,
) -> Case:
    """Eighths times quarters: every product and sum of a gate or an up is exact. Some units may come twice.

    Packed rows are as wide as the groups that D takes.
    """
    rng = np.random.default_rng(seed)
    width = -(-shape[3] // GROUP) * GROUP if isinstance(dtype, str) else shape[3]
    x = rng.integers(-8, 9, (batch, width)).astype(np.float32) / 4
    bundle = (
        pack_random(rng, shape, dtype) if isinstance(dtype, str) else (rng.integers(-8, 9, shape) / 8).astype(dtype)
    )
    units = rng.integers(0, shape[0], count).astype(np.int32)
    return Case(x, bundle, units, activation, threshold)


def pack_random(rng: np.random.Generator, shape: tuple[int, int, int, int], name: str) -> np.ndarray:
    """Values of at most one, and scales that are powers of two, so that sums are exact: [n,P,W,groups,bytes]."""
    groups, size = -(-shape[3] // GROUP), GROUP_BYTES[name]
    codes = rng.integers(0, 256, (*shape[:3], groups * (size - 2)), np.uint8)
    smallest = {"int8": -9, "int4": -5}[name]
    scales = np.exp2(rng.integers(smallest, smallest + 3, (*shape[:3], groups))).astype(np.float16)
    return np.concatenate([codes, scales.view(np.uint8)], axis=3).reshape(*shape[:3], groups, size)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small and awkward shapes: odd widths, experts, two parts, no unit at all, several blocks per thread."""
    neurons = draw(st.sampled_from([1, 2, 5, 70, 300]))
    inner = draw(st.sampled_from([1, 1, 3]))
    width = draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 256])))
    batch = draw(st.one_of(st.integers(1, 9), st.just(70)))
    activation = draw(st.sampled_from(["relu", "fatrelu", "silu", "drelu"]))
    seed = draw(st.integers(0, 2**32 - 1))
    case = make_case(
        seed,
        batch=batch,
        shape=(neurons, 3 if activation == "drelu" else draw(st.sampled_from([2, 3])), inner, width),
        count=draw(st.sampled_from([0, 1, 3, neurons])),
        dtype=draw(st.sampled_from(TYPES)),
        activation=activation,
        threshold=draw(st.sampled_from([0.0, 0.5, 2.0])) if activation == "fatrelu" else 0.0,
    )
    share = draw(st.sampled_from([None, 0.0, 0.3, 0.9]))
    return case if share is None else admitting(case, share, seed)


def admitting(case: Case, share: float, seed: int = 0) -> Case:
    """The case with marks at random, of which about this share admits. Any other number than 0 does."""
    rng = np.random.default_rng(seed)
    shape = (len(case.x), len(case.units))
    marks = np.where(rng.random(shape) < share, rng.integers(1, 256, shape), 0)
    return replace(case, admit=marks.astype(np.uint8))


def routed(case: Case, top_k: int, seed: int = 0) -> Case:
    """The case with weights at random, of either sign: of each row's units so many have one that is not zero."""
    rng = np.random.default_rng(seed)
    shape = (len(case.x), len(case.units))
    chosen = rng.random(shape).argsort(axis=1) < top_k
    signs = np.where(rng.random(shape) < 0.2, -1, 1)
    return replace(case, weights=np.where(chosen, rng.uniform(0.1, 1, shape) * signs, 0).astype(np.float32))


def check(pool: HostPool | NumpyPool, case: Case, *, skip_zeros: bool) -> None:
    wanted, live = case.reference()
    out = np.full(case.x.shape, np.nan, np.float32)
    marks = np.full(live.shape, 7, np.uint8)
    values = np.full(live.shape, np.nan, np.float32) if case.bundle.shape[2] == 1 else None
    given = {"admit": case.admit, "weights": case.weights, "out": out, "live": marks, "values": values}
    result = pool.ffn(case.x, case.bundle, case.units, **case.kind, skip_zeros=skip_zeros, **given)
    assert result.y is out
    np.testing.assert_allclose(out, wanted, rtol=0, atol=case.tolerance())
    np.testing.assert_array_equal(marks, live)
    np.testing.assert_array_equal(result.live_count, case.live_count())
    assert result.bytes_read == bytes_needed(case, skip_zeros=skip_zeros)
    if values is not None:
        h, _ = values_reference(
            case.x, case.bundle, case.units, case.activation, case.threshold, case.admit, case.weights
        )
        np.testing.assert_allclose(values, h[:, :, 0], rtol=1e-5, atol=1e-6)
        assert not values[h[:, :, 0] == 0].any()


def bytes_needed(case: Case, *, skip_zeros: bool) -> int:
    """Every gate row; up and down of the rows that some token needs, or of all. Of units that are wanted or admitted.

    Up is needed where the gate is not zero, and so is down, but with drelu only where up is not zero either.
    """
    single = case.neurons()
    by_gate = replace(single, activation="relu") if case.activation == "drelu" else single
    skips = skip_zeros and (case.activation != "silu" or (case.admit is not None and case.weights is None))
    wanted = np.ones(len(single.units), np.bool_)
    if single.admit is not None:
        wanted = single.admit.any(axis=0)
    if single.weights is not None:
        wanted = wanted_pairs(single.weights, single.admit).any(axis=0)
    downs, ups = (
        int((wanted & (one.reference()[1] | (not skips)).any(axis=0)).sum()) if len(case.x) else 0
        for one in (single, by_gate)
    )
    rows = wanted.sum() + (ups if case.bundle.shape[1] == 3 else 0) + downs
    return int(rows) * case.bundle[:1, 0, 0].nbytes


def task_count() -> int:
    """Threads of this process, as the system counts them."""
    return len(os.listdir("/proc/self/task"))
