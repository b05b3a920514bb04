"""The llama-family decoder as flax.nnx modules: trained, run resident and used as parity oracle.

Weights keep the checkpoint's [out, in] layout; the FFN is unit-major ([F, D] for gate, up and down), so
that one neuron is one row of each part. The engine uses `AttentionBlock` alone, as flat leaves, and
computes the FFN from its pools.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.config import ModelSpec
from dynajax.ops.attention import attention, rope
from dynajax.ops.ffn import activate
from dynajax.ops.linear import contract, rms_norm


class AttentionBlock(nnx.Module):
    """The half of a layer before its FFN: norm, attention, residual add, and the norm the FFN reads."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        q_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        narrow = 0.02 / (2 * spec.layers) ** 0.5  # residual projections start smaller (GPT-2)
        self.spec = spec
        self.attention_norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.q = nnx.Param(_normal(rngs, (q_dim, spec.hidden), 0.02, dtype))
        self.k = nnx.Param(_normal(rngs, (kv_dim, spec.hidden), 0.02, dtype))
        self.v = nnx.Param(_normal(rngs, (kv_dim, spec.hidden), 0.02, dtype))
        self.o = nnx.Param(_normal(rngs, (spec.hidden, q_dim), narrow, dtype))
        self.ffn_norm = nnx.Param(jnp.ones((spec.hidden,), dtype))

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B,T,D], positions [B,T] -> rotated q [B,T,N,H], rotated k and v [B,T,KV,H], float32."""
        spec = self.spec
        h = rms_norm(x, self.attention_norm[...], spec.norm_eps)
        q, k, v = (contract("BTD,OD->BTO", h, w[...]) for w in (self.q, self.k, self.v))
        batch, length = x.shape[:2]
        q = q.reshape(batch, length, spec.heads, spec.head_dim)
        k = k.reshape(batch, length, spec.kv_heads, spec.head_dim)
        v = v.reshape(batch, length, spec.kv_heads, spec.head_dim)
        return rope(q, positions, spec.rope_theta), rope(k, positions, spec.rope_theta), v

    def merge(self, x: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Residual add of the attention output [B,T,N,H]; -> x [B,T,D] and the FFN's input h [B,T,D]."""
        x = x + contract("BTO,DO->BTD", mixed.reshape(*mixed.shape[:2], -1), self.o[...])
        return x, rms_norm(x, self.ffn_norm[...], self.spec.norm_eps)

    def __call__(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A whole sequence without a cache: x [B,T,D] -> x, h [B,T,D]."""
        q, k, v = self.project(x, positions)
        return self.merge(x, attention(q, k, v, positions))


class Ffn(nnx.Module):
    """act(x gate^T) * (x up^T) down, every part [F, D]."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        shape = (spec.ffn, spec.hidden)
        self.spec = spec
        self.gate = nnx.Param(_normal(rngs, shape, 0.02, dtype))
        self.up = nnx.Param(_normal(rngs, shape, 0.02, dtype))
        self.down = nnx.Param(_normal(rngs, shape, 0.02 / (2 * spec.layers) ** 0.5, dtype))

    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """h [B,T,D] -> output [B,T,D] and the gate before its activation [B,T,F]."""
        gate = contract("BTD,FD->BTF", h, self.gate[...])
        act = activate(gate, self.spec.activation) * contract("BTD,FD->BTF", h, self.up[...])
        return contract("BTF,FD->BTD", act, self.down[...]), gate


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, head; `head` is None when it is tied to the embedding."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.spec = spec
        self.embed = nnx.Param(_normal(rngs, (spec.vocab, spec.hidden), 0.02, dtype))
        self.attention = nnx.List([AttentionBlock(spec, rngs, dtype) for _ in range(spec.layers)])
        self.ffn = nnx.List([Ffn(spec, rngs, dtype) for _ in range(spec.layers)])
        self.norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.head = None if spec.tied else nnx.Param(_normal(rngs, (spec.vocab, spec.hidden), 0.02, dtype))

    def __call__(self, tokens: jax.Array, keep: jax.Array | None = None) -> tuple[jax.Array, list[jax.Array]]:
        """tokens [B,T] int32 -> logits [B,T,V] float32 and each layer's gate [B,T,F].

        keep [L] float32 scales every layer's FFN output (0 removes it); None keeps all.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        x = self.embed[...][tokens].astype(jnp.float32)
        gates = []
        for layer, (attend, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            x, h = attend(x, positions)
            y, gate = ffn(h)
            x = x + (y if keep is None else y * keep[layer])
            gates.append(gate)
        x = rms_norm(x, self.norm[...], self.spec.norm_eps)
        return contract("BTD,VD->BTV", x, (self.embed if self.head is None else self.head)[...]), gates


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype)
