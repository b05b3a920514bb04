"""The training loop: resumable to the bit, annealed by the clock, and every shaping term bites."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dynajax.errors import NumericalError
from dynajax.models.decoder import Decoder
from dynajax.testing import TINY_TIED
from dynajax.training import loop
from dynajax.training.loop import Batches, TrainConfig, learning_rate, train, wake_loss

CFG = TrainConfig(minutes=0.4, context=16, batch=2, checkpoint_minutes=0.1, warmup_steps=3)
SPEC = replace(TINY_TIED, vocab=50)


def streams(seed=0):
    rng = np.random.default_rng(seed)
    return {"a": rng.integers(0, 50, 400).astype(np.uint16), "b": rng.integers(0, 50, 100).astype(np.uint16)}


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by a second a look: 24 steps in 0.4 minutes."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))


def leaves(model: Decoder) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, clock, monkeypatch):
    whole = train(SPEC, streams(), CFG, tmp_path / "whole", resume=False)
    make_batch, calls = Batches.__call__, []

    def dying(self, step):
        calls.append(step)
        if step == 17:
            raise KeyboardInterrupt
        return make_batch(self, step)

    monkeypatch.setattr(Batches, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        train(SPEC, streams(), CFG, tmp_path / "cut", resume=False)
    monkeypatch.setattr(Batches, "__call__", make_batch)
    resumed = train(SPEC, streams(), CFG, tmp_path / "cut", resume=True)
    assert (resumed.steps, resumed.tokens) == (whole.steps, whole.tokens)
    assert 17 < whole.steps < 26
    for a, b in zip(leaves(whole.model), leaves(resumed.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_lowers_the_loss_of_what_it_sees(tmp_path, clock):
    text = {"a": np.tile(np.arange(20, dtype=np.uint16), 40)}
    cfg = replace(CFG, minutes=3.0, peak_rate=2e-2)
    result = train(SPEC, text, cfg, tmp_path, resume=False)
    tokens = jnp.asarray(text["a"][:33].astype(np.int32))[None]
    logits, _ = result.model(tokens[:, :-1])
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))
    assert loss < np.log(50) / 2


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, clock):
    with pytest.raises(NumericalError, match="last good checkpoint"):
        train(SPEC, streams(), replace(CFG, peak_rate=1e20), tmp_path, resume=False)


def test_batches_are_a_function_of_seed_and_step():
    first = Batches(streams(), CFG)(5)
    np.testing.assert_array_equal(first, Batches(streams(), CFG)(5))
    assert (first != Batches(streams(), CFG)(6)).any()
    assert (first != Batches(streams(), replace(CFG, seed=1))(5)).any()
    assert first.shape == (2, 17)


def test_rate_warms_up_and_ends_at_zero():
    rates = [learning_rate(CFG, step, step / 24) for step in range(25)]
    assert rates[0] < rates[2] <= CFG.peak_rate
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == 0


def test_wake_loss_pulls_only_neurons_that_slept_a_whole_window():
    gate = jnp.array([[[-1.0, 2.0], [-3.0, -1.0], [-2.0, -5.0], [-4.0, -4.0]]])  # [B=1, T=4, F=2]
    assert wake_loss(gate, 2) == pytest.approx((1.0 + 0.0 + 2.0 + 4.0) / 4)
    gradient = jax.grad(lambda g: wake_loss(g, 2))(gate)
    np.testing.assert_array_equal(np.argwhere(gradient), [[0, 0, 0], [0, 2, 0], [0, 3, 1]])


def test_phases_cover_the_whole_run():
    untils = [phase.until for phase in loop.PHASES]
    assert untils == sorted(set(untils))
    assert untils[-1] == 1.0
