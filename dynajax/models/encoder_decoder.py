"""A model with an encoder as flax.nnx modules; see `models.decoder`, whose parts these are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.config import ModelSpec
from dynajax.models.decoder import AttentionBlock, MixtureFfn, add_ffn, embed, normal, normed, scaled
from dynajax.ops.attention import attention
from dynajax.ops.linear import contract
from dynajax.ops.relative import relative_bias


class EncoderBlock(AttentionBlock):
    """`AttentionBlock` of a layer of the encoder, every token of which sees all others."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        assert spec.encoder is not None
        super().__init__(spec, rngs, dtype)
        self.relative = nnx.Param(normal(rngs, (spec.encoder.buckets, spec.heads), 0.02, dtype))

    def read(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B,S,D], of which the first lengths [B] of each row are a text -> x, and the FFN's input h [B,S,D]."""
        spec = self.spec
        assert spec.encoder is not None
        size = x.shape[1]
        positions = jnp.arange(size, dtype=jnp.int32)[None, :]
        q, k, v = self.project(x, positions)
        bias = relative_bias(self.relative[...], positions, size, spec.encoder, causal=False)
        return self.merge(x, attention(q, k, v, last_keys(lengths, size), None, spec.attention_scale, bias))


class DecoderBlock(AttentionBlock):
    """`AttentionBlock` of a layer of the decoder: behind its own attention one to what came out of the encoder."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        assert spec.encoder is not None
        super().__init__(spec, rngs, dtype)
        queries, keys = (count * spec.head_dim for count in (spec.heads, spec.kv_heads))
        self.relative = nnx.Param(normal(rngs, (spec.encoder.buckets, spec.heads), 0.02, dtype))
        self.cross_norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.cross_q = nnx.Param(normal(rngs, (queries, spec.hidden), 0.02, dtype))
        self.cross_k = nnx.Param(normal(rngs, (keys, spec.hidden), 0.02, dtype))
        self.cross_v = nnx.Param(normal(rngs, (keys, spec.hidden), 0.02, dtype))
        narrow = 0.02 / (2 * spec.layers) ** 0.5
        self.cross_o = nnx.Param(normal(rngs, (spec.hidden, queries), narrow, dtype))

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        """Attention of q [B,T,N,H] over the decoder's own keys and values [B,S,KV,H] -> [B,T,N,H]."""
        assert self.spec.encoder is not None
        bias = relative_bias(self.relative[...], positions, k.shape[1], self.spec.encoder, causal=True)
        return attention(q, k, v, positions, None, self.spec.attention_scale, bias)

    def remember(self, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What came out of the encoder [B,S,D] -> the keys and values that `look` reads [B,S,KV,H], float32."""
        k, v = (contract("BTD,OD->BTO", seen, part[...]) for part in (self.cross_k, self.cross_v))
        return (
            k.reshape(*k.shape[:2], self.spec.kv_heads, self.spec.head_dim),
            v.reshape(*v.shape[:2], self.spec.kv_heads, self.spec.head_dim),
        )

    def look(
        self, x: jax.Array, mixed: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """x [B,T,D] with its own attention's output [B,T,N,H] and that over keys and values of the encoder [B,S,KV,H],
        the first lengths [B] of each row -> x, and the FFN's input h [B,T,D]."""
        spec = self.spec
        assert self.ffn_norm is not None
        x, _ = self.merge(x, mixed)
        h = normed(spec, x, self.cross_norm, None)
        q = contract("BTD,OD->BTO", h, self.cross_q[...]).reshape(*h.shape[:2], spec.heads, spec.head_dim)
        found = attention(q, k, v, last_keys(lengths, x.shape[1]), None, spec.attention_scale)
        out = contract("BTO,DO->BTD", found.reshape(*found.shape[:2], -1), self.cross_o[...])
        x = x + scaled(out, spec.residual_scale)
        return x, normed(spec, x, self.ffn_norm, self.ffn_norm_bias)


def last_keys(lengths: jax.Array, queries: int) -> jax.Array:
    """The last key that each query sees [B, T], where all see the first lengths [B]."""
    return jnp.broadcast_to(lengths[:, None] - 1, (lengths.shape[0], queries))


class EncoderDecoder(nnx.Module):
    """Embedding, encoder, norm, decoder, norm, and the head, which is the embedding: the parity oracle."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        assert spec.encoder is not None and spec.tied
        self.spec = spec
        self.embed = nnx.Param(normal(rngs, (spec.vocab, spec.hidden), 0.02, dtype))
        kinds = [DecoderBlock if layer in spec.stepped else EncoderBlock for layer in range(spec.layers)]
        self.attention = nnx.List([kind(spec, rngs, dtype) for kind in kinds])
        self.ffn = nnx.List([MixtureFfn(spec, rngs, dtype, layer) for layer in range(spec.layers)])
        self.encoder_norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.norm = nnx.Param(jnp.ones((spec.hidden,), dtype))

    def __call__(self, source: jax.Array, lengths: jax.Array, target: jax.Array) -> jax.Array:
        """source [B,S], the first lengths [B] of each row, and target [B,T] -> logits [B,T,V] float32. All tokens of a
        target are given at once, so that its experts take a limited number of them too."""
        spec = self.spec
        seen = self._encode(source, lengths)
        positions = jnp.broadcast_to(jnp.arange(target.shape[1], dtype=jnp.int32)[None, :], target.shape)
        x = embed(spec, self.embed[...], None, target, positions)
        for layer in spec.stepped:
            block = self.attention[layer]
            assert isinstance(block, DecoderBlock)
            q, k, v = block.project(x, positions)
            x, h = block.look(x, block.mix(q, k, v, positions), *block.remember(seen), lengths)
            x = add_ffn(spec, x, self.ffn[layer](h)[0])
        x = scaled(normed(spec, x, self.norm, None), spec.logit_scale)
        return contract("BTD,VD->BTV", x, self.embed[...])

    def _encode(self, source: jax.Array, lengths: jax.Array) -> jax.Array:
        spec = self.spec
        x = embed(spec, self.embed[...], None, source, jnp.zeros_like(source))
        for layer in range(spec.stepped[0]):
            block = self.attention[layer]
            assert isinstance(block, EncoderBlock)
            x, h = block.read(x, lengths)
            x = add_ffn(spec, x, self.ffn[layer](h)[0])
        return normed(spec, x, self.encoder_norm, None)
