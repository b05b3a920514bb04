"""What a step donates and gets back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dynajax.hugepages import on_huge_pages
from dynajax.programs import Shapes


class DeviceState:
    """Caches of every layer that decodes (behind an encoder also of what that saw), the workspace of a prompt's
    residual stream, and the tally of live slots."""

    def __init__(self, shapes: Shapes):
        spec = shapes.spec
        self.ks: list[jax.Array] = [on_huge_pages(jnp.zeros(shapes.k_shape, shapes.kv_type)) for _ in spec.stepped]
        self.vs: list[jax.Array] = [on_huge_pages(jnp.zeros(shapes.v_shape, shapes.kv_type)) for _ in spec.stepped]
        seen = () if spec.encoder is None else spec.stepped
        self.seen_ks: list[jax.Array] = [on_huge_pages(jnp.zeros(shapes.k_shape, shapes.kv_type)) for _ in seen]
        self.seen_vs: list[jax.Array] = [on_huge_pages(jnp.zeros(shapes.v_shape, shapes.kv_type)) for _ in seen]
        self.lengths = np.zeros(shapes.batch, np.int32)  # of what an encoder read, by row
        self.xs = jnp.zeros((shapes.ctx, spec.hidden), jnp.float32)
        self.tally = jnp.zeros((spec.layers,), jnp.int32)

    def free(self) -> None:
        """Give the memory back now, whoever still holds a reference (the traceback of a failed step does)."""
        for array in (*self.ks, *self.vs, *self.seen_ks, *self.seen_vs, self.xs, self.tally):
            if not array.is_deleted():
                array.delete()
