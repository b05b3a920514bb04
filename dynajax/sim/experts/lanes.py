"""The works of a simulated mixture: programs on the device, experts on the host, transfers on the link. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynajax.policy.experts.records import Ints
from dynajax.sim.events import Simulation, Work
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.experts.sides import Sides
from dynajax.sim.hardware import PROGRAMS, Hardware, Program


@dataclass(slots=True, eq=False)
class Lanes:
    """Gives works to the lanes of one simulation."""

    load: MixtureLoad
    hardware: Hardware
    sides: Sides
    simulation: Simulation = field(init=False)
    launch_s: float = field(init=False)  # of a program that computes experts
    _programs: Mapping[str, Program] = field(init=False)
    _asks: Mapping[str, float] = field(init=False)  # of a transfer

    def __post_init__(self) -> None:
        hardware = self.hardware
        self.simulation = Simulation({"memory": hardware.host_bps, "cores": float(hardware.cores)})
        self._programs = {kind: hardware.program(kind) for kind in PROGRAMS}
        self.launch_s = self._programs["hot"].fixed_s
        self._asks = {"memory": hardware.link_bps * (2 if hardware.shared else 1)}
        if hardware.shared and hardware.link_bps > hardware.host_bps:  # nothing is copied
            self._asks = {}

    def python(self, seconds: float) -> Work:
        """Of the main thread."""
        return self.simulation.give("main", "python", seconds)

    def program(self, kind: str, size: float, flops: float) -> Work:
        """A program on the device that reads `size` bytes, and computes: the longer of the two, and its launch."""
        program = self._programs[kind if kind in self._programs else "hot"]
        fixed = min(program.fixed_s, program.at(size))
        return self._device(kind, fixed, max(program.at(size) - fixed, flops / self.hardware.device_flops), size)

    def experts(self, kind: str, tokens: Ints) -> Work:
        """A program on the device that computes experts with so many tokens [n]."""
        busy = float(self.sides.device_s(tokens).sum())
        return self._device(kind, self.launch_s, busy, len(tokens) * self.load.unit)

    def cold(self, tokens: Ints) -> Work:
        """The host computes experts with so many tokens [n]."""
        busy = float(self.sides.host_s(tokens).sum())
        size = len(tokens) * self.load.host_unit
        asks = {"memory": size / busy, "cores": float(self.hardware.cores)}
        return self.simulation.give("host", "cold", self.sides.sync_s, busy, asks)

    def transfer(self) -> Work:
        """An expert comes to the device."""
        sides = self.sides
        return self.simulation.give("link", "transfer", sides.copy_fixed_s, sides.copy_busy_s, self._asks)

    def hand_over(self) -> Work:
        """A layer's ids come to the host."""
        return self.simulation.give("hand-over", "ids", self.hardware.sync_s / 2)

    def _device(self, kind: str, fixed_s: float, busy_s: float, size: float) -> Work:
        asks: Mapping[str, float] = {}
        if self.hardware.shared and busy_s > 0:
            asks = {"memory": size / busy_s, "cores": float(self.hardware.cores)}
        return self.simulation.give("device", kind, fixed_s, busy_s, asks)
