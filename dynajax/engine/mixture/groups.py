"""The tokens of a step sorted by the experts they go to, in the padded shapes that programs take. NumPy only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.programs import bucket_of

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

TOKENS = (8, 32, 128)  # sizes of a group, as far as so many tokens can meet


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Some experts, and the tokens that go to each; what pads has weight 0 and repeats the first expert."""

    experts: I32  # [A]
    rows: I32  # [A, C]
    weights: F32  # [A, C]


class Routed:
    """Where R tokens go: ids and weights [R, K]. rows [R]: their numbers in the program's batch; None: 0 .. R-1."""

    def __init__(self, ids: I32, weights: F32, rows: npt.NDArray | None = None):
        self.ids, self.weights, self._rows = ids, weights, rows
        flat = ids.reshape(-1)
        self._order = np.argsort(flat, kind="stable")
        self._sorted = flat[self._order]

    def counts(self, experts: int) -> npt.NDArray[np.int64]:
        """Tokens of every expert [E]."""
        return np.bincount(self._sorted, minlength=experts)

    def spread(self, wanted: I32) -> tuple[npt.NDArray[np.bool_], F32]:
        """[R] which tokens go to one of the wanted experts, and the weights [R', C] of those tokens; 0: not there."""
        table = np.zeros((len(self.ids), 1 + int(max(wanted.max(), self._sorted[-1]))), np.float32)
        table[np.arange(len(self.ids))[:, None], self.ids] = self.weights
        mine = table[:, wanted]
        some = (mine != 0).any(axis=1)
        return some, np.ascontiguousarray(mine[some])

    def groups(self, wanted: I32, experts: Sequence[int], tokens: Sequence[int]) -> Generator[Group]:
        """The wanted experts with their tokens, in groups of the sizes that programs have: A in `experts`, C in
        `tokens`, both ascending. An expert with more tokens than the largest C comes in several groups."""
        first = np.searchsorted(self._sorted, wanted, "left")
        count = np.searchsorted(self._sorted, wanted, "right") - first
        for largest in range(0, int(count.max(initial=0)), tokens[-1]):
            left = np.minimum(count - largest, tokens[-1])
            sizes = np.array([bucket_of(n, tuple(tokens)) if n > 0 else 0 for n in left.tolist()])
            for size in tokens:
                members = np.flatnonzero(sizes == size)
                for at in range(0, len(members), experts[-1]):
                    some = members[at : at + experts[-1]]
                    yield self._group(wanted[some], first[some] + largest, left[some], (experts, size))

    def _group(self, wanted: I32, first: npt.NDArray, count: npt.NDArray, shape: tuple[Sequence[int], int]) -> Group:
        padded, size = bucket_of(len(wanted), tuple(shape[0])), shape[1]
        experts = np.full(padded, wanted[0], np.int32)
        rows, weights = np.zeros((padded, size), np.int32), np.zeros((padded, size), np.float32)
        there = np.arange(size)[None, :] < count[:, None]
        pairs = self._order[np.where(there, first[:, None] + np.arange(size)[None, :], 0)]
        number = pairs // self.ids.shape[1]
        experts[: len(wanted)] = wanted
        rows[: len(wanted)] = np.where(there, number if self._rows is None else self._rows[number], 0)
        weights[: len(wanted)] = np.where(there, self.weights.reshape(-1)[pairs], np.float32(0))
        return Group(experts, rows, weights)


def token_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes C of a group where so many tokens can meet at an expert. Example: 1 -> 1; 40 -> 8, 32, 40."""
    return tuple(sorted({min(size, tokens) for size in TOKENS} | {tokens} if tokens < TOKENS[-1] else set(TOKENS)))


def expert_sizes(most: int, step: int) -> tuple[int, ...]:
    """Sizes A of a group of at most that many experts: powers of `step`, and all. Example: 6 by 2 -> 1, 2, 4, 6."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size *= step
    return (*sizes, most)
