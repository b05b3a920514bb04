"""Who computes a layer's live experts: a scan over two thresholds, then every choice near them. NumPy only.

Residents and absent experts are two classes; within one, experts differ in their tokens alone. The makespan is

    max(host, sum of gpu, busy + copy + sum of fetched gpu, busy + n copy + gpu of the lightest fetched)

for n > 0 fetches. (An idle host's time holds t_sync_s here: any work of its own takes longer, so no choice changes.)
The last two are the flow shop: with fetches heaviest first, the k-th done arriving and all behind it done takes
busy + k copy + (gpu of the k-th and later); from k to k + 1 that changes by copy - gpu_k, which never falls with k, so
the largest is the first or the last. But for the lightest all are sums over experts, so the relaxed problem has
multipliers (Lagrange) under which an expert with w tokens belongs on the device where

    lam cpu(w) > mu gpu(w) (+ nu copy, if absent),

affine in w on both sides: each class is cut at one number of tokens. Residents: heavy ones on the device if
cpu_token_s / cpu_s >= gpu_token_s / gpu_s, light ones otherwise; absent ones: heavy in the first case, either in the
second. The scan tries all pairs of cuts at once. What whole experts lose against the relaxation is made good near the
cuts: all choices for the 10 experts nearest to them are tried (the "core" of a knapsack, Balas and Zemel 1980). Up to
10 live experts that is the optimum. With few more, single experts weigh much: a second core then has half its experts
from all over the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dynajax.policy.experts.records import F64, Assignment, Bools, ExpertCosts, Ints, Work, assigned

CORE = 10  # experts
FEW = 16  # live experts up to which a second core is tried


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """Live experts: R residents, then the absent ones, both heaviest first."""

    residents: int
    seconds: F64  # [2, A] on the device, on the host

    @property
    def live(self) -> int:
        """A."""
        return self.seconds.shape[1]


def scan(work: Work, costs: ExpertCosts) -> Assignment:
    """The assignment of least makespan found; of equal ones one with few fetches.

    Example: copy 1 s, gpu 0.1 s, cpu 1 s, whatever the tokens, one resident and two absent experts: one absent expert
    is fetched, 1.1 s, the host computes the other one, 1 s.
    """
    return scan_with_core(work, costs, CORE)


def scan_with_core(work: Work, costs: ExpertCosts, core: int) -> Assignment:
    """The same with all choices tried for `core` experts at a time; 0: the cuts alone."""
    live = len(work.experts)
    weight = work.tokens.astype(np.float64)
    places = np.lexsort((-weight, ~work.resident))
    weight = weight[places]
    seconds = np.empty((2, live))
    seconds[0], seconds[1] = costs.gpu(weight), costs.cpu(weight)
    line = _Line(int(np.count_nonzero(work.resident)), seconds)
    if line.residents == live > 0 and seconds[0].sum() <= costs.t_sync_s + work.host_busy_s + seconds[1].min():
        return assigned(work, work.resident)  # all are here, and done before the host could be with one
    if live <= core:
        on_line = _best_of(work, costs, line, np.zeros(live, np.bool_), np.arange(live))
    else:
        on_line, cuts = _best_cuts(work, costs, line)
        if core:
            on_line = _best_of(work, costs, line, on_line, _near(cuts, line, core))
        if core and live <= FEW:
            on_line = _best_of(work, costs, line, on_line, _spread(cuts, line, core))
    on_gpu = np.empty(live, np.bool_)
    on_gpu[places] = on_line
    return assigned(work, on_gpu)


def _best_cuts(work: Work, costs: ExpertCosts, line: _Line) -> tuple[Bools, tuple[int, int]]:
    """([A] on the device, the places in the line where residents and where absent experts are cut)."""
    live, residents = line.live, line.residents
    on_line = np.zeros(live, np.bool_)
    if costs.cpu_token_s * costs.gpu_s >= costs.gpu_token_s * costs.cpu_s:
        _, kept, fetched = _scan(work, costs, line, 1, 1)
        on_line[:kept] = on_line[residents : residents + fetched] = True
        return on_line, (kept, residents + fetched)
    heavy_s, kept, fetched = _scan(work, costs, line, -1, 1)
    light_s, kept_too, fetched_light = _scan(work, costs, line, -1, -1)
    if heavy_s <= light_s:
        on_line[residents - kept : residents] = on_line[residents : residents + fetched] = True
        return on_line, (residents - kept, residents + fetched)
    on_line[residents - kept_too : residents] = on_line[live - fetched_light :] = True
    return on_line, (residents - kept_too, live - fetched_light)


def _scan(work: Work, costs: ExpertCosts, line: _Line, resident_step: int, absent_step: int) -> tuple[float, int, int]:
    """(seconds, residents, absent experts) of the best pair of cuts. Steps of -1: light ones are the first."""
    live, residents = line.live, line.residents
    most = min(work.room, live - residents)
    ordered = line.seconds
    if resident_step < 0 or absent_step < 0:
        classes = ordered[:, :residents][:, ::resident_step], ordered[:, residents:][:, ::absent_step]
        ordered = np.concatenate(classes, axis=1)
    sums = np.zeros((2, live + 1))
    np.cumsum(ordered, axis=1, out=sums[:, 1:])
    kept_s = sums[:, residents::-1]  # [2, R + 1] of residents on the device, all of them first
    fetched_s = sums[0, residents : residents + most + 1] - sums[0, residents]  # [fetches + 1]
    host_s = (sums[1, -1] + sums[1, residents] + work.host_busy_s + costs.t_sync_s) - sums[1, residents:][: most + 1]
    total = host_s[:, None] - kept_s[1]
    np.maximum(total, fetched_s[:, None] + kept_s[0], out=total)
    if most:
        last_s = costs.copy_s * np.arange(1, most + 1)
        last_s += ordered[0, residents : residents + most] if absent_step > 0 else ordered[0, residents]
        np.maximum(last_s, fetched_s[1:] + costs.copy_s, out=last_s)
        last_s += work.copy_busy_s
        np.maximum(total[1:], last_s[:, None], out=total[1:])
    fetches, on_host = divmod(_first_best(total), residents + 1)
    return float(total[fetches, on_host]), residents - on_host, fetches


def _near(cuts: tuple[int, int], line: _Line, size: int) -> Ints:
    """Places in the line [size], ascending, that are nearest to the cuts: half of each class if it has so many."""
    live, residents = line.live, line.residents
    kept = min(residents, max(size // 2, size - (live - residents)))
    low = min(max(cuts[0] - (kept + 1) // 2, 0), residents - kept)
    low_absent = min(max(cuts[1] - (size - kept + 1) // 2, residents), live - size + kept)
    near = np.arange(size)
    near[:kept] += low
    near[kept:] += low_absent - kept
    return near


def _spread(cuts: tuple[int, int], line: _Line, size: int) -> Ints:
    """The same, half of them the nearest to the cuts, the others from all over the line."""
    near = _near(cuts, line, size - size // 2)
    is_near = np.zeros(line.live, np.bool_)
    is_near[near] = True
    others = np.flatnonzero(~is_near)
    is_near[others[np.arange(size // 2) * (len(others) - 1) // max(size // 2 - 1, 1)]] = True
    return np.flatnonzero(is_near)


def _best_of(work: Work, costs: ExpertCosts, line: _Line, on_line: Bools, core: Ints) -> Bools:
    """[A] the best of all choices for the experts of the core (places, ascending), the others left where they are."""
    residents = line.residents
    inside = int(np.searchsorted(core, residents))
    bits, last = _choices(len(core))
    parts = np.zeros((4, len(core)))  # of gpu, cpu, gpu of fetched ones, number of fetched ones
    parts[:2] = line.seconds[:, core]
    parts[2, inside:], parts[3, inside:] = parts[0, inside:], 1.0
    gpu_s, cpu_s, fetched_s, count = parts @ bits
    others = on_line.copy()
    others[core] = False
    fixed_s = line.seconds @ others
    total = (line.seconds[1].sum() + work.host_busy_s + costs.t_sync_s - fixed_s[1]) - cpu_s
    np.maximum(total, gpu_s + fixed_s[0], out=total)
    if inside < len(core) or others[residents:].any():
        before = np.flatnonzero(others[residents:]) + residents
        lightest = np.full(len(core) + 1, line.seconds[0, before[-1]] if len(before) else np.inf)
        lightest[inside:-1] = np.minimum(lightest[-1], parts[0, inside:])
        if len(before):
            count += len(before)
            fetched_s += line.seconds[0, before].sum()
        last_s = count * costs.copy_s
        last_s += lightest.take(last)
        fetched_s += costs.copy_s
        np.maximum(last_s, fetched_s, out=last_s)
        last_s += work.copy_busy_s
        np.maximum(total, last_s, out=total, where=count > 0)
        total[count > work.room] = np.inf
    others[core] = bits[:, _first_best(total)] > 0
    return others


def _first_best(seconds: F64) -> int:
    """The first of the least, to seven digits: sums that differ by rounding are ties, on every machine."""
    return int(seconds.astype(np.float32).argmin())


@lru_cache(16)
def _choices(count: int) -> tuple[F64, Ints]:
    """All 2^n ways to choose of n, [n, 2^n] of 0 and 1, and the last that is chosen, -1 for none."""
    number = np.arange(2**count)
    bits = ((number >> np.arange(count)[:, None]) & 1).astype(np.float64)
    return bits, np.frexp(number)[1] - 1
