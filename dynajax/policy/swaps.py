"""Which absent units to bring in, and which residents to give up. NumPy only."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_LOW_WORD = 2**32 - 1
_NONE = np.empty(0, np.int32)


@lru_cache
def swap_ladder(most: int) -> tuple[int, ...]:
    """The numbers of swaps that are ever made, up to `most`: few, so that few programs are compiled.

    1, 2, 4, 8, 12, 16, 24, 32, and from there on each at most 1.5 times the one before.
    """
    rungs = [1, 2, 4, 8, 12, 16, 24, 32]
    while rungs[-1] < most:
        rungs.append(rungs[-1] * 3 // 2)
    return tuple(rung for rung in rungs if rung <= most)


def rung_below(count: int, ladder: tuple[int, ...]) -> int:
    """The largest rung <= count, 0 if there is none: a plan never sends a row that nobody asked for."""
    at = bisect_right(ladder, count)
    return ladder[at - 1] if at else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a swap must earn: more than `pays_at` uses on the device, and all together `fixed` uses more.

    The worth of a unit in uses is a + horizon * f.
    """

    horizon: float  # tokens for which f is taken to hold
    pays_at: float
    fixed: float


def keep_slots(f: F32, bucket: I32, count: int) -> Bools:
    """[G] true in the `count` slots whose units have the highest f; of equal ones the lower slots."""
    keep = np.zeros(len(bucket), np.bool_)
    if count >= len(bucket):
        keep[:] = True
    elif count > 0:
        keys = _keys(f.take(bucket), descending_ids=True)
        keep[_ids(np.partition(keys, len(keys) - count)[len(keys) - count :], len(keys))] = True
    return keep


def plan_swaps(
    a: F32 | None,  # [F] predicted live in this step; None: nothing is predicted
    f: F32,  # [F]
    lam: float,
    bucket: I32,  # [G] slot -> unit
    absent: Bools,  # [F] may come in
    evictable: Bools,  # [G] may be given up
    most: int,  # a rung of the ladder
    gain: Gain | None,  # None: the paper's rule
) -> tuple[I32, I32]:
    """Greedy placement of one layer (DynamicInfer, "hierarchical neuron cache"): (units, the slots they take).

    The best absent units replace the worst residents while that raises the total of v = a + lam * f, and with
    `gain` only where it pays; the number is rounded down to a rung. Equal units by id, equal residents by slot.
    No other choice of as many swaps raises the total more. Reads its inputs, changes none.
    Example: bucket [1, 3], v 1:0.5 3:0.1 4:0.9, one swap: slot 1 gets unit 4.
    """
    most = min(most, len(f), len(bucket))
    if most < 1:
        return _NONE, _NONE
    v = f * np.float32(lam)
    if a is not None:
        v += a
    inside = v.take(bucket)
    entering = _keys(v, descending_ids=True)
    np.copyto(entering, -1, where=~absent)
    entering = np.sort(np.partition(entering, len(v) - most)[len(v) - most :])[::-1]
    leaving = _keys(inside, descending_ids=False)
    np.copyto(leaving, np.iinfo(np.int64).max, where=~evictable)
    leaving = np.sort(np.partition(leaving, most - 1)[:most])
    better = (entering >> 32) > (leaving >> 32)  # keys order as their values; -1 and the maximum never pass
    count = int(np.count_nonzero(better))  # the pairs get worse and worse: the better ones come first
    units, slots = _ids(entering[:count], len(v)), (leaving[:count] & _LOW_WORD).astype(np.int32)
    if gain is not None:
        worth = _profit(a, f, bucket[slots], units, gain)
        pays = np.flatnonzero(worth > 0)
        pays = pays[: rung_below(len(pays), swap_ladder(most))]
        pays = pays[: len(pays) if worth[pays].sum() > gain.fixed else 0]
        return units[pays], slots[pays]
    count = rung_below(count, swap_ladder(most))
    return units[:count], slots[:count]


def _profit(a: F32 | None, f: F32, residents: I32, units: I32, gain: Gain) -> npt.NDArray[np.float64]:
    """Uses that `units` are worth beyond those of `residents` and the price of the move."""
    uses = (f[units].astype(np.float64) - f[residents]) * gain.horizon - gain.pays_at
    return uses if a is None else uses + a[units] - a[residents]


def _keys(values: F32, *, descending_ids: bool) -> I64:
    """[n] unique integers that order as the values (>= 0), equal values by index; `_ids` gives the indices back.

    Unique keys have one right partition: a replay on another machine, whose NumPy partitions otherwise, plans alike.
    """
    order = np.arange(len(values) - 1, -1, -1) if descending_ids else np.arange(len(values))
    return (values.view(np.int32).astype(np.int64) << 32) | order


def _ids(keys: I64, count: int) -> I32:
    """The indices behind keys with descending ids."""
    return (count - 1 - (keys & _LOW_WORD)).astype(np.int32)
