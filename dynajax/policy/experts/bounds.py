"""What no cache that loads on demand can exceed on a routing trace, with all of the future known. NumPy and SciPy.

A layer has G slots. A step uses a set of experts; one that is in a slot is a hit, and counts its weight. After a step
any of the used ones may be loaded, or bypass the cache, and anything may be dropped. So an expert is a hit at a use
exactly if it was held ever since its use before (or since the start): a cache holds intervals between uses, at most G
at a time. Both bounds are optima of that problem, for loads without limit.
They bound caches that load what is used when it is used. A cache that brings in experts between their uses (background
swaps, prefetch) holds shorter intervals and can, in principle, exceed them; nothing exceeds `ceiling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

from dynajax.policy.experts.records import I32, Bools, Ints

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Bound:
    """Sums over the steps of one layer."""

    hits: int  # experts found in a slot
    tokens: int  # tokens at those
    loads: int  # of the solution found; other solutions with the same hits may need fewer


def min_bypass(tokens: Ints, bucket: I32, slots: int) -> Bound:
    """Most hits for tokens [T, E]: Belady's MIN with bypass. bucket: the experts that are there at the start.

    After each step the G experts are kept whose next use is nearest, of those there and those used. Exact for equal
    weights (k-track interval scheduling: drop the interval that ends last).
    """
    live = tokens > 0
    steps, experts = live.shape
    following = np.full((steps + 1, experts), _NEVER)
    for step in range(steps - 1, -1, -1):
        following[step] = np.where(live[step], step, following[step + 1])
    held = np.zeros(experts, np.bool_)
    held[bucket] = True
    hits = hit_tokens = loads = 0
    for step in range(steps):
        found = live[step] & held
        hits, hit_tokens = hits + int(found.sum()), hit_tokens + int(tokens[step, found].sum())
        candidates = np.flatnonzero((held | live[step]) & (following[step + 1] < _NEVER))
        order = np.argsort(following[step + 1, candidates], kind="stable")
        held_next = np.zeros(experts, np.bool_)
        held_next[candidates[order[:slots]]] = True
        loads += int((held_next & ~held).sum())
        held = held_next
    return Bound(hits, hit_tokens, loads)


def weighted_bypass(tokens: Ints, bucket: I32, slots: int) -> Bound:
    """Most tokens at hits for tokens [T, E], exactly.

    A linear program: intervals between uses, at most G over every gap between two steps. Each interval is a run of
    gaps, so the matrix is totally unimodular and the optimum whole; written as a flow of G along the steps, where an
    interval is an arc from behind a use to its next, worth that use's tokens.
    """
    steps = len(tokens)
    expert, begin, end, worth = _intervals(tokens, bucket)
    if not len(begin) or slots == 0:
        return Bound(0, 0, 0)
    arcs = len(begin)
    tails, heads = np.concatenate((begin, np.arange(steps))), np.concatenate((end, np.arange(1, steps + 1)))
    columns = np.arange(arcs + steps)
    values = np.concatenate((np.ones(arcs + steps), -np.ones(arcs + steps)))
    balance = csc_array(
        (values, (np.concatenate((tails, heads)), np.tile(columns, 2))), shape=(steps + 1, arcs + steps)
    )
    supply = np.zeros(steps + 1)
    supply[0], supply[-1] = slots, -slots
    bounds = np.zeros((arcs + steps, 2))
    bounds[:arcs, 1], bounds[arcs:, 1] = 1, slots
    gain = np.concatenate((-worth.astype(np.float64), np.zeros(steps)))
    found = linprog(gain, A_eq=balance, b_eq=supply, bounds=bounds, method="highs-ds")
    assert found.status == 0, found.message
    held = found.x[:arcs] > 0.5
    assert np.abs(found.x[:arcs] - held).max() < 1e-6, "the optimum of a flow is whole"
    return Bound(int(held.sum()), int(worth[held].sum()), _loads(expert, begin, end, held))


def ceiling(tokens: Ints, slots: int) -> tuple[int, int]:
    """(hits, tokens) if every step found its best G experts in the slots: no cache has more, whatever it moves when."""
    best = np.sort(tokens, axis=1)[:, ::-1][:, :slots]
    return int(np.count_nonzero(best)), int(best.sum())


def lru_on_demand(tokens: Ints, bucket: I32, slots: int) -> Bound:
    """What an engine without a host half gets for tokens [T, E]: every miss is loaded, one after the other, in place of
    the least recently used, be it one of this step that has been computed. Residents first, then misses by id.

    By LRU's stack property the slots hold the G experts used last. Planners never give up a live expert, so where more
    are live than there are slots their `lru` loads far less than this one, and hits more.
    """
    steps, experts = tokens.shape
    used = np.full(experts, -1, np.int64)  # when, in uses of one expert each
    used[bucket] = np.arange(len(bucket))
    hits = hit_tokens = loads = 0
    for step in range(steps):
        held = np.zeros(experts, np.bool_)
        held[np.argsort(-used, kind="stable")[:slots]] = True
        held &= used >= 0
        live = np.flatnonzero(tokens[step])
        found = live[held[live]]
        missed = live[~held[live]]
        hits, hit_tokens = hits + len(found), hit_tokens + int(tokens[step, found].sum())
        loads += len(missed) if slots else 0
        order = np.concatenate((found, missed))
        used[order] = used.max() + 1 + np.arange(len(order))
    return Bound(hits, hit_tokens, loads)


def _intervals(tokens: Ints, bucket: I32) -> tuple[Ints, Ints, Ints, Ints]:
    """(expert, begin, end, worth): held over the gaps [begin, end) the expert is a hit in step end - 1.

    Gap t lies before step t. Sorted by expert, then by time.
    """
    expert, step = np.nonzero(tokens.T)
    again = np.zeros(len(expert), np.bool_)
    again[1:] = expert[1:] == expert[:-1]
    begin = np.zeros(len(expert), np.int64)
    begin[1:] = np.where(again[1:], step[:-1] + 1, 0)
    possible = again | np.isin(expert, bucket)
    return expert[possible], begin[possible], step[possible] + 1, tokens[step, expert][possible]


def _loads(expert: Ints, begin: Ints, end: Ints, held: Bools) -> int:
    """Held intervals that do not go on from one held before, nor from the start."""
    follows = np.zeros(len(begin), np.bool_)
    follows[1:] = held[:-1] & (expert[:-1] == expert[1:]) & (end[:-1] == begin[1:])
    return int(np.count_nonzero(held & ~follows & (begin > 0)))
