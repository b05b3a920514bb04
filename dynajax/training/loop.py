"""One training run by the clock: it always ends annealed, survives a kill, and is seeded throughout."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import orbax.checkpoint as ocp
from flax import nnx

from dynajax.config import ModelSpec
from dynajax.errors import NumericalError
from dynajax.models.decoder import Decoder
from dynajax.ops.routing import spread

log = logging.getLogger("dynajax.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How the neurons are shaped until this share of the time is gone; weights are relative to the cross-entropy."""

    until: float
    wake: float  # of `wake_loss`
    window: int  # tokens in which a neuron is asked to fire at least once
    l1: float = 0.0  # of the mean activation, which makes every neuron rare
    skew: float = 0.0  # of `skew_loss`, which makes the rare ones rarer
    lift: float = 0.0  # of the term in `skew_loss` that makes the frequent ones more frequent


PHASES = (
    Phase(until=0.25, wake=0.1, window=64),  # keep all in use while they have no purpose yet
    Phase(until=0.5, wake=0.01, window=64),
    Phase(until=0.556, wake=0.01, window=256, l1=0.1),  # let each fire where it matters
    Phase(until=0.612, wake=0.01, window=256, skew=0.03),  # and some of them seldom,
    Phase(until=0.723, wake=0.01, window=256, skew=0.1, lift=0.5),  # others often
    Phase(until=0.778, wake=0.01, window=256, skew=0.1, lift=0.8),
    Phase(until=0.834, wake=0.01, window=256, skew=0.25, lift=0.7),
    Phase(until=0.889, wake=0.01, window=256, skew=0.05, lift=0.4),
    Phase(until=0.944, wake=0.01, window=256, skew=0.12, lift=0.6),
    Phase(until=1.0, wake=0.01, window=256, l1=0.03),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What decides the weights besides corpus and clock."""

    minutes: float
    seed: int = 0
    context: int = 256
    batch: int = 4
    peak_rate: float = 2.5e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    source_power: float = 0.6  # a source is drawn in proportion to its size to this power
    checkpoint_minutes: float = 5.0


BALANCE = 0.03  # weight of `balance_loss`, relative to the cross-entropy


class Batches:
    """Random windows of the token streams; a pure function of (seed, step), so a resumed run sees the same."""

    def __init__(self, streams: dict[str, npt.NDArray[np.uint16]], cfg: TrainConfig):
        self._streams = [streams[name] for name in sorted(streams)]
        share = np.array([len(s) for s in self._streams], np.float64) ** cfg.source_power
        self._share = share / share.sum()
        self._cfg = cfg

    def __call__(self, step: int) -> npt.NDArray[np.int32]:
        """[batch, context + 1]: inputs are all but the last column, targets all but the first."""
        rng = np.random.default_rng((self._cfg.seed, step))
        rows = []
        for which in rng.choice(len(self._streams), self._cfg.batch, p=self._share):
            stream = self._streams[which]
            start = rng.integers(0, len(stream) - self._cfg.context)
            rows.append(stream[start : start + self._cfg.context + 1])
        return np.stack(rows).astype(np.int32)


def wake_loss(gate: jax.Array, window: int) -> jax.Array:
    """Mean shortfall of each neuron's best pre-activation in each window of tokens; gate [B, T, F].

    Zero for a neuron that fires (gate > 0) somewhere in the window; otherwise its largest gate is pulled
    up. ReLU neurons that fire for no token get no other gradient and would stay dead for ever.
    """
    batch, length, width = gate.shape
    window = min(window, length)
    windows = gate.reshape(batch, length // window, window, width)
    where = jnp.argmax(jax.lax.stop_gradient(windows), axis=2)[:, :, None, :]  # its gradient is cheaper than max's
    return jnp.mean(jax.nn.relu(-jnp.take_along_axis(windows, where, axis=2)))


def skew_loss(gate: jax.Array, lift: float) -> jax.Array:
    """Makes rare neurons rarer and, with lift > 0, frequent ones more frequent. gate [B, T, F].

    Mean over neurons of R log(1 + r / 0.3 R) - lift r, where r is a neuron's mean activation and R, held constant,
    the layer's. Its slope is 1 / (0.3 + r / R) - lift: 3.3 - lift for a neuron that hardly fires, 0.3 - lift for one
    of three times the mean.
    """
    rate = jnp.mean(jax.nn.relu(gate), axis=(0, 1))  # [F]
    mean = jax.lax.stop_gradient(jnp.mean(rate)) + 1e-8
    return jnp.mean(mean * jnp.log1p(rate / (0.3 * mean)) - lift * rate)


def balance_loss(logits: jax.Array, top_k: int) -> jax.Array:
    """E times the sum over experts of load times mean probability (Fedus et al. 2021, section 2.2); 1 if balanced.

    logits [B, T, E]; load: share of the K T choices that fall on an expert, which has no gradient.
    """
    experts = logits.shape[-1]
    flat = logits.reshape(-1, experts)
    _, ids = jax.lax.top_k(flat, top_k)
    load = jnp.mean(spread(ids, jnp.ones(ids.shape, jnp.float32), experts), axis=0) / top_k
    return experts * jnp.sum(jax.lax.stop_gradient(load) * jnp.mean(jax.nn.softmax(flat, axis=-1), axis=0))


def shape_loss(spec: ModelSpec, gates: list[jax.Array], phase: Phase) -> jax.Array:
    """What is asked of the units beside the cross-entropy: experts share the work, neurons behave as the phase says."""
    if spec.experts is not None:
        each = jnp.stack([balance_loss(logits, spec.experts.router.top_k) for logits in gates])
        return BALANCE * jnp.mean(each)
    shape = sum(phase.wake * wake_loss(gate, phase.window) for gate in gates)
    if phase.l1:
        shape += sum(phase.l1 * jnp.mean(jax.nn.relu(gate)) for gate in gates)
    if phase.skew:
        shape += sum(phase.skew * skew_loss(gate, phase.lift) for gate in gates)
    return jnp.asarray(shape)


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW direction with global-norm clipping; the caller scales it by the rate of the moment."""

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(cfg.weight_decay, mask=matrices),
    )


def learning_rate(cfg: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up by steps, then linear decay to zero by the share of the time that is gone."""
    return cfg.peak_rate * min(1.0, (step + 1) / cfg.warmup_steps) * max(0.0, 1.0 - progress)


def make_step(graphdef, tx: optax.GradientTransformation, phase: Phase) -> Callable:
    """The jitted update: (params, opt_state, tokens [B,T+1], rate) -> params, opt_state, cross-entropy."""

    def loss_of(params, tokens):
        model = nnx.merge(graphdef, params)
        logits, gates = model(tokens[:, :-1])
        entropy = optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return entropy + shape_loss(model.spec, gates, phase), entropy

    def step(params, opt_state, tokens, rate):
        (_, entropy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, opt_state, entropy

    return jax.jit(step, donate_argnums=(0, 1))


class Checkpoints:
    """The last two states of a run on disk; a step is either complete or invisible (orbax)."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, params, opt_state, elapsed_s: float) -> None:
        state = {"params": nnx.to_pure_dict(params), "opt": opt_state, "elapsed_s": np.float64(elapsed_s)}
        self._manager.save(step, args=ocp.args.StandardSave(state))
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        """The newest complete step."""
        return self._manager.latest_step()

    def restore(self, params, opt_state):
        """-> (step, params, opt_state, elapsed seconds) of the newest complete checkpoint, or None."""
        step = self.latest()
        if step is None:
            return None
        target = {"params": nnx.to_pure_dict(params), "opt": opt_state, "elapsed_s": np.float64(0)}
        state = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        nnx.replace_by_pure_dict(params, state["params"])
        return step, params, state["opt"], float(state["elapsed_s"])

    def close(self) -> None:
        self._manager.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainResult:
    """The trained model and what it took."""

    model: Decoder
    steps: int
    tokens: int
    elapsed_s: float


def train(
    spec: ModelSpec,
    streams: dict[str, npt.NDArray[np.uint16]],
    cfg: TrainConfig,
    folder: Path,
    *,
    resume: bool,
) -> TrainResult:
    """Train for `cfg.minutes` in all, checkpointing into `folder`; a resumed run counts the time already spent."""
    graphdef, params = nnx.split(Decoder(spec, nnx.Rngs(cfg.seed)))
    tx = make_optimizer(cfg)
    opt_state = tx.init(params)
    checkpoints = Checkpoints(folder)
    step, before_s = 0, 0.0
    restored = checkpoints.restore(params, opt_state) if resume else None
    if restored is not None:
        step, params, opt_state, before_s = restored
        log.info("resumed at step %d after %.1f minutes", step, before_s / 60)
    batches, phase = Batches(streams, cfg), _phase_at(before_s / (cfg.minutes * 60))
    update = make_step(graphdef, tx, phase)
    total_s, start_s = cfg.minutes * 60, time.monotonic()
    saved_s, average = before_s, float("nan")
    while (elapsed_s := before_s + time.monotonic() - start_s) < total_s:
        progress = elapsed_s / total_s
        if progress >= phase.until and spec.experts is None:
            phase = _phase_at(progress)
            update = make_step(graphdef, tx, phase)
        rate = np.float32(learning_rate(cfg, step, progress))
        params, opt_state, entropy = update(params, opt_state, batches(step), rate)
        step += 1
        value = float(entropy)
        if not np.isfinite(value):
            raise NumericalError(f"loss is {value} at step {step}: lower the rate; the last good checkpoint is kept")
        average = value if average != average else 0.98 * average + 0.02 * value
        if step % 100 == 0:
            rate_tok_s = step * cfg.batch * cfg.context / elapsed_s
            log.info("step %d  %.1f min  loss %.3f  %.0f tok/s", step, elapsed_s / 60, average, rate_tok_s)
        if elapsed_s - saved_s > cfg.checkpoint_minutes * 60:
            checkpoints.save(step, params, opt_state, elapsed_s)
            saved_s = elapsed_s
    elapsed_s = before_s + time.monotonic() - start_s
    if step > (checkpoints.latest() or 0):
        checkpoints.save(step, params, opt_state, elapsed_s)
    checkpoints.close()
    return TrainResult(
        model=nnx.merge(graphdef, params), steps=step, tokens=step * cfg.batch * cfg.context, elapsed_s=elapsed_s
    )


def _phase_at(progress: float) -> Phase:
    return next((phase for phase in PHASES if progress < phase.until), PHASES[-1])
