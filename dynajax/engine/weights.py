"""The dense weights on the device, loaded one layer at a time so that the host never holds them all twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.budget import table_dtype
from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.quantised import PackedCheckpoint
from dynajax.hugepages import put
from dynajax.programs import MixturePrograms, Programs

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """What is on the device besides the units, and the tables of an untied embedding, which stay on the host."""

    scale: float  # of the embeddings
    layers: tuple[Leaves, ...]  # flat leaves of every AttentionBlock
    norm: Leaves  # the final one: weight [D], and bias [D] where it has one
    table: jax.Array  # of the head, [V, D]
    tables: Leaves  # embeddings [V, D] and learned positions [P, D], if on the device
    host_tables: tuple[np.ndarray, ...]  # the same, if on the host
    encoder_norm: jax.Array | None = None
    routing: tuple[Leaves, ...] = ()  # flat leaves of every RoutingBlock of a mixture of experts

    def lookup(self, ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Embeddings from host memory: ids [T] at positions [T] -> [T, D]."""
        embed, *learned = self.host_tables
        x = embed[ids].astype(np.float32)
        if self.scale != 1.0:
            x *= np.float32(self.scale)
        return x + learned[0][np.minimum(positions, len(learned[0]) - 1)].astype(np.float32) if learned else x


def load_dense(
    checkpoint: Checkpoint | PackedCheckpoint,
    programs: Programs,
    device: jax.Device,
    host_dtype: str,
    on_layer: Callable[[int], None],
) -> DenseWeights:
    """Read and send; each tensor leaves host memory before the next is read."""
    spec, dtype = checkpoint.spec, programs.shapes.dtype

    def send(array: np.ndarray) -> jax.Array:
        return put(array, device)

    def tables(dtype: str) -> list[np.ndarray]:
        learned = checkpoint.positions(dtype)
        return [checkpoint.embed(dtype)] + ([] if learned is None else [learned])

    layers, routing = [], []
    for layer in range(spec.layers):
        named = checkpoint.attention(layer, dtype)
        layers.append(tuple(send(named.pop(name)) for name in programs.names_of(layer)))
        if isinstance(programs, MixturePrograms):
            named = checkpoint.routing(layer, dtype)
            routing.append(tuple(send(named.pop(name)) for name in programs.routing_names[programs.kind(layer)]))
        on_layer(layer)
    norm = tuple(send(part) for part in checkpoint.norm(dtype))
    if spec.tied:
        sent = tuple(send(table) for table in tables(dtype))
        behind = None if spec.encoder is None else send(checkpoint.encoder_norm(dtype))
        return DenseWeights(spec.embed_scale, tuple(layers), norm, sent[0], sent, (), behind, tuple(routing))
    head = checkpoint.head(dtype)
    assert head is not None, "an untied model has a head"
    return DenseWeights(
        spec.embed_scale,
        tuple(layers),
        norm,
        send(head),
        (),
        tuple(tables(table_dtype(spec, host_dtype))),
        None,
        tuple(routing),
    )
