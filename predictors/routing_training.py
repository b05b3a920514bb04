"""Predictors of expert routing for all layers and leads, trained at once from a running model, in bounded memory.

trainer = RoutingTrainer(RoutingShape.of(spec), leads=(1, 2), routers=router_of)
for text in texts:
    trainer.feed(hidden, live)  # lists over the layers that have experts, as the engine computed them
write_routing(folder, *trainer.result(fingerprint=..., source="..."))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from predictors.buffer import Rows, TokenBuffer
from predictors.fitting import Settings, make_optimizer
from predictors.folder import DTYPES
from predictors.routing import shift_of
from predictors.routing_fitting import (
    RANKS,
    SHARP,
    Router,
    RoutingShape,
    Tree,
    chosen,
    fixed,
    folded,
    make_update,
    recall_of,
    scores,
    start,
    top1_of,
)
from predictors.routing_folder import RoutingEntry, RoutingManifest
from predictors.routing_rows import encode, layout, live_of, token_bytes, vectors_of

log = logging.getLogger(__name__)

BATCHES = (8, 32)  # tokens of which a workload is predicted
PLAIN = ("residual", "gate", "residual-mean")  # of equal ones the first is chosen
TOLERANCE = 0.002  # of recall that a smaller rank may lack
_KEPT = (0.5, 0.75)  # shares of the steps after which what was learned is remembered: stopping early is a candidate
_PIECE = 64  # tokens encoded at once
_ASKED = 256  # tokens asked about at once
_MOST_BATCHES = 32  # in the shuffle buffer, however much it could hold
_MOST_HELD = 4096
_FIRST_TOKENS = 1024  # for the spread of scores


class Place(NamedTuple):
    """What is predicted: where tokens go in the layer `lead` beyond `asked`. Both count layers that have experts."""

    lead: int
    asked: int

    @property
    def key(self) -> str:
        return f"{self.lead:03}-{self.asked:03}"


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best for a place, on the held-out tokens."""

    entry: RoutingEntry
    arrays: Tree  # as a folder keeps them; {} for a kind without any


class RoutingTrainer:
    """Feeds a shuffle buffer; whenever that is full, trains on random batches of it and forgets the last one.

    As `training.Trainer`: results depend on the tokens' order, the settings and the seed. Memory: settings.buffer_bytes
    for tokens, on the host; on jax's default device 12 bytes a trained parameter, and the routers in float32.
    """

    def __init__(
        self,
        shape: RoutingShape,
        leads: Sequence[int],
        routers: Callable[[int], Router],  # of a layer, by its number among those that have experts
        settings: Settings | None = None,
        seed: int = 0,
        ranks: Sequence[int] = RANKS,
    ):
        count = len(shape.layers)
        if not leads or any(not 1 <= lead < count for lead in leads):
            raise ValueError(f"leads must lie from 1 to {count - 1}, the model has {count} layers with experts")
        self.shape, self.settings, self.seed = shape, settings or Settings(), seed
        self.places = [Place(lead, asked) for lead in sorted({*leads}) for asked in range(count - lead)]
        self._buffer, self._held = (TokenBuffer(room, layout(shape)) for room in self._capacities())
        self.tokens, self.step, self._held_seen, self._begun, self._summed = 0, 0, 0, False, 0
        self._sums = np.zeros((count, shape.hidden))  # of what is trained on
        self._counts = np.zeros((count, shape.experts), np.int64)
        self._routers = [_owned(dict(routers(number))) for number in range(count)]
        self._trained: dict[str, Tree] = {}
        self._states: dict[str, Tree] = {}
        self._known: dict[str, Tree] = {}
        self._early: dict[str, Tree] = {}  # {place: {rank: {name: [S, ...]}}}
        optimizer = make_optimizer(self.settings)
        for i, place in enumerate(self.places):
            trees = {f"{rank:04}": start(shape, rank, np.random.default_rng((seed, 1, i, rank))) for rank in ranks}
            self._trained[place.key] = _owned(trees)
            self._states[place.key] = _owned({rank: optimizer.init(_owned(tree)) for rank, tree in trees.items()})
            self._known[place.key] = _owned(fixed(shape))
            self._early[place.key] = jax.tree.map(lambda a: np.zeros((len(_KEPT), *a.shape), np.float32), trees)
        self._update = make_update(shape, self.settings)
        self._chosen = jax.jit(chosen, static_argnums=3)

    def _capacities(self) -> tuple[int, int]:
        """Tokens in the shuffle buffer and in the held-out sample."""
        size = token_bytes(self.shape)
        most = self.settings.buffer_bytes // size
        if most * 3 // 4 < self.settings.batch:
            needed = -(-self.settings.batch * 4 // 3) * size
            raise ValueError(
                f"buffer_bytes must hold 4/3 batch tokens, {needed} bytes, got {self.settings.buffer_bytes}: "
                "raise it, or lower batch"
            )
        return min(most * 3 // 4, _MOST_BATCHES * self.settings.batch), min(most - most * 3 // 4, _MOST_HELD)

    # --- feeding ------------------------------------------------------------------------------------------------------

    def feed(self, hidden: Sequence[npt.NDArray[np.floating]], live: Sequence[npt.NDArray[np.bool_]]) -> None:
        """The next tokens of the text: by layer what the experts read [T, D or wider], and where tokens go [T, E].

        Nothing is kept by reference.
        """
        count, width = len(live[0]), self.shape.hidden
        if len(live) != len(self.shape.layers) or any(part.shape != (count, self.shape.experts) for part in live):
            raise ValueError(f"live must be {len(self.shape.layers)} arrays [{count}, {self.shape.experts}]")
        if len(hidden) != len(live) or any(len(part) != count or part.shape[1] < width for part in hidden):
            raise ValueError(f"hidden must be {len(self.shape.layers)} arrays [{count}, {width}] or wider")
        for at in range(0, count, _PIECE):
            some = slice(at, at + _PIECE)
            h = np.stack([np.asarray(part[some, :width], np.float32) for part in hidden], axis=1)
            where = np.stack([part[some] for part in live], axis=1)
            self._feed(h, where)

    def _feed(self, h: npt.NDArray[np.float32], live: npt.NDArray[np.bool_]) -> None:
        """h [T, M, D], live [T, M, E]."""
        number = self.tokens + np.arange(len(h))
        every = round(1 / self.settings.held_share)
        is_held = (number // self.settings.span) % every == every - 1
        self.tokens += len(number)
        rows = encode(h, live)
        self._held.offer({name: array[is_held] for name, array in rows.items()}, self._held_seen, self.seed)
        self._held_seen += int(is_held.sum())
        self._sums += h[~is_held].sum(axis=0, dtype=np.float64)
        self._counts += live[~is_held].sum(axis=0)
        index = np.flatnonzero(~is_held)
        self._summed += len(index)
        while len(index):
            now, index = np.split(index, [self._buffer.capacity - self._buffer.count])
            self._buffer.put({name: array[now] for name, array in rows.items()})
            if self._buffer.count == self._buffer.capacity:
                self._draw()

    @property
    def waiting(self) -> int:
        """Tokens in the shuffle buffer."""
        return self._buffer.count

    def finish(self, on_left: Callable[[int], None] = lambda left: None) -> None:
        """Train on what is left in the buffer; see `training.Trainer.finish`."""
        while self._buffer.count:
            self._draw()
            on_left(self._buffer.count)

    # --- training -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """`passes` steps on random batches; the tokens of the last one have served."""
        if not self._begun:
            self._begin()
        size, count, index = self.settings.batch, self._buffer.count, np.zeros(0, np.int64)
        for _ in range(self.settings.passes):
            rng = np.random.default_rng((self.seed, 2, self.step))
            index = rng.choice(count, size, replace=count < size)
            if self.step < self.settings.steps:
                self._train(self._buffer.take(index))
            self.step += 1
            self._remember()
        self._buffer.drop(np.arange(count) if count <= size else index)

    def _train(self, rows: Rows) -> None:
        for place in self.places:
            key, target = place.key, place.asked + place.lead
            self._trained[key], self._states[key] = self._update(
                self._trained[key],
                self._states[key],
                self._known[key],
                self._routers[target],
                rows["h"][:, place.asked],
                rows["scale"][:, place.asked],
                rows["live"][:, target],
            )

    def _remember(self) -> None:
        for number, share in enumerate(_KEPT):
            if self.step == round(share * self.settings.steps):
                for key, trees in self._trained.items():
                    for early, now in zip(*map(jax.tree.leaves, (self._early[key], trees)), strict=True):
                        early[number] = np.asarray(now)

    def _begin(self) -> None:
        """Sizes and residuals, from what was fed so far, and how far apart the scores of a token lie."""
        rows, means = self._buffer.rows, self._means()
        size = np.sqrt((rows["scale"].astype(np.float64) ** 2).mean(axis=0)).astype(np.float32)
        some = {name: array[:_FIRST_TOKENS] for name, array in rows.items()}
        spread = []
        for number, leaves in enumerate(self._routers):
            z = np.asarray(scores(jnp.asarray(vectors_of(some, number)), leaves, self.shape.router))
            spread.append(max(float(z.std(axis=1).mean()), 1e-20))
        for lead, asked in self.places:
            target = asked + lead
            self._known[Place(lead, asked).key] = _owned(
                {
                    "size_in": size[asked],
                    "size_out": size[target],
                    "shift": shift_of("residual", means, asked, lead),
                    "sharp": np.float32(SHARP / spread[target]),
                }
            )
        self._begun = True

    def _means(self) -> npt.NDArray[np.float32]:
        """[M, D]"""
        return (self._sums / max(self._summed, 1)).astype(np.float32)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def found(self, dtype: str = "float16") -> list[Found]:
        """The best of every place on the held-out sample, as it would be stored in `dtype`, and what all kinds do."""
        if not self._held.count:
            raise RuntimeError("no tokens were held out: feed at least span / held_share tokens, or lower span")
        means, rows = self._means(), self._held.rows
        return [self._best(place, means, rows, dtype) for place in self.places]

    def _best(self, place: Place, means: npt.NDArray, rows: Rows, dtype: str) -> Found:
        (lead, asked), target = place, place.asked + place.lead
        h, live = vectors_of(rows, asked), live_of(rows, target, self.shape.experts)
        metrics: dict[str, dict[str, Any]] = {}
        for kind in PLAIN:
            shift, empty = shift_of(kind, means, asked, lead), np.zeros((0, self.shape.hidden), np.float32)
            metrics[kind] = self._metrics(self._ask(h, {"shift": shift, "down": empty, "up": empty.T}, target), live)
        frequent = np.argsort(-self._counts[target], kind="stable")[: self.shape.top_k]
        metrics["frequency"] = self._metrics(np.broadcast_to(frequent, (len(h), len(frequent))), live)
        metrics["random"] = {"recall": self.shape.top_k / self.shape.experts, "top1": dict.fromkeys(_names())}
        kind = max(PLAIN, key=lambda name: metrics[name]["recall"])
        options = self._options(place, h, live, dtype)
        most = max((recall for recall, _, _ in options), default=0.0)
        _, rank, arrays = next(one for one in options if one[0] >= most - TOLERANCE)
        metrics["corrected"] = self._metrics(self._ask(h, _widened(arrays), target), live)
        if metrics["corrected"]["recall"] > metrics[kind]["recall"]:
            entry = RoutingEntry(lead=lead, asked=asked, kind="corrected", rank=rank, metrics=metrics)
            return Found(entry, arrays)
        return Found(RoutingEntry(lead=lead, asked=asked, kind=kind, metrics=metrics), {})

    def _options(self, place: Place, h: npt.NDArray, live: npt.NDArray, dtype: str) -> list[tuple[float, int, Tree]]:
        """Recall, rank and arrays of what was trained, smaller ranks first, of one rank the last state first."""
        known, found = jax.device_get(self._known[place.key]), []
        for rank, tree in sorted(jax.device_get(self._trained[place.key]).items()):
            early = self._early[place.key][rank]
            for state in [tree] + [{name: part[i] for name, part in early.items()} for i in range(len(_KEPT))]:
                arrays = _rounded(folded(state, known), dtype)
                ids = self._ask(h, _widened(arrays), place.asked + place.lead)
                found.append((recall_of(ids, live), int(rank), arrays))
        return found

    def _metrics(self, ids: npt.NDArray, live: npt.NDArray) -> dict[str, Any]:
        top1 = {str(batch): top1_of(ids, live, batch, self.seed) for batch in BATCHES}
        return {"recall": recall_of(ids, live), "top1": top1}

    def _ask(self, h: npt.NDArray[np.float32], arrays: Tree, target: int) -> npt.NDArray[np.int32]:
        """Experts [N, K] of h [N, D], some at a time."""
        correction, found = tuple(arrays[name] for name in ("shift", "down", "up")), []
        for at in range(0, len(h), _ASKED):
            part = h[at : at + _ASKED]
            whole = np.pad(part, ((0, _ASKED - len(part)), (0, 0)))  # one size, one program
            ids = self._chosen(whole, correction, self._routers[target], self.shape.router)
            found.append(np.asarray(ids)[: len(part)])
        return np.concatenate(found)

    # --- results ------------------------------------------------------------------------------------------------------

    def result(
        self, *, fingerprint: str | None, source: str, dtype: str = "float16"
    ) -> tuple[RoutingManifest, dict[str, Tree]]:
        """What `write_routing` takes. Trains on what is left in the buffer first."""
        self.finish()
        found = self.found(dtype)
        for one in found:
            told = ", ".join(f"{kind} {values['recall']:.3f}" for kind, values in one.entry.metrics.items())
            log.info("lead %d, from layer %d: %s of %s", one.entry.lead, one.entry.asked, one.entry.kind, told)
        manifest = RoutingManifest(
            fingerprint=fingerprint,
            layers=self.shape.layers,
            hidden=self.shape.hidden,
            experts=self.shape.experts,
            top_k=self.shape.top_k,
            lead=max(place.lead for place in self.places),
            dtype=dtype,
            source=source,
            tokens=self.tokens,
            entries=tuple(one.entry for one in found),
        )
        return manifest, {"means": {"hidden": self._means()}} | {
            one.entry.key: one.arrays for one in found if one.arrays
        }

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Everything a resumed run needs, NumPy arrays in dicts, for orbax; the text goes on at token `tokens`."""
        places = {
            key: {
                "trained": jax.device_get(self._trained[key]),
                "optimizer": {f"{i:04}": leaf for i, leaf in enumerate(jax.device_get(jax.tree.leaves(states)))},
                "known": jax.device_get(self._known[key]),
                "early": jax.tree.map(np.copy, self._early[key]),
            }
            for key, states in self._states.items()
        }
        counters = [self.tokens, self.step, self._held_seen, int(self._begun), self._summed]
        return {
            "counters": np.array(counters, np.int64),
            "sums": self._sums.copy(),
            "counts": self._counts.copy(),
            "buffer": self._buffer.state(),
            "held": self._held.state(),
            "places": places,
        }

    def restore(self, state: Tree) -> None:
        """Go on where `state` was taken, in a trainer made with the same arguments."""
        if state["places"].keys() != self._states.keys():
            raise ValueError("the state is of a trainer with other leads")
        self.tokens, self.step, self._held_seen, begun, self._summed = (int(n) for n in state["counters"])
        self._begun = bool(begun)
        self._sums, self._counts = np.array(state["sums"]), np.array(state["counts"])
        self._buffer.restore(state["buffer"])
        self._held.restore(state["held"])
        for key, place in state["places"].items():
            leaves = [place["optimizer"][name] for name in sorted(place["optimizer"])]
            self._states[key] = _owned(jax.tree.unflatten(jax.tree.structure(self._states[key]), leaves))
            self._trained[key], self._known[key] = _owned(place["trained"]), _owned(place["known"])
            self._early[key] = jax.tree.map(np.array, place["early"])


def _names() -> tuple[str, ...]:
    return tuple(map(str, BATCHES))


def _rounded(arrays: Tree, dtype: str) -> Tree:
    """As a folder holds them: the vector float32."""
    kinds = {"shift": np.dtype(np.float32), "down": DTYPES[dtype], "up": DTYPES[dtype]}
    return {name: np.asarray(array).astype(kinds[name]) for name, array in arrays.items()}


def _widened(arrays: Tree) -> Tree:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _owned(tree):
    """On the device, in memory of its own: it will be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)
