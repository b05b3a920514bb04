"""The thread that brings experts to the device, one at a time: those a layer waits for before those that may come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynajax import worker
from dynajax.pool import DevicePool
from dynajax.transfer import Moved, UnitTransfer

Span = Callable[[str, str, float, float], None]  # lane, name, begin, end
OnMoved = Callable[[Moved], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """One move that was asked for; `moved` once the pool names the unit."""

    layer: int  # of the pool
    unit: int
    slot: int
    moved: Moved | None = None


class Mover(worker.Worker):
    """See the head of this file. The main thread decides and asks; nothing is decided here."""

    def __init__(self, transfer: UnitTransfer, layers: Sequence[int]):
        """layers: of the model, by the number of their arena."""
        self._transfer, self._layers = transfer, layers
        self.span: Span | None = None
        self._open_s = 0.0  # estimate of one move, for `busy_s`
        super().__init__("mover", transfer.close)

    def move(
        self, pool: DevicePool, arena: int, ticket: Ticket, *, urgent: bool = False, first: Callable | None = None
    ) -> Ticket:
        """Bring a unit of an arena to where the ticket says; `first`: run before, in the mover's thread."""

        def task() -> None:
            if first is not None:
                first()
            begin = time.perf_counter()
            moved = self._transfer.bring(pool, arena, ticket.unit, ticket.layer, ticket.slot)
            spent = time.perf_counter() - begin
            self._open_s = spent if not self._open_s else 0.8 * self._open_s + 0.2 * spent
            ticket.moved = moved
            if self.span is not None:
                self.span("copy", f"expert {ticket.unit} of {self._layers[arena]}", begin, begin + spent)

        self._give(task, urgent=urgent)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Until the ticket's unit is in its slot. EngineError if that is forever."""
        if not self._wait_for(lambda: ticket.moved is not None, worker.HANG_S):
            raise self._hung()

    @property
    def busy_s(self) -> float:
        """For how long the link has work, by the moves before; 0: it is idle."""
        return (self._given - self._done) * self._open_s
