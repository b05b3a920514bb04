"""What a whole-token program calls for the units that are not on the device, by host mode.

callback: a JAX callback around the same function that threads mode calls; slow, the plain form, an oracle. ffi: the
library's own custom call, on the CPU backend. resident: nothing, every unit is on the device.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec
from dynajax.engine.cold import ColdSide
from dynajax.engine.mixture.cold import ColdExperts
from dynajax.engine.mixture.groups import Routed
from dynajax.errors import UsageError
from dynajax.programs.cache import HostCall
from hostcompute import ffi
from hostcompute.callback import CallbackSlot, cold_experts_callback, cold_ffn_callback

Rows = npt.NDArray[np.float32]


class Host(Protocol):
    """One engine's host inside its programs."""

    @property
    def call(self) -> HostCall | None:
        """Traced into the programs; None where no unit is left for a host."""

    @property
    def handle(self) -> npt.NDArray[np.uint32]:
        """The programs' operand [2] that says whose host is meant."""

    def attach(self, cold: ColdSide | ColdExperts) -> None:
        """The weights are loaded: what to compute from now on."""

    def running(self, active: npt.NDArray[np.bool_]):
        """Around the run of a program and the wait for its result; raises what went wrong on the host."""


class CallbackHost:
    """See the head of this file. `active` masks the rows that count; the others get zeros without being computed."""

    handle = np.zeros(2, np.uint32)

    def __init__(self) -> None:
        self._slot = CallbackSlot()
        self._cold: ColdSide | None = None
        self._active: npt.NDArray[np.bool_] = np.ones(0, np.bool_)

    def call(self, handle: jax.Array, layer: int, h: jax.Array, active: jax.Array) -> jax.Array:
        return cold_ffn_callback(self._compute, jnp.int32(layer), h, self._slot)

    def attach(self, cold: ColdSide | ColdExperts) -> None:
        assert isinstance(cold, ColdSide)
        self._cold = cold

    def running(self, active: npt.NDArray[np.bool_]) -> CallbackSlot:
        self._active = active
        return self._slot

    def _compute(self, layer: int, h: Rows) -> Rows:
        """Runs on the host while the program waits."""
        assert self._cold is not None, "no weights were attached"
        return self._cold.run_active(layer, h, self._active)


class ExpertsCallbackHost:
    """The same for experts."""

    handle = np.zeros(2, np.uint32)

    def __init__(self) -> None:
        self._slot = CallbackSlot()
        self._cold: ColdExperts | None = None
        self._active: npt.NDArray[np.bool_] = np.ones(0, np.bool_)

    def call(self, handle, layer: int, h: jax.Array, ids: jax.Array, weights: jax.Array, active) -> jax.Array:
        return cold_experts_callback(self._compute, jnp.int32(layer), h, ids, weights, self._slot)

    def attach(self, cold: ColdSide | ColdExperts) -> None:
        assert isinstance(cold, ColdExperts)
        self._cold = cold

    def running(self, active: npt.NDArray[np.bool_]) -> CallbackSlot:
        self._active = active
        return self._slot

    def _compute(self, layer: int, h: Rows, ids: npt.NDArray[np.int32], weights: Rows) -> Rows:
        """Runs on the host while the program waits."""
        assert self._cold is not None, "no weights were attached"
        return self._cold.run_absent(layer, h, Routed(ids, weights), self._active)


class FfiHost:
    """See the head of this file."""

    def __init__(self, spec: ModelSpec):
        self.call: HostCall = ffi.cold_ffn_ffi if spec.experts is None else ffi.cold_experts_ffi
        self._table = ffi.HostTable(len(spec.unit_layers))
        self.handle = self._table.address

    def attach(self, cold: ColdSide | ColdExperts) -> None:
        cold.share(self._table)

    @contextmanager
    def running(self, active: npt.NDArray[np.bool_]) -> Generator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # ValueError: from the second run of a program on
            raise (self._table.error or error) from error


class NoHost:
    """See the head of this file."""

    call = None
    handle = np.zeros(2, np.uint32)

    def attach(self, cold: ColdSide | ColdExperts) -> None:
        """Nothing is left to compute."""

    @contextmanager
    def running(self, active: npt.NDArray[np.bool_]) -> Generator[None]:
        yield


def offload_mode(wanted: str, platform: str) -> str:
    """The host mode for a model that is not all on the device: `auto` is threads on a GPU, and ffi without one.

    UsageError if ffi was asked for and cannot be had.
    """
    if wanted not in ("auto", "ffi"):
        return wanted
    if platform != "cpu":
        if wanted == "ffi":
            raise UsageError("--host-mode ffi runs on the CPU backend only: use threads with a GPU")
        return "threads"
    reason = ffi.unavailable()
    if reason is not None and wanted == "ffi":
        raise UsageError(f"--host-mode ffi cannot be used here: {reason}; use threads")
    return "ffi" if reason is None else "threads"


def make_host(mode: str, spec: ModelSpec) -> Host | None:
    """The host of a mode's programs; None in threads mode, which calls the host between them."""
    match mode:
        case "callback":
            return CallbackHost() if spec.experts is None else ExpertsCallbackHost()
        case "ffi":
            return FfiHost(spec)
        case "resident":
            return NoHost()
    return None
