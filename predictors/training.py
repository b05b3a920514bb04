"""Predictors of all layers trained at once, from a running model, in bounded memory.

trainer = Trainer(Shape.of(spec), leads=(0, 1), forms=default_forms(shape), sources=source_of)
for text in texts:
    trainer.feed(streams, inputs, live)  # lists over layers, as the engine computed them
write_predictors(folder, *trainer.result(fingerprint=..., source="..."))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from predictors.buffer import Rows, TokenBuffer, Vectors, encode, layout, live_of, token_bytes, vectors_of
from predictors.calibration import fit_platt, histogram, judge, sigmoid
from predictors.fitting import Settings, Tree, fixed, folded, make_optimizer, make_update, rounded, start, widened
from predictors.folder import DTYPES, Manifest
from predictors.forms import Entry, Form, Reads, Shape, form_bytes
from predictors.gate import GateSource, copies, gate_params
from predictors.lowbit import LowBit
from predictors.scoring import scores
from predictors.selection import Candidate, choose

log = logging.getLogger(__name__)

_PIECE = 64  # tokens encoded at once
_SCORED = 128  # tokens scored at once
_MOST_BATCHES = 32  # in the shuffle buffer, however much it could hold
_MOST_HELD = 4096
_FITTED_PAIRS = 2**18  # of token and neuron, for two numbers
_FIRST_TOKENS = 64  # for a corrector's first calibration


class Task(NamedTuple):
    """One predictor to fit or measure: a form, for the neurons of `layer`, from `lead` layers before."""

    form: Form
    lead: int
    layer: int

    @property
    def key(self) -> str:
        return f"{self.form.name}-{self.form.reads}-{self.lead:03}-{self.layer:03}"


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A finished task on some tokens."""

    entry: Entry
    arrays: Tree  # as a folder keeps them
    bytes: int  # on the device


class Trainer:
    """Feeds a shuffle buffer; whenever that is full, trains on random batches of it and forgets the last one.

    All results depend on the tokens' order, the settings and the seed, not on how `feed` was called. Memory:
    settings.buffer_bytes for tokens, on the host; on jax's default device (`with jax.default_device(...)` around every
    call chooses another) the low-bit copies that forms need, and 12 bytes a trained parameter.
    """

    def __init__(
        self,
        shape: Shape,
        leads: Sequence[int],
        forms: Sequence[Form],
        settings: Settings | None = None,
        seed: int = 0,
        sources: Callable[[int], GateSource] | None = None,  # a layer's weights, asked once each; for gate forms
    ):
        if not leads or not forms or any(not 0 <= lead < shape.layers for lead in leads):
            raise ValueError(f"leads must lie from 0 to {shape.layers - 1} and forms not be empty, got {leads}")
        if sources is None and any(form.kind == "gate" for form in forms):
            raise ValueError("gate forms need the weights of the layers: sources")
        self.shape, self.settings, self.seed = shape, settings or Settings(), seed
        places = [(lead, layer) for lead in dict.fromkeys(leads) for layer in range(lead, shape.layers)]
        self.tasks = [Task(form.at(lead), lead, layer) for form in dict.fromkeys(forms) for lead, layer in places]
        self._reads: tuple[Reads, ...] = tuple(sorted({task.form.reads for task in self.tasks}))
        room, held = self._capacities()
        rows = layout(shape, self._reads)
        self._buffer, self._held = TokenBuffer(room, rows), TokenBuffer(held, rows)
        self.tokens, self.step, self._held_seen, self._begun = 0, 0, 0, False
        self._sums, self._summed = np.zeros((shape.layers, shape.hidden)), 0
        self._base = self._read_sources(sources)
        self._trained, self._states, self._known = {}, {}, {}
        optimizer = make_optimizer(self.settings)
        for i, task in enumerate(self.tasks):
            if task.form.is_trained:
                tree = start(shape, task.form, np.random.default_rng((seed, 1, i)))
                self._trained[task.key] = _owned(tree)
                self._states[task.key] = _owned(optimizer.init(self._trained[task.key]))
                self._known[task.key] = _owned(fixed(shape))
        self._updates = {
            form: make_update(shape, form, self.settings)
            for form in {task.form for task in self.tasks}
            if form.is_trained
        }
        self._scores = jax.jit(scores, static_argnums=(2, 3))

    # --- feeding ------------------------------------------------------------------------------------------------

    def feed(self, streams: Vectors | None, inputs: Vectors | None, live: Sequence[npt.NDArray[np.bool_]]) -> None:
        """The next tokens of the text: per layer the stream [T, D], the FFN's input [T, D or wider] and [T, F] live.

        None for what no form reads (`reads`). Nothing is kept by reference. What comes after settings.tokens is only
        added to the held-out sample and the means.
        """
        given: dict[Reads, Vectors | None] = {"stream": streams, "normed": inputs}
        vectors: dict[Reads, Vectors] = {}
        for name in self._reads:
            if (layers := given[name]) is None or len(layers) != self.shape.layers:
                raise ValueError(f"{name} must be a list of {self.shape.layers} layers")
            vectors[name] = layers
        count = len(live[0])
        if any(part.shape != (count, self.shape.ffn) for part in live) or len(live) != self.shape.layers:
            raise ValueError(f"live must be {self.shape.layers} arrays [{count}, {self.shape.ffn}]")
        if any(len(part) != count or part.shape[1] < self.shape.hidden for v in vectors.values() for part in v):
            raise ValueError(f"vectors must be [{count}, {self.shape.hidden}] or wider")
        for at in range(0, count, _PIECE):
            rows = encode(vectors, live, self.shape, slice(at, at + _PIECE))
            self._feed(rows)

    @property
    def reads(self) -> tuple[Reads, ...]:
        """Which vectors `feed` needs."""
        return self._reads

    @property
    def buffer_bytes(self) -> int:
        """Of tokens kept, ever."""
        return self._buffer.bytes + self._held.bytes

    @property
    def waiting(self) -> int:
        """Tokens in the shuffle buffer."""
        return self._buffer.count

    def finish(self, on_left: Callable[[int], None] = lambda left: None) -> None:
        """Train on what is left in the buffer. Further text may follow, a little less shuffled.

        on_left is told the tokens that are still there, after each draw; if it raises, `finish` may be called again.
        """
        while self._buffer.count:
            self._draw()
            on_left(self._buffer.count)

    def _capacities(self) -> tuple[int, int]:
        """Tokens in the shuffle buffer and in the held-out sample."""
        most = self.settings.buffer_bytes // token_bytes(self.shape, self._reads)
        if most * 3 // 4 < self.settings.batch:
            needed = -(-self.settings.batch * 4 // 3) * token_bytes(self.shape, self._reads)
            raise ValueError(
                f"buffer_bytes must hold 4/3 batch tokens, {needed} bytes, got {self.settings.buffer_bytes}: "
                "raise it, or lower batch"
            )
        return min(most * 3 // 4, _MOST_BATCHES * self.settings.batch), min(most - most * 3 // 4, _MOST_HELD)

    def _feed(self, rows: Rows) -> None:
        number = self.tokens + np.arange(len(rows["live"]))
        every = round(1 / self.settings.held_share)
        is_held = (number // self.settings.span) % every == every - 1
        self.tokens += len(number)
        held = {name: array[is_held] for name, array in rows.items()}
        self._held.offer(held, self._held_seen, self.seed)
        self._held_seen += int(is_held.sum())
        index = np.flatnonzero(~is_held)
        while len(index):
            now, index = np.split(index, [self._buffer.capacity - self._buffer.count])
            self._buffer.put({name: array[now] for name, array in rows.items()})
            if self._buffer.count == self._buffer.capacity:
                self._draw()

    # --- training -----------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """`passes` steps on random batches; the tokens of the last one have served."""
        if not self._begun:
            self._begin()
        size, count = self.settings.batch, self._buffer.count
        index = np.zeros(0, np.int64)
        for _ in range(self.settings.passes):
            rng = np.random.default_rng((self.seed, 2, self.step))
            index = rng.choice(count, size, replace=count < size)
            if self.step < self.settings.steps:
                self._train(self._buffer.take(index))
            self.step += 1
        if count <= size:
            index = np.arange(count)
        if "stream" in self._reads:
            rows = self._buffer.take(index)
            for layer in range(self.shape.layers):
                self._sums[layer] += vectors_of(rows, "stream", layer).sum(axis=0, dtype=np.float64)
            self._summed += len(index)
        self._buffer.drop(index)

    def _train(self, rows: Rows) -> None:
        for task in self.tasks:
            if task.form.is_trained:
                key, reads, source = task.key, task.form.reads, task.layer - task.lead
                self._trained[key], self._states[key], _ = self._updates[task.form](
                    self._trained[key],
                    self._states[key],
                    self._known[key],
                    self._base.get(task.key, {}),
                    rows[reads][:, source],
                    rows[f"{reads}_scale"][:, source],
                    rows["live"][:, task.layer],
                )

    def _begin(self) -> None:
        """Sizes, mean residuals and first calibrations, from what is in the buffer."""
        rows = self._buffer.rows
        for task in self.tasks:
            if not task.form.is_trained:
                continue
            sized = task.layer if task.form.kind == "gate" else task.layer - task.lead  # a corrector's output, an input
            unit = np.sqrt((rows[f"{task.form.reads}_scale"][:, sized].astype(np.float64) ** 2).mean())
            known = fixed(self.shape) | {"unit": np.float32(unit)}
            if task.form.kind == "gate":
                if task.form.reads == "stream":
                    known["shift"] = self._residual(task, rows)
                some = {name: array[:_FIRST_TOKENS] for name, array in rows.items()}
                z = self._scored(task, folded(task.form, self._trained[task.key], known), some)
                slope, intercept = fit_platt(z, live_of(some, task.layer, self.shape.ffn))
                known |= {"slope": np.float32(slope), "intercept": np.float32(intercept)}
            self._known[task.key] = _owned(known)
        self._begun = True

    def _residual(self, task: Task, rows: Rows | None = None) -> npt.NDArray[np.float32]:
        """Mean difference of the streams, over all trained tokens or over `rows`."""
        source = task.layer - task.lead
        if rows is not None:
            ends = [vectors_of(rows, "stream", i).mean(axis=0, dtype=np.float64) for i in (source, task.layer)]
            return (ends[1] - ends[0]).astype(np.float32)
        return ((self._sums[task.layer] - self._sums[source]) / max(self._summed, 1)).astype(np.float32)

    def _read_sources(self, sources: Callable[[int], GateSource] | None) -> dict[str, Tree]:
        """What gate tasks score with; forms of equal bits share one copy of a layer."""
        base: dict[str, Tree] = {}
        for layer in range(self.shape.layers):
            tasks = [task for task in self.tasks if task.layer == layer and task.form.kind == "gate"]
            if not tasks or sources is None:
                continue
            source, made = sources(layer), {}
            for task in tasks:
                bits = task.form.bits
                if bits not in made:
                    made[bits] = tuple(
                        LowBit(jnp.asarray(copy.codes), jnp.asarray(copy.scales), bits, copy.columns)  # ty: ignore[invalid-argument-type]
                        for copy in copies(source, bits)
                    )
                plain = Form(kind="gate", bits=bits, reads=task.form.reads, weighted=task.form.weighted)
                base[task.key] = dict(gate_params(self.shape, plain, source, packed=made[bits]))
        return base

    # --- measuring ----------------------------------------------------------------------------------------------

    def metrics(self, dtype: str = "float16") -> list[Measured]:
        """Every task on the held-out sample, as it would be stored in `dtype`."""
        if not self._held.count:
            raise RuntimeError("no tokens were held out: feed at least span / held_share tokens, or lower span")
        return [self._measured(task, self._held.rows, dtype) for task in self.tasks]

    def evaluate(
        self, streams: Vectors | None, inputs: Vectors | None, live: Sequence[npt.NDArray[np.bool_]], dtype="float16"
    ) -> list[Measured]:
        """Every task on other tokens, given as for `feed`; they leave no trace."""
        given: Mapping[Reads, Vectors | None] = {"stream": streams, "normed": inputs}
        vectors = {name: part for name in self._reads if (part := given[name]) is not None}
        rows = encode(vectors, live, self.shape, slice(None))
        return [self._measured(task, rows, dtype) for task in self.tasks]

    def _measured(self, task: Task, rows: Rows, dtype: str) -> Measured:
        form = task.form
        arrays: Tree = {}
        if form.is_trained:
            arrays = jax.device_get(folded(form, self._trained[task.key], self._known[task.key]))
        elif form.is_shifted:
            arrays = {"shift": self._residual(task)}
        entry = Entry(layer=task.layer, lead=task.lead, form=form)
        arrays = rounded(arrays, entry.arrays((self.shape.hidden, self.shape.ffn)), DTYPES[dtype])
        z = self._scored(task, widened(arrays), rows)
        live = live_of(rows, task.layer, self.shape.ffn)
        some = np.linspace(0, len(z) - 1, min(len(z), max(1, _FITTED_PAIRS // self.shape.ffn))).astype(np.int64)
        slope, intercept = fit_platt(z[some], live[some])
        arrays["histogram"] = histogram(sigmoid(slope * z + intercept))
        size = form_bytes(self.shape, form, dtype)
        told = judge(z, live, slope, intercept) | {"bytes": size}
        entry = Entry(layer=task.layer, lead=task.lead, form=form, slope=slope, intercept=intercept, metrics=told)
        return Measured(entry, arrays, size)

    def _scored(self, task: Task, arrays: Tree, rows: Rows) -> npt.NDArray[np.float32]:
        """Raw scores [N, F] of all tokens in `rows`, some at a time."""
        x = vectors_of(rows, task.form.reads, task.layer - task.lead)
        params = {**self._base.get(task.key, {}), **arrays}
        out = np.empty((len(x), self.shape.ffn), np.float32)
        for at in range(0, len(x), _SCORED):
            part = x[at : at + _SCORED]
            whole = np.pad(part, ((0, _SCORED - len(part)), (0, 0)), constant_values=1)  # one size, one program
            out[at : at + len(part)] = np.asarray(self._scores(params, whole, self.shape, task.form))[: len(part)]
        return out

    # --- results ------------------------------------------------------------------------------------------------

    def result(
        self,
        *,
        fingerprint: str | None,
        source: str,
        dtype: str = "float16",
        budget_bytes: int | None = None,
    ) -> tuple[Manifest, dict[str, Tree]]:
        """What `write_predictors` takes: for every layer and lead the form with most recall per byte, up to the goal.

        Trains on what is left in the buffer first. budget_bytes: of all chosen predictors on the device.
        """
        self.finish()
        factor = "1.0" if self.shape.activation.kind == "silu" else "1.6"  # silu: the wanted share and no more
        places: dict[Any, dict[Form, Measured]] = {}
        for one in self.metrics(dtype):
            places.setdefault((one.entry.lead, one.entry.layer), {})[one.entry.form] = one
        options = {
            place: [
                Candidate(form=form, bytes=one.bytes, recall=(one.entry.metrics or {})["recall"][factor])
                for form, one in forms.items()
            ]
            for place, forms in places.items()
        }
        chosen = choose(options, self.settings.goal, budget_bytes)
        final = [places[place][candidate.form] for place, candidate in sorted(chosen.items())]
        for one in final:
            log.info("lead %d, layer %d: %s, %d bytes", one.entry.lead, one.entry.layer, one.entry.form.name, one.bytes)
        manifest = Manifest(
            fingerprint=fingerprint,
            layers=self.shape.layers,
            hidden=self.shape.hidden,
            ffn=self.shape.ffn,
            ranks=(),
            dtype=dtype,
            source=source,
            kind="mixed",
            lead=max(task.lead for task in self.tasks),
            tokens=self.tokens,
            entries=tuple(one.entry for one in final),
        )
        return manifest, {one.entry.key: one.arrays for one in final}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state(self) -> Tree:
        """Everything a resumed run needs, NumPy arrays in dicts, for orbax; the text goes on at token `tokens`."""
        tasks = {
            key: {
                "trained": jax.device_get(self._trained[key]),
                "optimizer": {f"{i:03}": leaf for i, leaf in enumerate(jax.device_get(jax.tree.leaves(state)))},
                "known": jax.device_get(self._known[key]),
            }
            for key, state in self._states.items()
        }
        counters = [self.tokens, self.step, self._held_seen, int(self._begun), self._summed]
        return {
            "counters": np.array(counters, np.int64),
            "sums": self._sums.copy(),
            "buffer": self._buffer.state(),
            "held": self._held.state(),
            "tasks": tasks,
        }

    def restore(self, state: Tree) -> None:
        """Go on where `state` was taken, in a trainer made with the same arguments."""
        if state["tasks"].keys() != self._states.keys():
            raise ValueError("the state is of a trainer with other forms or leads")
        self.tokens, self.step, self._held_seen, begun, self._summed = (int(n) for n in state["counters"])
        self._begun, self._sums = bool(begun), np.array(state["sums"])
        self._buffer.restore(state["buffer"])
        self._held.restore(state["held"])
        for key, task in state["tasks"].items():
            leaves = [task["optimizer"][name] for name in sorted(task["optimizer"])]
            structure = jax.tree.structure(self._states[key])
            self._states[key] = _owned(jax.tree.unflatten(structure, leaves))
            self._trained[key], self._known[key] = _owned(task["trained"]), _owned(task["known"])


def _owned(tree):
    """On the device, in memory of its own: it will be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)
