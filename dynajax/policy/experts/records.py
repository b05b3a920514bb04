"""What one layer-step asks of device and host, what its experts cost, and how long an assignment takes. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
Ints = npt.NDArray[Any]  # whole numbers of any width
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds, all > 0, measured while both sides work; an expert with w tokens takes an affine time on each side."""

    t0_s: float  # per transfer; an expert is a transfer of its own, so that the device can start on it
    t_trans_s: float  # per expert: gather and link
    gpu_s: float  # per expert: reading its weights on the device
    gpu_token_s: float
    cpu_s: float  # per expert: reading its weights in host memory
    cpu_token_s: float
    t_sync_s: float  # per layer whose host has anything to compute

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} must be > 0 seconds, got {value!r}")

    @property
    def copy_s(self) -> float:
        """Bringing one expert in."""
        return self.t0_s + self.t_trans_s

    def gpu(self, tokens: Any) -> Any:
        """Computing an expert with so many tokens on the device."""
        return self.gpu_s + self.gpu_token_s * tokens

    def cpu(self, tokens: Any) -> Any:
        """The same on the host."""
        return self.cpu_s + self.cpu_token_s * tokens

    def transfers_in(self, seconds: float) -> int:
        """Experts that are brought in within `seconds`."""
        return max(0, int(seconds / self.copy_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One layer-step: A live experts, none of which is on its way to the device."""

    experts: I32  # [A] ids
    tokens: Ints  # [A] > 0
    resident: Bools  # [A] on the device now
    room: int  # absent experts that may be brought in now
    copy_busy_s: float = 0.0  # the link is busy that long with earlier transfers
    host_busy_s: float = 0.0  # the host has that much to do beside these experts
    last_used: Ints | None = None  # [A] when each expert was live last, the larger the later

    def __post_init__(self) -> None:
        assert self.experts.shape == self.tokens.shape == self.resident.shape and self.experts.ndim == 1
        assert self.room >= 0 and self.copy_busy_s >= 0 and self.host_busy_s >= 0


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Which of a Work's experts the device computes; the host computes the others."""

    on_gpu: Bools  # [A]
    fetch: Ints  # [n] places in the Work of those that come in first, in this order: heaviest first


def assigned(work: Work, on_gpu: Bools) -> Assignment:
    """The Assignment with its order of transfers; of equally heavy experts the one that stands first comes first."""
    fetch = (on_gpu & ~work.resident).nonzero()[0]
    assert len(fetch) <= work.room, f"{len(fetch)} fetches for {work.room} places"
    if len(fetch) > 1:
        fetch = fetch[(-work.tokens[fetch]).argsort(kind="stable")]
    return Assignment(on_gpu, fetch)


def makespan(work: Work, on_gpu: Bools, costs: ExpertCosts) -> Any:
    """Seconds [...] until both sides are done, for assignments on_gpu [..., A].

    Host: its experts one after the other, and t_sync_s if it has any. Device: a flow shop, the copy engine in front of
    the GPU; residents first, then those that are fetched, by Johnson's rule (1954): copies all take the same time, so
    heaviest first is an optimal order, and no copy waits. Every transfer is an expert, `copy_s`; the link is free after
    `copy_busy_s`. Residents may be computed by the host as well. `room` is not looked at.
    DALI (arXiv 2602.03495) minimises max(T_cpu, T_gpu) too; what its T_gpu is was not found, this one is ours.
    """
    gpu, cpu = costs.gpu(work.tokens), costs.cpu(work.tokens)
    on_host = ~on_gpu
    host_s = work.host_busy_s + on_host @ cpu
    host_s = host_s + costs.t_sync_s * (on_host.any(axis=-1) | (work.host_busy_s > 0))
    device_s = on_gpu @ gpu
    absent = np.flatnonzero(~work.resident)
    absent = absent[np.argsort(-work.tokens[absent], kind="stable")]
    fetched = on_gpu[..., absent]
    arrives_s = work.copy_busy_s + costs.copy_s * np.cumsum(fetched, axis=-1)
    then_s = np.cumsum((fetched * gpu[absent])[..., ::-1], axis=-1)[..., ::-1]  # its own work and that behind it
    late_s = np.where(fetched, arrives_s + then_s, 0.0).max(axis=-1, initial=0.0)
    return np.maximum(np.maximum(host_s, device_s), late_s)
