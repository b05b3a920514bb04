"""Which form each layer gets: recall per byte, as measured. NumPy is not even needed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from predictors.forms import Form, Shape, form_bytes
from predictors.lowbit import lowbit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One form for one place, its bytes on the device, and its recall on held-out tokens."""

    form: Form
    bytes: int
    recall: float


def choose(
    places: Mapping[Hashable, Sequence[Candidate]], goal: float, budget_bytes: int | None = None
) -> dict[Hashable, Candidate]:
    """One candidate a place. Every place starts with its cheapest; then, while the budget lasts, the upgrade that
    gains most recall per byte is made. Recall beyond `goal` counts for nothing, so places that reach it stay cheap.

    The cheapest ones are taken even if they exceed the budget: the caller compares and drops places or refuses.
    Example: recalls .80 at 10 bytes, .96 at 20, .99 at 40 with goal .95: the second.
    """
    ordered = {place: sorted(options, key=lambda c: (c.bytes, -c.recall)) for place, options in places.items()}
    chosen = {place: options[0] for place, options in ordered.items()}
    spent = sum(candidate.bytes for candidate in chosen.values())
    while True:
        best, best_rate = None, 0.0
        for place, now in chosen.items():
            for option in ordered[place]:
                gain, more = min(option.recall, goal) - min(now.recall, goal), option.bytes - now.bytes
                if gain <= 0 or (budget_bytes is not None and spent + more > budget_bytes):
                    continue
                rate = gain / max(more, 1)
                if rate > best_rate:
                    best, best_rate = (place, option), rate
        if best is None:
            return chosen
        spent += best[1].bytes - chosen[best[0]].bytes
        chosen[best[0]] = best[1]


def default_forms(shape: Shape, kinds: Sequence[str] = ("gate", "mlp")) -> tuple[Form, ...]:
    """What is worth trying: gates of 1, 2 and 4 bits, the first two also with a corrector, an mlp of 4-bit bytes.

    Corrector rank D / 40, at least 16: a few percent of the gate's bytes. For silu, where what is missed is not
    near zero, measurements ask for 4 bits: so 2 and 4, and the corrector with 4.
    """
    rank = max(16, shape.hidden // 40 // 8 * 8)
    silu = shape.activation.kind == "silu"
    gates = [Form(kind="gate", bits=bits) for bits in ((2, 4) if silu else (1, 2, 4))]
    gates += [Form(kind="gate", bits=bits, rank=rank) for bits in ((4,) if silu else (1, 2))]
    found = gates if "gate" in kinds else []
    if "mlp" in kinds:
        found.append(Form(kind="mlp", rank=mlp_rank(shape, 4)))
    if not found:
        raise ValueError(f"kinds must name gate or mlp, got {kinds!r}")
    return tuple(found)


def mlp_rank(shape: Shape, bits: int) -> int:
    """The largest rank at which an mlp takes no more than low-bit copies of the layer's gate."""
    copies = shape.matrices * lowbit_bytes(shape.ffn, shape.hidden, bits)
    ranks = range(copies // (shape.hidden + shape.ffn), 1, -1)  # no parameter takes less than a byte
    return next((rank for rank in ranks if form_bytes(shape, Form(kind="mlp", rank=rank)) <= copies), 1)
