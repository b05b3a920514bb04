"""The compiled programs of a model with an encoder: those of a mixture of experts, and what reads a prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import jax
from flax import nnx

from dynajax.models.encoder_decoder import DecoderBlock, EncoderBlock
from dynajax.programs import encoded_bodies as bodies
from dynajax.programs.cache import HANDLE, INT, shape_of
from dynajax.programs.mixture import MixturePrograms
from dynajax.programs.shapes import Shapes


@final
class EncodedPrograms(MixturePrograms):
    """See `MixturePrograms`. Leaves without more are those of a decoder layer."""

    def __init__(self, shapes: Shapes, host_call: Callable | None = None):
        super().__init__(shapes, host_call)
        spec, dtype = shapes.spec, shapes.weight_type
        graphdef, state = nnx.split(nnx.eval_shape(lambda: EncoderBlock(spec, nnx.Rngs(0), dtype)))
        self._encoder_names = tuple(sorted(nnx.to_pure_dict(state)))
        leaves, tree = jax.tree.flatten(state)
        self._encoder_leaves = self._held(self._encoder_names, leaves)
        self._encoder_block = lambda given: nnx.merge(graphdef, jax.tree.unflatten(tree, given))
        lengths = shape_of((shapes.batch,), "int32")
        self._source = (*self._kv, lengths)

    def _block_of(self) -> DecoderBlock:
        return DecoderBlock(self.shapes.spec, nnx.Rngs(0), self.shapes.weight_type)

    def _decoder(self, leaves) -> DecoderBlock:
        block = self._merge(leaves)
        assert isinstance(block, DecoderBlock)
        return block

    def names_of(self, layer: int) -> tuple[str, ...]:
        """The parameters of a layer's block of attention, in the order of its leaves."""
        return self.leaf_names if layer in self.shapes.spec.stepped else self._encoder_names

    # One method per kind: sizes -> the lowered program. Arguments in the order of the shapes given to lower().

    def read(self, kind: str, size: int) -> jax.stages.Lowered:
        def run(leaves, routing, xs, y_cold, length):
            router = self._block(kind, routing) if kind == "experts" else None
            return bodies.read(self._encoder_block(leaves), router, xs, y_cold, length)

        args = (self._encoder_leaves, self._routing[kind][2], self._xs, self._chunk(size), INT)
        return jax.jit(run, donate_argnums=2).lower(*args)

    def seen(self, size: int) -> jax.stages.Lowered:
        return self._jit(bodies.seen, donate=1).lower(self._norm[0], self._xs, self._chunk(size))

    def remember(self, size: int) -> jax.stages.Lowered:
        def run(leaves, k, v, xs, row):
            return bodies.remember(self._decoder(leaves), k, v, xs, row, size=size)

        return jax.jit(run, donate_argnums=(1, 2)).lower(self._leaves, *self._kv, self._xs, INT)

    def attend_rows(self, prefix: int) -> jax.stages.Lowered:
        def run(leaves, k, v, x, y_cold, positions, *source):
            return bodies.attend_rows(self._decoder(leaves), k, v, x, y_cold, positions, source, prefix=prefix)

        args = (self._leaves, *self._kv, self._rows, self._rows, self._ids, *self._source)
        return jax.jit(run, donate_argnums=(1, 2)).lower(*args)

    def route_rows(self, prefix: int) -> jax.stages.Lowered:
        def run(leaves, routing, k, v, x, y_cold, positions, *source):
            blocks = self._decoder(leaves), self._block("experts", routing)
            return bodies.route_rows(*blocks, k, v, x, y_cold, positions, source, prefix=prefix)

        args = (self._leaves, self._routing["experts"][2], *self._kv, self._rows, self._rows, self._ids, *self._source)
        return jax.jit(run, donate_argnums=(2, 3)).lower(*args)

    def token_rows(self, prefix: int, *slots: int) -> jax.stages.Lowered:
        spec = self.shapes.spec
        kinds = [self.kind(layer) for layer in spec.stepped]

        def run(handle, ends, leaves, caches, pools, start, tally, positions, active, where, *source):
            blocks = [
                (self._decoder(mine), self._block(kind, theirs))
                for kind, mine, theirs in zip(kinds, *leaves, strict=True)
            ]
            state = (start, tally, positions, active, where)
            body = partial(bodies.token_rows, prefix=prefix)
            return body(ends, blocks, caches, pools, self._hosts(handle, slots), state, source)

        attention, caches, pools = self._stacks(slots)
        leaves = (attention, tuple(self._routing[kind][2] for kind in kinds))
        where = (shape_of((spec.units,), "int32"),) * len(slots)
        ends = (self._norm, self._table, self._tables)
        args = (HANDLE, ends, leaves, caches, pools, self._ids, self._tally, self._ids, self._active, where)
        return jax.jit(run, donate_argnums=(3, 6)).lower(*args, *caches, self._source[2])
