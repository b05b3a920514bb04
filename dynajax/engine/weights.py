"""The dense weights on the device, loaded one layer at a time so that the host never holds them all twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt

from dynajax.checkpoint import Checkpoint
from dynajax.programs import Programs

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """Flat leaves of every AttentionBlock, the final norm [D], and the head's table [V, D]."""

    layers: tuple[Leaves, ...]
    norm: jax.Array
    table: jax.Array
    host_embed: np.ndarray | None  # [V, D] where the embedding is not the head; None where it is

    def lookup(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Embeddings of an untied model, from host memory: ids [T] -> [T, D]."""
        assert self.host_embed is not None
        return self.host_embed[ids].astype(np.float32)


def load_dense(
    checkpoint: Checkpoint,
    programs: Programs,
    device: jax.Device,
    host_dtype: str,
    on_layer: Callable[[int], None],
) -> DenseWeights:
    """Read and send; each tensor leaves host memory before the next is read."""
    dtype = programs.shapes.dtype

    def send(array: np.ndarray) -> jax.Array:
        sent = jax.device_put(array, device)
        sent.block_until_ready()
        return sent

    layers = []
    for layer in range(checkpoint.spec.layers):
        named = checkpoint.attention(layer, dtype)
        layers.append(tuple(send(named.pop(name)) for name in programs.leaf_names))
        on_layer(layer)
    head = checkpoint.head(dtype)
    table = send(checkpoint.embed(dtype) if head is None else head)
    host_embed = None if head is None else checkpoint.embed(host_dtype)
    return DenseWeights(tuple(layers), send(checkpoint.norm(dtype)), table, host_embed)
