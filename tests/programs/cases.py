"""A small model whose every setting matters, and arguments for each of its programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dynajax.config import Activation
from dynajax.models.decoder import AttentionBlock
from dynajax.programs import Programs, Shapes
from dynajax.testing import TINY_GQA

SPEC = replace(
    TINY_GQA,
    layers=3,
    activation=Activation(kind="fatrelu", threshold=0.4),
    rope_theta=300.0,
    norm_eps=1e-2,
    head_dim=16,
)
SHAPES = Shapes(spec=SPEC, dtype="float32", ctx=264, batch=2)  # prefixes 256 and 264


def host_ffn(layer, h):
    """Stands in for the host: depends on the layer and on every input."""
    return 0.1 * (layer.astype(jnp.float32) + 1) * h[:, ::-1]


def programs(shapes=SHAPES):
    return Programs(shapes, host_ffn)


class Maker:
    """Random arrays of the right shapes, in the order they are asked for."""

    def __init__(self, shapes=SHAPES, seed=0):
        self.shapes = shapes
        self._rng = np.random.default_rng(seed)

    def floats(self, *shape, scale=1.0):
        return jnp.asarray(self._rng.standard_normal(shape) * scale, jnp.float32)

    def ints(self, high, *shape):
        return jnp.asarray(self._rng.integers(0, high, shape), jnp.int32)

    def block(self):
        """One AttentionBlock of random weights."""
        block = AttentionBlock(self.shapes.spec, nnx.Rngs(0), jnp.dtype("float32"))
        for name in ("attention_norm", "ffn_norm", "q", "k", "v", "o"):
            weight = getattr(block, name)
            scale = weight[...].shape[-1] ** -0.5
            weight.set_value(self.floats(*weight[...].shape, scale=scale) + (1.0 if "norm" in name else 0.0))
        return block

    def kv(self):
        return self.floats(*self.shapes.kv_shape)

    def rows(self):
        return self.floats(self.shapes.batch, self.shapes.spec.hidden)

    def prompt(self):
        return self.floats(self.shapes.ctx, self.shapes.spec.hidden)

    def table(self):
        return self.floats(self.shapes.spec.vocab, self.shapes.spec.hidden)

    def pool(self, slots):
        """gate, up and down, or () where there is no slot."""
        hidden = self.shapes.spec.hidden
        return tuple(self.floats(slots, hidden, scale=hidden**-0.5) for _ in range(3)) if slots else ()


def leaves(block, names):
    """The flat weights of a block, as the engine hands them over."""
    return tuple(getattr(block, name)[...] for name in names)


def copied(tree):
    """The same arrays in buffers of their own: programs may take what they are given."""
    return jax.tree.map(jnp.array, tree)
