"""Programs compiled ahead of time from shapes alone, counted, and measured for scratch memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.models.decoder import AttentionBlock
from dynajax.ops.ffn import write_slots
from dynajax.programs import bodies
from dynajax.programs.bodies import HostFfn
from dynajax.programs.shapes import Shapes

MAX_PROGRAMS = 60


def _shape(dims: Sequence[int], dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(dims), jnp.dtype(dtype))


_INT = _shape((), "int32")


class Programs:
    """Compiled programs by kind and sizes, each compiled when it is first asked for.

    `get("attend_rows", 256)` returns the executable of that kind for those sizes; the methods named like
    the kinds say which sizes and arguments each takes.
    """

    def __init__(self, shapes: Shapes, host_ffn: HostFfn | None = None):
        self.shapes = shapes
        self.compile_s = 0.0
        self._host_ffn = host_ffn
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        spec = shapes.spec
        block = nnx.eval_shape(lambda: AttentionBlock(spec, nnx.Rngs(0), shapes.weight_type))
        self._graphdef, state = nnx.split(block)
        self.leaf_names = tuple(sorted(nnx.to_pure_dict(state)))
        leaves, self._tree = jax.tree.flatten(state)
        self._leaves = tuple(_shape(leaf.shape, leaf.dtype) for leaf in leaves)
        self._kv = _shape(shapes.kv_shape, shapes.dtype)
        self._table = _shape((spec.vocab, spec.hidden), shapes.dtype)
        self._xs = _shape((shapes.ctx, spec.hidden))
        self._rows = _shape((shapes.batch, spec.hidden))
        self._ids = _shape((shapes.batch,), "int32")
        self._active = _shape((shapes.batch,), "bool")
        self._tally = _shape((spec.layers,), "int32")

    @property
    def count(self) -> int:
        """How many programs were compiled so far."""
        return len(self._compiled)

    @property
    def kinds(self) -> list[tuple]:
        """Kind and sizes of every program compiled so far, in order of compilation."""
        return list(self._compiled)

    @property
    def max_temp_bytes(self) -> int:
        """The largest temporary of any program compiled so far."""
        return max((self.temp_bytes(*key) for key in self._compiled), default=0)

    def temp_bytes(self, kind: str, *sizes: int | str) -> int:
        """Bytes of temporaries of one program, compiled if need be."""
        analysis = self.get(kind, *sizes).memory_analysis()
        assert analysis is not None, f"this backend does not tell the size of temporaries ({kind})"
        return analysis.temp_size_in_bytes

    def get(self, kind: str, *sizes: int | str) -> jax.stages.Compiled:
        """The compiled program of this kind and these sizes."""
        key = (kind, *sizes)
        if key not in self._compiled:
            assert self.count < MAX_PROGRAMS, f"more than {MAX_PROGRAMS} programs: {self.kinds}"
            start = time.perf_counter()
            self._compiled[key] = self._compile(kind, *sizes)
            self.compile_s += time.perf_counter() - start
        return self._compiled[key]

    def _compile(self, kind: str, *sizes: int | str) -> jax.stages.Compiled:
        return getattr(self, kind)(*sizes).compile()

    # One method per kind: sizes -> the lowered program. Arguments in the order of the shapes given to lower().

    def embed_rows(self) -> jax.stages.Lowered:
        return jax.jit(bodies.embed_rows).lower(self._table, self._ids)

    def embed_prompt(self) -> jax.stages.Lowered:
        ids = _shape((self.shapes.ctx,), "int32")
        return jax.jit(bodies.embed_prompt, donate_argnums=1).lower(self._table, self._xs, ids)

    def load_chunk(self, size: int) -> jax.stages.Lowered:
        chunk = _shape((size, self.shapes.spec.hidden))
        return jax.jit(bodies.load_chunk, donate_argnums=0).lower(self._xs, chunk, _INT)

    def attend_rows(self, prefix: int) -> jax.stages.Lowered:
        def run(leaves, k, v, x, y_cold, positions):
            return bodies.attend_rows(self._merge(leaves), k, v, x, y_cold, positions, prefix=prefix)

        args = (self._leaves, self._kv, self._kv, self._rows, self._rows, self._ids)
        return jax.jit(run, donate_argnums=(1, 2)).lower(*args)

    def attend_chunk(self, size: int, prefix: int) -> jax.stages.Lowered:
        def run(leaves, k, v, xs, y_cold, row, start):
            return bodies.attend_chunk(self._merge(leaves), k, v, xs, y_cold, row, start, prefix=prefix)

        chunk = _shape((size, self.shapes.spec.hidden))
        args = (self._leaves, self._kv, self._kv, self._xs, chunk, _INT, _INT)
        return jax.jit(run, donate_argnums=(1, 2, 3)).lower(*args)

    def hot_rows(self, slots: int) -> jax.stages.Lowered:
        run = partial(bodies.hot_rows, activation=self.shapes.spec.activation)
        args = (self._rows, self._rows, self._parts(slots), self._tally, _INT, self._active)
        return jax.jit(run, donate_argnums=3).lower(*args)

    def hot_chunk(self, size: int, slots: int) -> jax.stages.Lowered:
        run = partial(bodies.hot_chunk, activation=self.shapes.spec.activation)
        chunk = _shape((size, self.shapes.spec.hidden))
        return jax.jit(run, donate_argnums=0).lower(self._xs, chunk, self._parts(slots), _INT)

    def head(self) -> jax.stages.Lowered:
        norm = _shape((self.shapes.spec.hidden,), self.shapes.dtype)
        run = partial(bodies.head, eps=self.shapes.spec.norm_eps)
        return jax.jit(run).lower(norm, self._table, self._rows, self._rows)

    def write(self, slots: int, count: int, host_dtype: str) -> jax.stages.Lowered:
        spec = self.shapes.spec
        rows = _shape((count, spec.ffn_parts, 1, spec.hidden), host_dtype)
        return jax.jit(write_slots, donate_argnums=0).lower(self._parts(slots), rows, _shape((count,), "int32"))

    def token_rows(self, prefix: int, *slots: int) -> jax.stages.Lowered:
        def run(leaves, caches, pools, x, tally, positions, active):
            body = partial(bodies.token_rows, prefix=prefix, activation=self.shapes.spec.activation)
            blocks, hosts = [self._merge(leaf) for leaf in leaves], self._hosts(slots)
            return body(blocks, caches, pools, hosts, x, tally, positions, active)

        args = (*self._stacks(slots), self._rows, self._tally, self._ids, self._active)
        return jax.jit(run, donate_argnums=(1, 4)).lower(*args)

    def token_chunk(self, size: int, prefix: int, *slots: int) -> jax.stages.Lowered:
        def run(leaves, caches, pools, xs, row, start):
            body = partial(bodies.token_chunk, size=size, prefix=prefix, activation=self.shapes.spec.activation)
            return body([self._merge(leaf) for leaf in leaves], caches, pools, self._hosts(slots), xs, row, start)

        return jax.jit(run, donate_argnums=(1, 3)).lower(*self._stacks(slots), self._xs, _INT, _INT)

    def _hosts(self, slots: Sequence[int]) -> bodies.Hosts:
        """The host's function for every layer that has units left for it."""
        assert self._host_ffn is not None, "callback mode needs a host function"
        return [self._host_ffn if count < self.shapes.spec.ffn else None for count in slots]

    def _stacks(self, slots: Sequence[int]):
        layers = self.shapes.spec.layers
        kv = (self._kv,) * layers
        return (self._leaves,) * layers, (kv, kv), tuple(self._parts(count) for count in slots)

    def _parts(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        part = _shape((slots, self.shapes.spec.hidden), self.shapes.pool_type)
        return (part,) * self.shapes.spec.ffn_parts if slots else ()

    def _merge(self, leaves) -> AttentionBlock:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
