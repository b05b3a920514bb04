"""The compiled programs of a mixture of experts: those of the dense families, with routing and experts for neurons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from dynajax.models.decoder import RoutingBlock
from dynajax.ops.experts import write_rows
from dynajax.programs import mixture_bodies as bodies
from dynajax.programs.cache import HANDLE, INT, Programs, shape_of
from dynajax.programs.shapes import Shapes


class MixturePrograms(Programs):
    """See `Programs`. A layer is of the kind "experts" or, without any, "plain"."""

    def __init__(self, shapes: Shapes, host_call: Callable | None = None):
        super().__init__(shapes, host_call)
        spec = shapes.spec
        assert spec.experts is not None, "a dense model has programs of its own"
        first = {self.kind(layer): layer for layer in reversed(range(spec.layers))}
        self._routing = {kind: self._shapes_of(layer) for kind, layer in first.items()}
        self.routing_names = {kind: names for kind, (_, _, _, names) in self._routing.items()}

    def kind(self, layer: int) -> str:
        """ "experts" or "plain"."""
        return "experts" if layer in self.shapes.spec.unit_layers else "plain"

    def _shapes_of(self, layer: int) -> tuple:
        spec, dtype = self.shapes.spec, self.shapes.weight_type
        graphdef, state = nnx.split(nnx.eval_shape(lambda: RoutingBlock(spec, nnx.Rngs(0), dtype, layer)))
        leaves, tree = jax.tree.flatten(state)
        names = tuple(sorted(nnx.to_pure_dict(state)))
        return graphdef, tree, self._held(names, leaves), names

    def _block(self, kind: str, leaves) -> RoutingBlock:
        graphdef, tree, _, _ = self._routing[kind]
        return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))

    # One method per kind: sizes -> the lowered program. Arguments in the order of the shapes given to lower().

    def route_rows(self, prefix: int) -> jax.stages.Lowered:
        def run(leaves, routing, k, v, x, y_cold, positions):
            blocks = self._merge(leaves), self._block("experts", routing)
            return bodies.route_rows(*blocks, k, v, x, y_cold, positions, prefix=prefix)

        args = (self._leaves, self._routing["experts"][2], *self._kv, self._rows, self._rows, self._ids)
        return jax.jit(run, donate_argnums=(2, 3)).lower(*args)

    def route_chunk(self, size: int, prefix: int) -> jax.stages.Lowered:
        def run(leaves, routing, k, v, xs, y_cold, row, start):
            blocks = self._merge(leaves), self._block("experts", routing)
            return bodies.route_chunk(*blocks, k, v, xs, y_cold, row, start, prefix=prefix)

        args = (self._leaves, self._routing["experts"][2], *self._kv, self._xs, self._chunk(size), INT, INT)
        return jax.jit(run, donate_argnums=(2, 3, 4)).lower(*args)

    def always_rows(self, kind: str) -> jax.stages.Lowered:
        def run(routing, x, h):
            return bodies.always_rows(self._block(kind, routing), x, h)

        return jax.jit(run).lower(self._routing[kind][2], self._rows, self._rows)

    def always_chunk(self, kind: str, size: int) -> jax.stages.Lowered:
        def run(routing, xs, h, start):
            return bodies.always_chunk(self._block(kind, routing), xs, h, start)

        return jax.jit(run, donate_argnums=1).lower(self._routing[kind][2], self._xs, self._chunk(size), INT)

    def experts_rows(self, slots: int, experts: int, tokens: int) -> jax.stages.Lowered:
        args = (self._rows, self._rows, self._parts(slots), *_groups(experts, tokens))
        return self._jit(bodies.experts_rows).lower(*args)

    def experts_chunk(self, size: int, slots: int, experts: int, tokens: int) -> jax.stages.Lowered:
        args = (self._xs, self._chunk(size), self._parts(slots), *_groups(experts, tokens), INT)
        return self._jit(bodies.experts_chunk, donate=0).lower(*args)

    def foretell(self, rank: int) -> jax.stages.Lowered:
        def run(routing, h, shift, down, up):
            return bodies.foretell(self._block("experts", routing), h, shift, down, up)

        hidden = self.shapes.spec.hidden
        args = (self._routing["experts"][2], self._rows, shape_of((hidden,)), shape_of((rank, hidden)))
        return jax.jit(run).lower(*args, shape_of((hidden, rank)))

    def write_rows(self, slots: int, rows: int, host_dtype: str) -> jax.stages.Lowered:
        shapes = self.shapes
        part = shape_of(shapes.rows_shape(slots * shapes.spec.unit_rows), shapes.pool_type)
        return jax.jit(write_rows, donate_argnums=0).lower(part, shape_of(shapes.rows_shape(rows), host_dtype), INT)

    def token_rows(self, prefix: int, *slots: int) -> jax.stages.Lowered:
        spec = self.shapes.spec
        kinds = [self.kind(layer) for layer in range(spec.layers)]

        def run(handle, ends, leaves, caches, pools, start, tally, positions, active, where):
            attention, routing = leaves
            blocks = [
                (self._merge(mine), self._block(kind, theirs))
                for kind, mine, theirs in zip(kinds, attention, routing, strict=True)
            ]
            hosts, state = self._hosts(handle, slots), (start, tally, positions, active, where)
            return bodies.token_rows(ends, blocks, caches, pools, hosts, state, prefix=prefix)

        attention, caches, pools = self._stacks(slots)
        leaves = (attention, tuple(self._routing[kind][2] for kind in kinds))
        where = (shape_of((spec.units,), "int32"),) * len(slots)
        args = (HANDLE, self._ends(), leaves, caches, pools, self._start(), self._tally, self._ids, self._active, where)
        return jax.jit(run, donate_argnums=(3, 6)).lower(*args)

    def _hosts(self, handle, slots):
        """Of the layers that have experts, by their number among those."""
        units = self.shapes.spec.units
        return [None if count == units else partial(self._given_host(), handle, m) for m, count in enumerate(slots)]


def _groups(experts: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """slots, rows and weights of `grouped_experts`."""
    return shape_of((experts,), "int32"), shape_of((experts, tokens), "int32"), shape_of((experts, tokens))
