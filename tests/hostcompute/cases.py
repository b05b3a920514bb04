"""Random FFN cases whose gates are exact in float32, so that what is live is never a matter of rounding."""

import os
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from hostcompute import HostPool, ffn_reference

ISAS = ("portable", "avx2", "avx512")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


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
    bundle: np.ndarray  # [n,P,W,D]
    units: np.ndarray  # [C]
    activation: str
    threshold: float

    @property
    def kind(self) -> dict:
        return {"activation": self.activation, "threshold": self.threshold}

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return ffn_reference(self.x, self.bundle, self.units, self.activation, self.threshold)

    def tolerance(self) -> float:
        """What rounding in float32 may add up to: a few parts in a million of the sum of all terms' sizes."""
        sizes = np.abs(self.bundle.astype(np.float64))
        y, _ = ffn_reference(np.abs(self.x), sizes, self.units, self.activation)
        return 3e-6 * float(y.max(initial=1.0))


def make_case(
    seed: int,
    *,
    batch: int,
    shape: tuple[int, int, int, int],  # [n,P,W,D]
    count: int,
    dtype: type = np.float32,
    activation: str = "relu",
    threshold: float = 0.0,
) -> Case:
    """Eighths times quarters: every product and sum of a gate or an up is exact. Some units may come twice."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (batch, shape[3])).astype(np.float32) / 4
    bundle = (rng.integers(-8, 9, shape) / 8).astype(dtype)
    units = rng.integers(0, shape[0], count).astype(np.int32)
    return Case(x, bundle, units, activation, threshold)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small and awkward shapes: odd widths, experts, two parts, no unit at all, several blocks per thread."""
    neurons = draw(st.sampled_from([1, 2, 5, 70, 300]))
    inner = draw(st.sampled_from([1, 1, 3]))
    width = draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 256])))
    batch = draw(st.one_of(st.integers(1, 9), st.just(70)))
    activation = draw(st.sampled_from(["relu", "fatrelu", "silu", "drelu"]))
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        batch=batch,
        shape=(neurons, 3 if activation == "drelu" else draw(st.sampled_from([2, 3])), inner, width),
        count=draw(st.sampled_from([0, 1, 3, neurons])),
        dtype=draw(st.sampled_from(DTYPES)),
        activation=activation,
        threshold=draw(st.sampled_from([0.0, 0.5, 2.0])) if activation == "fatrelu" else 0.0,
    )


def task_count() -> int:
    """Threads of this process, as the system counts them."""
    return len(os.listdir("/proc/self/task"))
