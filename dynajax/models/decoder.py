"""The decoder of every family as flax.nnx modules: trained, run resident and used as parity oracle.

Weights keep the checkpoint's [out, in] layout; the FFN is unit-major ([F, W] for gate, up and down, W = unit_width),
so that one neuron is one row of each part; experts lie one after the other. The engine uses `AttentionBlock` and
`RoutingBlock` alone, as flat leaves, and computes the units from its pools.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.config import ModelSpec
from dynajax.ops.attention import attention, cached_attention
from dynajax.ops.ffn import combine
from dynajax.ops.linear import as_weights, contract, contract_each, layer_norm, rms_norm
from dynajax.ops.rotary import rotate
from dynajax.ops.routing import all_experts, first_come, route, router_logits, spread

Weight = nnx.Param | jax.Array


def embed(
    spec: ModelSpec, table: jax.Array, learned: jax.Array | None, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
    """Rows of table [V,D], which may be packed, for tokens [...], plus the learned positions [P,D] where the model has
    them; float32."""
    x = scaled(as_weights(table[tokens]).astype(jnp.float32), spec.embed_scale)
    return x if learned is None else x + learned[positions].astype(jnp.float32)


def normed(spec: ModelSpec, x: jax.Array, weight: Weight, bias: Weight | None) -> jax.Array:
    """x [..., D] through a norm of the model's kind, float32."""
    if bias is None:
        return rms_norm(x, weight[...], spec.norm_eps)
    return layer_norm(x, weight[...], bias[...], spec.norm_eps)


def add_ffn(spec: ModelSpec, x: jax.Array, y: jax.Array) -> jax.Array:
    """x [..., D] plus a share y [..., W] of the FFN's output."""
    return x + scaled(y[..., : spec.hidden], spec.residual_scale)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """x times a constant of the model, most of which are 1."""
    return x if scale == 1.0 else x * jnp.float32(scale)


class AttentionBlock(nnx.Module):
    """The half of a layer before its FFN: norm, attention, residual add, and the norm the FFN reads."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        q_dim, kv_dim = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        narrow = 0.02 / (2 * spec.layers) ** 0.5  # residual projections start smaller (GPT-2)

        def zeros(size: int, wanted: bool) -> nnx.Param | None:
            return nnx.Param(jnp.zeros((size,), dtype)) if wanted else None

        def ones(size: int, wanted: bool) -> nnx.Param | None:
            return nnx.Param(jnp.ones((size,), dtype)) if wanted else None

        self.spec = spec
        self.attention_norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.attention_norm_bias = zeros(spec.hidden, spec.norm == "layer")
        self.q = nnx.Param(normal(rngs, (q_dim, spec.hidden), 0.02, dtype))
        self.k = nnx.Param(normal(rngs, (kv_dim, spec.hidden), 0.02, dtype))
        self.v = nnx.Param(normal(rngs, (kv_dim, spec.hidden), 0.02, dtype))
        self.o = nnx.Param(normal(rngs, (spec.hidden, q_dim), narrow, dtype))
        self.q_bias = zeros(q_dim, spec.qkv_bias)
        self.k_bias = zeros(kv_dim, spec.qkv_bias)
        self.v_bias = zeros(kv_dim, spec.qkv_bias)
        self.o_bias = zeros(spec.hidden, spec.o_bias)
        self.q_norm = ones(q_dim if spec.qk_norm_whole else spec.head_dim, spec.qk_norm or spec.qk_norm_whole)
        self.k_norm = ones(kv_dim if spec.qk_norm_whole else spec.head_dim, spec.qk_norm or spec.qk_norm_whole)
        self.ffn_norm = ones(spec.hidden, not spec.shared_norm)
        self.ffn_norm_bias = zeros(spec.hidden, spec.norm == "layer" and not spec.shared_norm)
        self.down_bias = zeros(spec.hidden, spec.ffn_bias)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B,T,D], positions [B,T] -> q [B,T,N,H], k and v [B,T,KV,H], float32, rotated where the model does that."""
        spec = self.spec
        h = normed(spec, x, self.attention_norm, self.attention_norm_bias)
        q, k, v = contract_each(h, [self.q[...], self.k[...], self.v[...]])
        q = self._heads(q, self.q_bias, self.q_norm)
        k = self._heads(k, self.k_bias, self.k_norm)
        v = self._heads(v, self.v_bias, None)
        if spec.rope is None:
            return q, k, v
        return rotate(q, positions, spec.rope), rotate(k, positions, spec.rope), v

    def _heads(self, out: jax.Array, bias: nnx.Param | None, norm: nnx.Param | None) -> jax.Array:
        """A projection [B,T,O], cut into heads [B,T,heads,H], each normed where the model does that."""
        out = _shifted(out, bias)
        if self.spec.qk_norm_whole and norm is not None:
            out = rms_norm(out, norm[...], self.spec.norm_eps)
        out = out.reshape(*out.shape[:2], -1, self.spec.head_dim)
        return out if norm is None or self.spec.qk_norm_whole else rms_norm(out, norm[...], self.spec.norm_eps)

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        """Attention of q [B,T,N,H] over keys and values [B,S,KV,H] -> [B,T,N,H]."""
        return attention(q, k, v, positions, self.spec.window, self.spec.attention_scale)

    def mix_cached(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, prefix: int) -> jax.Array:
        """`mix` over the first `prefix` keys and values of a cache."""
        window, scale = self.spec.window, self.spec.attention_scale
        return cached_attention(q, k, v, positions, prefix=prefix, window=window, scale=scale)

    def merge(self, x: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Residual add of the attention output [B,T,N,H]; -> x [B,T,D] and the FFN's input h [B,T,W].

        x already holds the FFN's output bias, which no unit owns.
        """
        scale = self.spec.residual_scale
        out = contract("BTO,DO->BTD", mixed.reshape(*mixed.shape[:2], -1), self.o[...])
        after = x + scaled(_shifted(out, self.o_bias), scale)
        weight, bias = self.ffn_norm, self.ffn_norm_bias
        if weight is None:
            weight, bias = self.attention_norm, self.attention_norm_bias
        h = normed(self.spec, x if self.spec.parallel else after, weight, bias)
        if self.down_bias is None:
            return after, h
        ones = jnp.ones((*h.shape[:2], 1), h.dtype)
        zeros = jnp.zeros((*h.shape[:2], self.spec.unit_width - self.spec.hidden - 1), h.dtype)
        down_bias = scaled(self.down_bias[...].astype(jnp.float32), scale)
        return after + down_bias[None, None, :], jnp.concatenate([h, ones, zeros], axis=-1)

    def __call__(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A whole sequence without a cache: x [B,T,D] -> x [B,T,D], h [B,T,W]."""
        q, k, v = self.project(x, positions)
        return self.merge(x, self.mix(q, k, v, positions))


class LatentAttentionBlock(nnx.Module):
    """`AttentionBlock` for attention with latents, in the form that never makes the keys and values of all heads.

    A query is projected onto the latents instead of the latents onto its head's keys, and what it gathers of them
    becomes its head's values afterwards. C is a latent's size, R that of the rotated key.
    """

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        assert spec.latent is not None
        self.spec, self.latent = spec, spec.latent
        rank, inner, queries = self.latent.kv_rank, self.latent.q_rank, spec.heads * spec.head_dim
        narrow = 0.02 / (2 * spec.layers) ** 0.5

        def weight(rows: int, columns: int, std: float = 0.02) -> nnx.Param:
            return nnx.Param(normal(rngs, (rows, columns), std, dtype))

        def ones(size: int) -> nnx.Param:
            return nnx.Param(jnp.ones((size,), dtype))

        self.attention_norm = ones(spec.hidden)
        self.q = weight(queries, spec.hidden) if inner is None else None
        self.q_down = None if inner is None else weight(inner, spec.hidden)
        self.q_down_norm = None if inner is None else ones(inner)
        self.q_up = None if inner is None else weight(queries, inner)
        self.kv_down = weight(rank + self.latent.rotary, spec.hidden)
        self.kv_down_norm = ones(rank)
        self.key_up = weight(spec.heads * self.latent.plain, rank)
        self.value_up = weight(spec.heads * self.latent.value, rank)
        self.o = weight(spec.hidden, spec.heads * self.latent.value, narrow)
        self.ffn_norm = ones(spec.hidden)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B,T,D], positions [B,T] -> q [B,T,N,C+R], k [B,T,1,C+R] and v [B,T,1,0], float32: values are k's front."""
        spec, latent = self.spec, self.latent
        assert spec.rope is not None, "latents rotate"
        h = normed(spec, x, self.attention_norm, None)
        q = self._queries(h).reshape(*h.shape[:2], spec.heads, spec.head_dim)
        key_up = self.key_up[...].reshape(spec.heads, latent.plain, latent.kv_rank)
        onto_latents = contract("BTNP,NPC->BTNC", q[..., : latent.plain], key_up)
        q = jnp.concatenate([onto_latents, rotate(q[..., latent.plain :], positions, spec.rope)], axis=-1)
        down = contract("BTD,CD->BTC", h, self.kv_down[...])
        kept = rms_norm(down[..., : latent.kv_rank], self.kv_down_norm[...], latent.norm_eps)
        turned = rotate(down[..., None, latent.kv_rank :], positions, spec.rope)
        k = jnp.concatenate([kept[:, :, None, :], turned], axis=-1)
        return q, k, k[..., :0]

    def _queries(self, h: jax.Array) -> jax.Array:
        """h [B,T,D] -> the queries of all heads [B,T,N*H], not rotated."""
        if self.q is not None:
            return contract("BTD,OD->BTO", h, self.q[...])
        assert self.q_down is not None and self.q_down_norm is not None and self.q_up is not None
        down = rms_norm(contract("BTD,AD->BTA", h, self.q_down[...]), self.q_down_norm[...], self.latent.norm_eps)
        return contract("BTA,OA->BTO", down, self.q_up[...])

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        """Attention of q [B,T,N,C+R] over keys [B,S,1,C+R] -> latents [B,T,N,C]; v [B,S,1,0] is not read."""
        return attention(q, k, k[..., : self.latent.kv_rank], positions, None, self.spec.attention_scale)

    def mix_cached(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, prefix: int) -> jax.Array:
        """`mix` over the first `prefix` latents of a cache."""
        return self.mix(q, k[:, :prefix], v[:, :prefix], positions)

    def merge(self, x: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Residual add of the attention output, of latents [B,T,N,C]; -> x [B,T,D] and the FFN's input h [B,T,D]."""
        spec, latent = self.spec, self.latent
        value_up = self.value_up[...].reshape(spec.heads, latent.value, latent.kv_rank)
        values = contract("BTNC,NVC->BTNV", mixed, value_up)
        out = contract("BTO,DO->BTD", values.reshape(*values.shape[:2], -1), self.o[...])
        after = x + scaled(out, spec.residual_scale)
        return after, normed(spec, after, self.ffn_norm, None)

    def __call__(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A whole sequence without a cache: x [B,T,D] -> x [B,T,D], h [B,T,D]."""
        q, k, v = self.project(x, positions)
        return self.merge(x, self.mix(q, k, v, positions))


AnyAttention = AttentionBlock | LatentAttentionBlock


def attention_block(spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype) -> AnyAttention:
    """The block of the model's kind of attention."""
    return AttentionBlock(spec, rngs, dtype) if spec.latent is None else LatentAttentionBlock(spec, rngs, dtype)


class Ffn(nnx.Module):
    """down(act(gate h) * up h), every part [F, W]; without a gate down(act(up h))."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype):
        shape = (spec.ffn, spec.unit_width)
        self.spec = spec
        self.gate = nnx.Param(normal(rngs, shape, 0.02, dtype)) if spec.gated else None
        self.up = nnx.Param(normal(rngs, shape, 0.02, dtype))
        self.down = nnx.Param(normal(rngs, shape, 0.02 / (2 * spec.layers) ** 0.5, dtype))

    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array]:
        """h [B,T,W] -> output [B,T,W] and the product that the activation reads [B,T,F]."""
        up = contract("BTD,FD->BTF", h, self.up[...])
        first = up if self.gate is None else contract("BTD,FD->BTF", h, self.gate[...])
        values, _ = combine(first, None if self.gate is None else up, self.spec.activation)
        return contract("BTF,FD->BTD", values, self.down[...]), first


class RoutingBlock(nnx.Module):
    """What a layer of a mixture of experts has for every token: its router, and its shared expert or only FFN."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype, layer: int):
        assert spec.experts is not None, "there is nothing to route"
        self.spec, self.layer = spec, layer
        router, width = spec.experts.router, spec.always_width(layer)
        routed = layer in spec.experts.layers
        shape = (width, spec.hidden)
        narrow = 0.02 / (2 * spec.layers) ** 0.5

        def some(dims: tuple[int, ...], wanted: bool, std: float = 0.02, part: str = "") -> nnx.Param | None:
            kind = jnp.dtype(spec.routing_dtype(part, jnp.dtype(dtype).name))
            return nnx.Param(normal(rngs, dims, std, kind)) if wanted else None

        self.router = some((router.experts, spec.hidden), routed, part="router")
        self.router_bias = some((router.experts,), routed and router.logits_bias, part="router_bias")
        self.selection_bias = some((router.experts,), routed and router.selection_bias, part="selection_bias")
        self.gate = some(shape, bool(width) and spec.gated)
        self.up = some(shape, bool(width))
        self.down = some(shape, bool(width), narrow)
        self.mix = some((1, spec.hidden), routed and spec.experts.shared == "gated")

    def logits(self, h: jax.Array) -> jax.Array:
        """h [..., D] -> the router's [..., E]."""
        assert self.router is not None and self.spec.experts is not None, f"layer {self.layer} has no experts"
        bias = None if self.router_bias is None else self.router_bias[...]
        return router_logits(h, self.router[...], bias, self.spec.experts.router)

    def route(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """logits [T, E] -> experts of each token [T, K] int32 and their weights."""
        assert self.spec.experts is not None
        bias = None if self.selection_bias is None else self.selection_bias[...]
        return route(logits, bias, self.spec.experts.router)

    def always(self, h: jax.Array) -> jax.Array | None:
        """What every token gets [T, D], whichever experts it goes to; None: nothing."""
        if self.up is None or self.down is None:
            return None
        up = contract("TD,FD->TF", h, self.up[...])
        first = up if self.gate is None else contract("TD,FD->TF", h, self.gate[...])
        values, _ = combine(first, None if self.gate is None else up, self.spec.activation)
        y = contract("TF,FD->TD", values, self.down[...])
        return y if self.mix is None else y * jax.nn.sigmoid(contract("TD,ED->TE", h, self.mix[...]))


class MixtureFfn(nnx.Module):
    """The FFN of a layer with experts, and every expert computed for every token: for training, and as an oracle."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype, layer: int):
        assert spec.experts is not None
        self.spec, self.block = spec, RoutingBlock(spec, rngs, dtype, layer)
        self.routed = layer in spec.experts.layers
        shape = (spec.units * spec.unit_rows, spec.hidden)

        def part(std: float, wanted: bool = True) -> nnx.Param | None:
            return nnx.Param(normal(rngs, shape, std, dtype)) if wanted and self.routed else None

        self.gate = part(0.02, spec.gated)
        self.up = part(0.02)
        self.down = part(0.02 / (2 * spec.layers) ** 0.5)

    def __call__(self, h: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """h [B,T,D] -> output [B,T,D], and the router's logits [B,T,E]; None in a layer without experts."""
        flat = h.reshape(-1, h.shape[-1])
        y, logits = self.block.always(flat), None
        if self.routed:
            logits = self.block.logits(flat)
            weights = spread(*self._accepted(h, *self.block.route(logits)), self.spec.units)
            parts = tuple(part[...] for part in (self.gate, self.up, self.down) if part is not None)
            routed = all_experts(flat, parts, weights, self.spec.activation)
            y, logits = routed if y is None else y + routed, logits.reshape(*h.shape[:2], -1)
        assert y is not None, "a layer without experts has an FFN"
        return y.reshape(h.shape), logits

    def _accepted(self, h: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """ids and weights [B*T,K], zero where an expert of limited capacity has enough of h's tokens [B,T,D]."""
        assert self.spec.experts is not None
        if (capacity := self.spec.experts.capacity) is None:
            return ids, weights
        taken = first_come(ids.reshape(*h.shape[:2], -1), self.spec.units, capacity)
        return ids, jnp.where(taken.reshape(weights.shape), weights, jnp.float32(0))


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, head; `head` is None when it is tied to the embedding."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.spec = spec
        self.embed = nnx.Param(normal(rngs, (spec.vocab, spec.hidden), 0.02, dtype))
        learned = (spec.max_positions, spec.hidden)
        self.positions = nnx.Param(normal(rngs, learned, 0.02, dtype)) if spec.learned_positions else None
        self.attention = nnx.List([attention_block(spec, rngs, dtype) for _ in range(spec.layers)])
        self.ffn = nnx.List([_ffn(spec, rngs, dtype, layer) for layer in range(spec.layers)])
        self.norm = nnx.Param(jnp.ones((spec.hidden,), dtype))
        self.norm_bias = nnx.Param(jnp.zeros((spec.hidden,), dtype)) if spec.norm == "layer" else None
        self.head = None if spec.tied else nnx.Param(normal(rngs, (spec.vocab, spec.hidden), 0.02, dtype))

    def __call__(self, tokens: jax.Array, keep: jax.Array | None = None) -> tuple[jax.Array, list[jax.Array]]:
        """tokens [B,T] int32 -> logits [B,T,V] float32 and, of each layer, what its activation reads [B,T,F] (with
        experts, the router's logits [B,T,E] of the layers that have them).

        keep [L] float32 scales every layer's FFN output (0 removes it); None keeps all.
        """
        passed = list(self._layers(tokens, keep))
        gates = [gate for *_, gate in passed if gate is not None]
        x = scaled(normed(self.spec, passed[-1][1], self.norm, self.norm_bias), self.spec.logit_scale)
        return contract("BTD,VD->BTV", x, (self.embed if self.head is None else self.head)[...]), gates

    def ffn_inputs(self, tokens: jax.Array) -> list[jax.Array]:
        """What every layer's FFN reads [B,T,W]."""
        return [h for h, _, _ in self._layers(tokens, None)]

    def _layers(self, tokens: jax.Array, keep: jax.Array | None):
        """Layer after layer: the FFN's input, the stream behind it, and what `__call__` tells of the layer."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        learned = None if self.positions is None else self.positions[...]
        x = embed(self.spec, self.embed[...], learned, tokens, positions)
        for layer, (attend, ffn) in enumerate(zip(self.attention, self.ffn, strict=True)):
            x, h = attend(x, positions)
            y, gate = ffn(h)
            x = add_ffn(self.spec, x, y if keep is None else y * keep[layer])
            yield h, x, gate


def _ffn(spec: ModelSpec, rngs: nnx.Rngs, dtype: jnp.dtype, layer: int) -> Ffn | MixtureFfn:
    return Ffn(spec, rngs, dtype) if spec.experts is None else MixtureFfn(spec, rngs, dtype, layer)


def _shifted(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    return x if bias is None else x + bias[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    """A weight before training."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * std).astype(dtype)
