"""The model with an encoder as flax modules, against the float64 forward; its relative positions and full experts."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.mapping import attention_parts, shape_of
from dynajax.checkpoint.spec import spec_of
from dynajax.config import EncoderSpec
from dynajax.models.encoder_decoder import DecoderBlock, EncoderBlock
from dynajax.ops.relative import buckets_of, relative_bias
from dynajax.ops.routing import first_come
from dynajax.reference.switch import bucket
from dynajax.reference.switch import relative_bias as relative_bias_reference
from dynajax.testing import load_encoder_decoder, make_switch
from dynajax.testing.switch import SWITCH, switch_logits

RNG = np.random.default_rng(7)
SOURCES = [RNG.integers(2, 96, length) for length in (70, 33, 1)]
TARGET = np.concatenate([[0], RNG.integers(2, 96, 40)])


@pytest.mark.parametrize("capacity", [64, 5])
def test_it_equals_the_float64_forward(tmp_path, capacity):
    """Rows of several lengths; what pads them has no influence."""
    folder = make_switch(tmp_path, seed=3, expert_capacity=capacity)
    model = load_encoder_decoder(Checkpoint.open(folder))
    source = np.full((3, 80), 5, np.int32)
    for row, ids in enumerate(SOURCES):
        source[row, : len(ids)] = ids
    lengths = np.array([len(ids) for ids in SOURCES], np.int32)
    target = np.broadcast_to(TARGET.astype(np.int32), (3, len(TARGET)))
    logits = nnx.jit(lambda model, *given: model(*given))(model, jnp.asarray(source), lengths, jnp.asarray(target))
    for row, ids in enumerate(SOURCES):
        expected = switch_logits(folder, ids, TARGET, at_once=True)
        near = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
        near(logits[row], expected)
        with pytest.raises(AssertionError):
            near(logits[row], np.roll(expected, 1, axis=1))
        if capacity == 5:
            with pytest.raises(AssertionError):
                near(logits[row], switch_logits(folder, ids, TARGET))


@pytest.mark.parametrize(("kind", "layer"), [(EncoderBlock, 1), (DecoderBlock, 6)])
def test_the_blocks_parameters_are_the_parts_of_their_layers(kind, layer):
    spec = spec_of(SWITCH.config(), Path("config.json"))
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: kind(spec, nnx.Rngs(0), jnp.float32)), nnx.Param))
    assert tuple(sorted(state)) == attention_parts(spec, layer)
    for part, leaf in state.items():
        assert leaf.shape == shape_of(part, spec), part
    size = sum(leaf.size for leaf in state.values())
    cross = (spec.cross_parameters - spec.norm_parameters) // 4
    assert size == spec.block_parameters + (cross if kind is DecoderBlock else 0)


@pytest.mark.parametrize(("count", "most"), [(32, 128), (12, 40), (8, 100), (16, 17), (4, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets(count, most, causal):
    config = {"relative_attention_num_buckets": count, "relative_attention_max_distance": most}
    apart = np.arange(-2000, 2001)
    encoder = EncoderSpec(layers=1, start_id=0, buckets=count, max_distance=most)
    expected = [bucket(config, int(d), causal=causal) for d in apart]
    assert buckets_of(apart, encoder, causal=causal).tolist() == expected
    assert max(expected) == count - 1 and min(expected) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_relative_bias(causal):
    config, encoder = SWITCH.config(), EncoderSpec(layers=4, start_id=0, buckets=12, max_distance=40)
    table = jax.random.normal(jax.random.key(0), (12, 5))
    expected = relative_bias_reference(config, np.asarray(table, np.float64), 60, causal=causal)
    positions = jnp.asarray([[3, 59, 0], [17, 20, 41]], jnp.int32)
    found = np.asarray(relative_bias(table, positions, 60, encoder, causal=causal))
    for row in range(2):
        mine = expected[:, np.asarray(positions[row])]
        there = np.isfinite(mine)
        np.testing.assert_allclose(found[row][there], mine[there], rtol=1e-6)
        assert np.abs(found[row] - np.roll(found[row], 1, axis=-1))[there].max() > 0.1


def test_first_come_first_served():
    ids = jnp.asarray([[0, 0, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 2]], jnp.int32)[..., None]
    taken = first_come(ids, 3, 2)[..., 0].astype(int).tolist()
    assert taken == [[1, 1, 1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0, 1]]
    assert bool(first_come(ids, 3, 8).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": None}, "need an encoder"),
        ({"layers": 4, "experts": {"layers": (1, 3)}}, "an encoder's layers must be < 4"),
        ({"qkv_bias": True}, "no biases"),
        ({"window": 64}, "no window"),
        ({"experts": {"shared": "plain", "shared_width": 4}}, "of which a token goes to one"),
        ({"encoder": {"start_id": 96}}, "start_id < 96"),
        ({"encoder": {"buckets": 7}}, "buckets must be even"),
    ],
    ids=str,
)
def test_impossible_encoders(changes, message):
    spec = spec_of(SWITCH.config(), Path("config.json"))

    def changed(name, value):
        return replace(getattr(spec, name), **value) if isinstance(value, dict) else value

    with pytest.raises(ValueError, match=message):
        replace(spec, **{name: changed(name, value) for name, value in changes.items()})
