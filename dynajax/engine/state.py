"""What a step donates and gets back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dynajax.programs import Shapes


class DeviceState:
    """Caches of every layer, the workspace of a prompt's residual stream, and the tally of live slots."""

    def __init__(self, shapes: Shapes):
        spec = shapes.spec
        self.ks: list[jax.Array] = [jnp.zeros(shapes.k_shape, shapes.weight_type) for _ in range(spec.layers)]
        self.vs: list[jax.Array] = [jnp.zeros(shapes.v_shape, shapes.weight_type) for _ in range(spec.layers)]
        self.xs = jnp.zeros((shapes.ctx, spec.hidden), jnp.float32)
        self.tally = jnp.zeros((spec.layers,), jnp.int32)

    def free(self) -> None:
        """Give the memory back now, whoever still holds a reference (the traceback of a failed step does)."""
        for array in (*self.ks, *self.vs, self.xs, self.tally):
            if not array.is_deleted():
                array.delete()
