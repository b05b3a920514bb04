"""Programs compiled ahead of time from shapes alone, counted, and measured for scratch memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dynajax.config import is_packed
from dynajax.models.decoder import AnyAttention, attention_block
from dynajax.ops.ffn import write_slots
from dynajax.programs import bodies
from dynajax.programs.shapes import Shapes
from dynajax.quant import held_as
from predictors.forms import Form, Shape, param_shapes

MAX_PROGRAMS = 60


def shape_of(dims: Sequence[int], dtype="float32") -> jax.ShapeDtypeStruct:
    """Of an argument."""
    return jax.ShapeDtypeStruct(tuple(dims), jnp.dtype(dtype))


INT = shape_of((), "int32")
HANDLE = shape_of((2,), "uint32")  # which engine's host a whole-token program calls; see hostcompute.ffi

HostCall = Callable[..., jax.Array]  # handle, layer, h [T,W], (ids [T,K], weights [T,K] of experts), rows -> y_cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What predictors that share a program have in common."""

    form: Form
    dtype: str = "float16"  # of trained matrices
    density: float | None = None  # the share of a row's neurons whose score reaches 1/2; None: as calibrated

    @property
    def name(self) -> str:
        share = "" if self.density is None else f"@{self.density:g}"
        return f"{self.form.name}-{self.form.reads}{'-weighted' * self.form.weighted}-{self.dtype}{share}"


class Programs:
    """Compiled programs by kind and sizes, each compiled when it is first asked for.

    `get("attend_rows", 256)` returns the executable of that kind for those sizes; the methods named like
    the kinds say which sizes and arguments each takes.
    """

    def __init__(self, shapes: Shapes, host_call: HostCall | None = None):
        self.shapes = shapes
        self.forms: dict[str, Scoring] = {}  # kinds of predictors by the name that `score` knows them by
        self.compile_s = 0.0
        self._host_call = host_call
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._temp_bytes: dict[tuple, int] = {}
        spec = shapes.spec
        self._graphdef, state = nnx.split(nnx.eval_shape(self._block_of))
        self.leaf_names = tuple(sorted(nnx.to_pure_dict(state)))
        leaves, self._tree = jax.tree.flatten(state)
        self._leaves = self._held(self.leaf_names, leaves)
        self._kv = tuple(shape_of(dims, shapes.kv_type) for dims in (shapes.k_shape, shapes.v_shape))
        self._table = self._held_as("head", (spec.vocab, spec.hidden))
        learned = (self._held_as("positions", (spec.max_positions, spec.hidden)),) if spec.learned_positions else ()
        self._tables = (self._table, *learned)
        self._norm = (self._held_as("norm", (spec.hidden,)),) * (2 if spec.norm == "layer" else 1)
        self._xs = shape_of((shapes.ctx, spec.hidden))
        self._rows = shape_of((shapes.batch, spec.hidden))
        self._wide_rows = shape_of((shapes.batch, spec.unit_width))
        self._ids = shape_of((shapes.batch,), "int32")
        self._active = shape_of((shapes.batch,), "bool")
        self._tally = shape_of((spec.layers,), "int32")

    def _block_of(self) -> AnyAttention:
        """The block of attention of every layer, or of those that decode."""
        return attention_block(self.shapes.spec, nnx.Rngs(0), self.shapes.weight_type)

    def _held_as(self, name: str, dims: Sequence[int]) -> jax.ShapeDtypeStruct:
        """Of a weight on the device."""
        shapes = self.shapes
        return shape_of(*held_as(name, tuple(dims), shapes.dtype, tied=shapes.spec.tied))

    def _held(self, names: Sequence[str], leaves: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the parameters of a block: packed matrices have other shapes than the module says, the rest its own."""
        packed = is_packed(self.shapes.dtype)
        return tuple(
            self._held_as(name, leaf.shape) if packed else shape_of(leaf.shape, leaf.dtype)
            for name, leaf in zip(names, leaves, strict=True)
        )

    def names_of(self, layer: int) -> tuple[str, ...]:
        """The parameters of a layer's block of attention, in the order of its leaves."""
        return self.leaf_names

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
        key = (kind, *sizes)
        if key not in self._temp_bytes:  # asking takes milliseconds
            analysis = self.get(kind, *sizes).memory_analysis()
            assert analysis is not None, f"this backend does not tell the size of temporaries ({kind})"
            self._temp_bytes[key] = analysis.temp_size_in_bytes
        return self._temp_bytes[key]

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
        return self._jit(bodies.embed_rows).lower(self._tables, self._ids, self._ids)

    def embed_prompt(self) -> jax.stages.Lowered:
        ids = shape_of((self.shapes.ctx,), "int32")
        return self._jit(bodies.embed_prompt, donate=1).lower(self._tables, self._xs, ids)

    def load_chunk(self, size: int) -> jax.stages.Lowered:
        chunk = shape_of((size, self.shapes.spec.hidden))
        return jax.jit(bodies.load_chunk, donate_argnums=0).lower(self._xs, chunk, INT)

    def attend_rows(self, prefix: int) -> jax.stages.Lowered:
        def run(leaves, k, v, x, y_cold, positions):
            return bodies.attend_rows(self._merge(leaves), k, v, x, y_cold, positions, prefix=prefix)

        args = (self._leaves, *self._kv, self._rows, self._wide_rows, self._ids)
        return jax.jit(run, donate_argnums=(1, 2)).lower(*args)

    def attend_chunk(self, size: int, prefix: int) -> jax.stages.Lowered:
        def run(leaves, k, v, xs, y_cold, row, start):
            return bodies.attend_chunk(self._merge(leaves), k, v, xs, y_cold, row, start, prefix=prefix)

        args = (self._leaves, *self._kv, self._xs, self._chunk(size), INT, INT)
        return jax.jit(run, donate_argnums=(1, 2, 3)).lower(*args)

    def hot_rows(self, slots: int) -> jax.stages.Lowered:
        args = (self._rows, self._wide_rows, self._parts(slots), self._tally, INT, self._active)
        return self._jit(self._hot(bodies.hot_rows), donate=3).lower(*args)

    def hot_chunk(self, size: int, slots: int) -> jax.stages.Lowered:
        args = (self._xs, self._chunk(size), self._parts(slots), INT)
        return self._jit(self._hot(bodies.hot_chunk), donate=0).lower(*args)

    def hot_admitted_rows(self, slots: int) -> jax.stages.Lowered:
        args = (self._rows, self._wide_rows, self._parts(slots), *self._admission(self.shapes.batch, slots))
        return self._jit(self._hot(bodies.hot_admitted_rows)).lower(*args)

    def hot_admitted_chunk(self, size: int, slots: int) -> jax.stages.Lowered:
        args = (self._xs, self._chunk(size), self._parts(slots), *self._admission(size, slots), INT)
        return self._jit(self._hot(bodies.hot_admitted_chunk), donate=0).lower(*args)

    def score(self, size: int, name: str) -> jax.stages.Lowered:
        kind, shape, number = self.forms[name], Shape.of(self.shapes.spec), shape_of(())
        body = partial(bodies.score, shape=shape, form=kind.form, density=kind.density)
        params = self._params(kind)
        stream = shape_of((size, self.shapes.spec.hidden))
        return jax.jit(body).lower(params, stream, self._chunk(size), number, number)

    def _params(self, kind: Scoring) -> dict[str, jax.ShapeDtypeStruct]:
        arrays = param_shapes(Shape.of(self.shapes.spec), kind.form, kind.dtype)
        return {key: shape_of(dims, dtype) for key, (dims, dtype) in arrays.items()}

    def live_slots(self, size: int, slots: int) -> jax.stages.Lowered:
        return self._jit(bodies.live_slots).lower(self._chunk(size), self._parts(slots))

    def head(self) -> jax.stages.Lowered:
        return self._jit(bodies.head).lower(self._norm, self._table, self._rows, self._wide_rows)

    def write(self, slots: int, count: int, host_dtype: str) -> jax.stages.Lowered:
        spec = self.shapes.spec
        rows = shape_of(self.shapes.rows_shape(count, spec.ffn_parts, 1), host_dtype)
        return jax.jit(write_slots, donate_argnums=0).lower(self._parts(slots), rows, shape_of((count,), "int32"))

    def token_rows(self, prefix: int, *slots: int) -> jax.stages.Lowered:
        def run(handle, ends, leaves, caches, pools, *state):
            blocks, hosts = [self._merge(leaf) for leaf in leaves], self._hosts(handle, slots)
            body = partial(self._hot(bodies.token_rows), prefix=prefix)
            return body(ends, blocks, caches, pools, hosts, state)

        args = (HANDLE, self._ends(), *self._stacks(slots), self._start(), self._tally, self._ids, self._active)
        return jax.jit(run, donate_argnums=(3, 6)).lower(*args)

    def token_skipping_rows(self, prefix: int, *foretold: int | str) -> jax.stages.Lowered:
        """foretold: of every layer behind which one it is, and by whom as `score` knows them: 0, name, 0, name, ..."""
        spec, kinds = self.shapes.spec, [self.forms[str(name)] for name in foretold[1::2]]
        asked = [bodies.Asked(int(at), kind.form, kind.density) for at, kind in zip(foretold[::2], kinds, strict=True)]

        def run(ends, leaves, caches, pools, told, *state):
            blocks = [self._merge(leaf) for leaf in leaves]
            body = partial(bodies.token_skipping_rows, prefix=prefix, asked=asked)
            return body(ends, blocks, caches, pools, told, state)

        norms = None if spec.activation.has_zeros else shape_of((spec.ffn,))
        told = tuple(bodies.Told(self._params(kind), shape_of(()), shape_of(()), norms) for kind in kinds)
        counts, looks = shape_of((3, spec.layers), "int32"), shape_of((spec.layers,), "bool")
        args = (self._ends(), *self._stacks((spec.ffn,) * spec.layers), told, self._start(), counts, self._ids)
        return jax.jit(run, donate_argnums=2).lower(*args, self._active, looks, shape_of((), "uint8"))

    def _ends(self) -> tuple:
        """norm, the head's table, and the tables of the embedding where they are on the device."""
        return self._norm, self._table, self._tables if self.shapes.spec.tied else ()

    def _start(self) -> jax.ShapeDtypeStruct:
        """What a whole token begins with."""
        return self._ids if self.shapes.spec.tied else self._rows

    def _hot(self, body: Callable) -> Callable:
        """A body that computes a pool's share of the FFN."""
        return partial(body, skip_zeros=self.shapes.skip_zeros)

    def _jit(self, body: Callable, donate: int | None = None):
        """A body that only needs the spec."""
        return jax.jit(partial(body, spec=self.shapes.spec), donate_argnums=() if donate is None else donate)

    def _chunk(self, size: int) -> jax.ShapeDtypeStruct:
        return shape_of((size, self.shapes.spec.unit_width))

    def _admission(self, size: int, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """bucket, scores, theta."""
        return shape_of((slots,), "int32"), shape_of((size, self.shapes.spec.ffn), "uint8"), shape_of((), "uint8")

    def _hosts(self, handle: jax.Array, slots: Sequence[int]) -> bodies.Hosts:
        """The host's function for every layer that has units left for it."""

        units = self.shapes.spec.units
        return [
            None if count == units else partial(self._given_host(), handle, layer) for layer, count in enumerate(slots)
        ]

    def _given_host(self) -> Callable:
        assert self._host_call is not None, "units are left for a host that was not given"
        return self._host_call

    def _stacks(self, slots: Sequence[int]):
        layers = len(self.shapes.spec.stepped)
        caches = tuple((cache,) * layers for cache in self._kv)
        return (self._leaves,) * layers, caches, tuple(self._parts(count) for count in slots)

    def _parts(self, slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        spec = self.shapes.spec
        part = shape_of(self.shapes.rows_shape(slots * spec.unit_rows), self.shapes.pool_type)
        return (part,) * spec.ffn_parts if slots else ()

    def _merge(self, leaves) -> AnyAttention:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
