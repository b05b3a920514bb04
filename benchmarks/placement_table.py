"""Which models the page on placement measures, and the page itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run over which documents."""

    name: str
    model: str
    ids: str | None = None  # instead of text
    documents: int = 16  # measured
    statistics: int | None = None  # documents that give statistics; None: all there are, of ids 16
    bits: Sequence[int] = (1, 4)  # of the gates that predict
    density: float | None = None  # live share, where no activation is zero


SMOLLM2 = "smollm2-135m"
METHOD = """\
# What placement is worth

Made by `python -m benchmarks.placement --table docs/placement.md --synthetic FOLDER`, with FOLDER from
`python -m benchmarks.make_checkpoint FOLDER`; nothing here is written by hand, and nothing is a measured time.

A plain forward over documents records which neurons are live; `|act| * |down row|` ranks them where no activation is
zero. The planner that drives the engine then decides token after token, with every transfer arriving in time. Its
scores are those of low-bit gates one layer ahead (lead 1), on the stream plus its mean change; they are calibrated,
frequencies counted and masses taken on other documents than those measured: other windows of the held-out texts, or
ids of other seeds. `topics` changes the topic every seven tokens or so, as `--prompt-ids topics:N` does; `topic` keeps
to one, as the tokens do on which the synthetic weights were calibrated. A document's first 64 tokens are its prompt,
which seeds the frequencies.

The pool holds 20, 40 or 60 % of all FFN neurons. Columns are the swaps that a layer may make for a token, as shares of
the mean number of its live neurons (rounded down to the numbers of swaps that the engine compiles programs for).
**hot_share**: of the truly live neurons of layers >= 1, the share found on the device, swaps included. **static** is
the better of two placements: slots by frequency over all layers (`place_static`), or equal slots for every layer
(`place_equal`), from which the other policies start. **bound**: as many live neurons as fit, whatever it would cost to
move them. **gap closed**: the share of the way from static to the bound, for each window.

The second tables are simulated, by the cost model of a 13B layer (published bandwidths of an RTX 4090 with PCIe 4.0):
the mean of max(t_g, t_c) over the steps, once with one threshold on both sides, once with two (`dynamic`). **Err**: the
expected activation mass below the thresholds as a share of all, which `dynamic` may not raise (err_scale 1). `dynamic`
computes more on the device to skip more on the host; where the device is the slower side already, it has nothing to
gain, and the two times are equal.
"""


def cases(synthetic: str | None, *, smollm2: bool) -> list[Case]:
    """Everything that is there."""
    found = [Case(name="tiny-relullama", model="tiny-relullama")]
    if synthetic is not None:
        found += [
            Case(name="synthetic 1.1B, changing topics", model=synthetic, ids="topics:160", documents=4),
            Case(name="synthetic 1.1B, one topic a document", model=synthetic, ids="topic:160", documents=4),
        ]
    if smollm2:
        common: dict[str, Any] = {"model": SMOLLM2, "documents": 4, "statistics": 24, "bits": (4,)}
        found += [
            Case(name=f"{SMOLLM2}, live = top {100 * density:.0f} %", density=density, **common)
            for density in (0.5, 0.25)
        ]
    return found


def page(measured: Sequence[Row]) -> str:
    """The Markdown page; `measured` has the facts and rows of a case and a number of bits each."""
    parts = [METHOD, summary(measured)]
    for one in measured:
        parts += [f"## {_title(one)}\n\n{one['facts']}\n", hot_shares(one["rows"]), times(one["rows"])]
    return "\n".join(parts)


def _title(one: Row) -> str:
    return f"{one['name']}, predicted by {one['bits']}-bit gates"


def summary(measured: Sequence[Row]) -> str:
    """At how many pools and windows the claims hold, and the least of the gaps that macro+micro closes."""
    names = list(measured[0]["claims"])
    windows = list(dict.fromkeys(row["window"] for row in measured[0]["rows"] if "window" in row))
    heads = [*names, *(f"gap closed at {window:.2f}, least" for window in windows)]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for one in measured:
        cells = ["{} of {}".format(*one["claims"][name]) for name in names]
        for window in windows:
            closed = [
                row["gap_closed"] for row in one["rows"] if row["policy"] == "macro+micro" and row["window"] == window
            ]
            cells.append(f"{100 * min(closed):.0f} %")
        lines.append(f"| {_title(one)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def hot_shares(rows: Sequence[Row]) -> str:
    """hot_share by pool and policy, windows as columns, and the gap closed in percent."""
    windows = list(dict.fromkeys(row["window"] for row in rows if "window" in row))
    lines = [
        "| pool | policy | " + " | ".join(f"{window:.2f}" for window in windows) + " | gap closed, % |",
        "|---|---|" + "---|" * (len(windows) + 1),
    ]
    for pool, policy in dict.fromkeys((row["pool"], row["policy"]) for row in rows if row["policy"] != "dynamic"):
        found = [row for row in rows if (row["pool"], row["policy"]) == (pool, policy)]
        if policy in ("static", "bound"):
            cells, closed = [f"{found[0]['hot_share']:.3f}"] * len(windows), "0" if policy == "static" else "100"
        else:
            cells = [f"{row['hot_share']:.3f}" for row in found]
            closed = " / ".join(f"{100 * row['gap_closed']:.0f}" for row in found)
        lines.append(f"| {100 * pool:.0f} % | {policy} | " + " | ".join(cells) + f" | {closed} |")
    return "\n".join(lines) + "\n"


def times(rows: Sequence[Row]) -> str:
    """`dynamic` beside `macro+micro`: the cost model's time of a layer's FFN at equal Err."""
    lines = [
        "| pool | window | macro+micro: max(t_g, t_c), us | Err | dynamic: max(t_g, t_c), us | Err | faster by, % |",
        "|---|---|---|---|---|---|---|",
    ]
    both = ((row, other) for row in rows for other in rows if _pair(row, other))
    for row, other in both:
        saved = 100 * (1 - other["ffn_us"] / row["ffn_us"])
        lines.append(
            f"| {100 * row['pool']:.0f} % | {row['window']:.2f} | {row['ffn_us']:.0f} | {row['err']:.4f} "
            f"| {other['ffn_us']:.0f} | {other['err']:.4f} | {saved:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _pair(row: Row, other: Row) -> bool:
    same = (row["pool"], row.get("window")) == (other["pool"], other.get("window"))
    return same and (row["policy"], other["policy"]) == ("macro+micro", "dynamic")


def claims(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """(how often it holds, of how many pools and windows): the order of the policies, and that thresholds save time."""
    share = {(row["pool"], row["policy"], row.get("window")): row["hot_share"] for row in rows}
    places = [(row["pool"], row["window"]) for row in rows if row["policy"] == "macro+micro"]

    def below(low: str, high: str) -> tuple[int, int]:
        held = [
            share[pool, low, None if low == "static" else window] < share[pool, high, window] for pool, window in places
        ]
        return sum(held), len(held)

    pairs = [(row, other) for row in rows for other in rows if _pair(row, other)]
    return {
        "static < micro": below("static", "micro"),
        "static < macro": below("static", "macro"),
        "micro < macro+micro": below("micro", "macro+micro"),
        "macro < macro+micro": below("macro", "macro+micro"),
        "dynamic faster": (sum(other["ffn_us"] < row["ffn_us"] for row, other in pairs), len(pairs)),
        "no more Err": (sum(other["err"] <= row["err"] for row, other in pairs), len(pairs)),
    }
