"""What every layer of a small model sees and does, for measurements that need no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from dynajax.models.decoder import Decoder, Ffn, add_ffn, embed
from dynajax.ops.ffn import combine
from dynajax.ops.linear import contract


class Layers(NamedTuple):
    """Lists over layers, on the device."""

    streams: list[jax.Array]  # [B, T, D] after attention
    inputs: list[jax.Array]  # [B, T, W] what the FFN reads
    values: list[jax.Array]  # [B, T, F] of the neurons
    live: list[jax.Array]  # [B, T, F]


def layers_of(model: Decoder) -> Callable[[npt.NDArray[np.int32]], Layers]:
    """Jitted: tokens [B, T] -> Layers."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens) -> Layers:
        whole = nnx.merge(graphdef, state)
        spec = whole.spec
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        learned = None if whole.positions is None else whole.positions[...]
        x, seen = embed(spec, whole.embed[...], learned, tokens, positions), Layers([], [], [], [])
        for attend, ffn in zip(whole.attention, whole.ffn, strict=True):
            x, h = attend(x, positions)
            assert isinstance(ffn, Ffn), "a mixture of experts has no neurons to record"
            y, first = ffn(h)
            up = None if ffn.gate is None else contract("BTD,FD->BTF", h, ffn.up[...])
            for part, found in zip(seen, (x, h, *combine(first, up, spec.activation)), strict=True):
                part.append(found)
            x = add_ffn(spec, x, y)
        return seen

    return lambda tokens: run(state, tokens)
