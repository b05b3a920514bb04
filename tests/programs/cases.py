"""Small models whose every setting matters, and arguments for each of their programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dynajax.config import Activation, Rope
from dynajax.models.decoder import AttentionBlock
from dynajax.programs import Programs, Shapes
from dynajax.testing import TINY_GQA

SPEC = replace(
    TINY_GQA,
    layers=3,
    activation=Activation(kind="fatrelu", threshold=0.4),
    rope=Rope(theta=300.0),
    norm_eps=1e-2,
    head_dim=16,
)
_UNGATED = {"activation": Activation(), "gated": False, "norm": "layer", "tied": True}
SPECS = {  # the residual layouts, and everything that one of them may have
    "llama": SPEC,
    "opt": replace(SPEC, layout="opt", rope=None, qkv_bias=True, o_bias=True, ffn_bias=True, **_UNGATED),
    "parallel": replace(SPEC, layout="falcon", parallel=True, shared_norm=True, window=9, **_UNGATED),
    "scaled": replace(
        SPEC,
        activation=Activation(kind="drelu"),
        qk_norm=True,
        ffn_bias=True,
        embed_scale=3.0,
        residual_scale=0.7,
        logit_scale=0.25,
    ),
}
SHAPES = Shapes(spec=SPEC, dtype="float32", ctx=264, batch=2)  # prefixes 256 and 264


def shapes_of(name):
    """SHAPES for a model of SPECS."""
    return replace(SHAPES, spec=SPECS[name])


def host_ffn(handle, layer, h, active):
    """Stands in for the host: depends on every input."""
    return (0.1 * (layer + 1) + handle[0].astype(jnp.float32)) * h[:, ::-1] * active[:, None]


def programs(shapes=SHAPES):
    return Programs(shapes, host_ffn)


class Maker:
    """Random arrays of the right shapes, in the order they are asked for."""

    def __init__(self, shapes=SHAPES, seed=0):
        self.shapes, self.spec = shapes, shapes.spec
        self._rng = np.random.default_rng(seed)

    def floats(self, *shape, scale=1.0):
        return jnp.asarray(self._rng.standard_normal(shape) * scale, jnp.float32)

    def ints(self, high, *shape):
        return jnp.asarray(self._rng.integers(0, high, shape), jnp.int32)

    def block(self):
        """One AttentionBlock of random weights."""
        block = AttentionBlock(self.spec, nnx.Rngs(0), jnp.dtype("float32"))
        for name in sorted(nnx.to_pure_dict(nnx.state(block))):
            weight = getattr(block, name)
            shape = weight[...].shape
            scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.2
            norm = "norm" in name and "bias" not in name
            weight.set_value(self.floats(*shape, scale=scale) + (1.0 if norm else 0.0))
        return block

    def kv(self):
        return self.floats(*self.shapes.k_shape)

    def rows(self):
        return self.floats(self.shapes.batch, self.spec.hidden)

    def wide(self, count):
        """Rows of the FFN's width, W."""
        return self.floats(count, self.spec.unit_width)

    def wide_rows(self):
        return self.wide(self.shapes.batch)

    def prompt(self):
        return self.floats(self.shapes.ctx, self.spec.hidden)

    def table(self):
        return self.floats(self.spec.vocab, self.spec.hidden)

    def tables(self):
        """What tokens are looked up in: embeddings, and learned positions where the model has them."""
        learned = () if self.spec.rope is not None else (self.floats(self.spec.max_positions, self.spec.hidden),)
        return self.table(), *learned

    def norm(self):
        """The final norm: weight, and bias where it has one."""
        return tuple(self.floats(self.spec.hidden) for _ in range(2 if self.spec.norm == "layer" else 1))

    def pool(self, slots):
        """The parts of so many units, or () where there is no slot."""
        width = self.spec.unit_width
        return tuple(self.floats(slots, width, scale=width**-0.5) for _ in range(self.spec.ffn_parts)) if slots else ()


def leaves(block, names):
    """The flat weights of a block, as the engine hands them over."""
    return tuple(getattr(block, name)[...] for name in names)


def copied(tree):
    """The same arrays in buffers of their own: programs may take what they are given."""
    return jax.tree.map(jnp.array, tree)
