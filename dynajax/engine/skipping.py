"""A token in one program that leaves out neurons that score low, on the CPU backend, which holds every unit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.config import PolicyConfig
from dynajax.engine.checks import LiveCheck
from dynajax.engine.ledger import CHECK_EVERY, Books
from dynajax.engine.loaded import Loaded
from dynajax.engine.masked import MaskedPrompt, PredictedScores
from dynajax.engine.planning import Prepared
from dynajax.engine.prediction import Predictors, load_predictors, source_of_units
from dynajax.engine.state import DeviceState
from dynajax.engine.stepper import OnPart, Piece
from dynajax.engine.threads import ThreadsRunner
from dynajax.engine.token import Operands, run_token
from dynajax.programs import bucket_of
from dynajax.programs.bodies import Told
from dynajax.timeline import Lanes
from hostcompute.packed import widened
from predictors.gate import GateSource


class SkippingRunner:
    """Decodes as `TokenRunner` does, with masks. Every `CHECK_EVERY` tokens a layer is looked at exactly."""

    def __init__(self, loaded: Loaded, predictors: Predictors, check: LiveCheck, knobs: PolicyConfig):
        assert isinstance(loaded.layers, ThreadsRunner), "only neurons are skipped"
        self._loaded, self.layers = loaded, loaded.layers
        self.predictors, self.check, self._skips_prompts = predictors, check, knobs.sparse_prefill
        self.theta = np.uint8(np.rint(knobs.theta * 255))
        self.alarmed = False  # see `figures`
        self.lanes: Lanes | None = None
        spec = loaded.programs.shapes.spec
        self._foretold = predictors.prediction.foretold(spec.layers)
        self._told = tuple(self._told_of(layer) for layer in range(spec.layers))
        self._none = jnp.zeros((3, spec.layers), jnp.int32)
        self.reset_counters()

    def _told_of(self, layer: int) -> Told:
        norms, spec = None, self._loaded.programs.shapes.spec
        if not spec.activation.has_zeros:
            down = widened(self._loaded.units(layer)[:, -1, 0]).astype(np.float32)
            norms = jnp.asarray(np.linalg.norm(down, axis=1))
        place = self.predictors.prediction.skipping(layer)
        assert place is not None, f"layer {layer} has no scores to skip by"
        return Told(*self.predictors.arrays(place), norms)

    def prompt(self, state: DeviceState, row: int, pieces: list[Piece], on_part: OnPart) -> None:
        """Prefill of one row; see `Runner`."""
        if not self._skips_prompts:
            self.layers.prompt(state, row, pieces, on_part)
            return
        source = PredictedScores(self.predictors, self.theta)
        MaskedPrompt(self._loaded).run(state, row, pieces, source, on_part, whole=False)

    def reset_counters(self) -> None:
        """A new generation, or the end of its prefill."""
        layers = self._none.shape[1]
        self._counts, self._rows, self._seen, self._token = self._none, 0, np.zeros(layers, np.int64), 0

    def hot_s(self, steps: int) -> None:
        """Unknown in this mode."""

    def rows(
        self,
        state: DeviceState,
        ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        active: npt.NDArray[np.bool_],
    ) -> jax.Array:
        """One token in each row through the model; see `Runner`."""
        if self.layers.observer is not None:
            return self.layers.rows(state, ids, positions, active)
        programs, weights, pool = self._loaded.programs, self._loaded.weights, self._loaded.pool
        prefix = bucket_of(int(positions.max()) + 1, programs.shapes.prefixes)
        program = programs.get("token_skipping_rows", prefix, *self._foretold)
        looks = (self._token + np.arange(len(weights.layers))) % CHECK_EVERY == 0

        def run(given: Operands):
            ends, caches, pools, start = given
            known = (self._told, start, self._counts, positions, active, looks, self.theta)
            logits, self._counts, ks, vs = program(ends, weights.layers, caches, pools, *known)
            return logits, ks, vs

        logits = run_token(weights, pool, state, ids, positions, self.lanes, run)
        rows = int(active.sum())
        self._token, self._rows = self._token + 1, self._rows + rows
        self._seen[looks] += rows
        return logits

    @property
    def books(self) -> Books:
        """What was counted since the last reset."""
        computed, live, found = np.asarray(self._counts).astype(np.int64)
        books = Books.empty(len(computed))
        books.rows[:], books.hot_computed, books.seen_rows = self._rows, computed, self._seen.copy()
        books.seen_live, books.seen_hot, books.seen_computed = live, live.copy(), found
        return books


def predictors_of(
    prepared: Prepared, loaded: Loaded, fingerprint: str, cosine: npt.NDArray[np.float32] | None
) -> Predictors | None:
    """What was prepared, made or read, and sent to the device; None: there are none."""
    spec, names, device = prepared.spec, loaded.programs.leaf_names, jax.local_devices()[0]
    if not prepared.prediction.entries:
        return None

    def leaf(layer: int, name: str) -> npt.NDArray | None:
        return np.asarray(loaded.weights.layers[layer][names.index(name)]) if name in names else None

    def source(layer: int) -> GateSource:
        norm = "attention_norm" if spec.shared_norm else "ffn_norm"
        weight = leaf(layer, norm)
        assert weight is not None
        return source_of_units(spec, widened(loaded.units(layer)), weight, leaf(layer, f"{norm}_bias"))

    def bias(layer: int) -> npt.NDArray | None:
        """What waits in the stream behind this layer's attention for its FFN, and is none of it."""
        found = leaf(layer, "down_bias")
        return None if found is None else found.astype(np.float32) * np.float32(spec.residual_scale)

    def send(array: npt.NDArray) -> jax.Array:
        return jax.device_put(array, device).block_until_ready()

    return load_predictors(prepared.prediction, spec, loaded.programs, fingerprint, source, bias, cosine, send)
