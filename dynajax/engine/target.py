"""The device that an engine is planned for: the one jax computes on, or one that is only described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynajax.config import EngineConfig, parse_budget
from dynajax.errors import FitError, UsageError

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of a GPU, what jax may use of it


class Target(Protocol):
    """What planning asks of a device; a `jax.Device` is one."""

    @property
    def platform(self) -> str:
        """ "cpu", or what else jax calls it."""
        ...

    def memory_stats(self) -> Mapping[str, Any] | None:
        """bytes_limit, what programs may use, and bytes_in_use; None where jax does not count."""
        ...


@dataclass(frozen=True, slots=True)
class Described:
    """A device that is not here: a GPU, or a CPU backend."""

    platform: str
    limit_bytes: int

    def memory_stats(self) -> Mapping[str, Any] | None:
        """As of a jax device of that platform that nobody uses."""
        return None if self.platform == "cpu" else {"bytes_limit": self.limit_bytes, "bytes_in_use": 0}


def budget_limit(config: EngineConfig, device: Target) -> int | None:
    """The budget in bytes. `auto` is all that jax may use of a GPU; on the CPU backend None: it holds everything."""
    wanted = parse_budget(config.vram_budget)
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        if isinstance(wanted, float):
            raise UsageError(f"--vram-budget {config.vram_budget} is a share of GPU memory, and there is no GPU")
        return wanted
    free = int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    total = free if wanted is None else int(free * wanted) if isinstance(wanted, float) else wanted
    if total > free:
        more = "" if isinstance(device, Described) else f", or raise {FRACTION} before jax is imported"
        raise FitError(
            f"--vram-budget {config.vram_budget} is {total} bytes, but jax may use {free} of this GPU: lower it{more}"
        )
    return total
