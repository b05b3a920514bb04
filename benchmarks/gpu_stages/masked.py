"""Stage `masked`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_stages.device import facts, is_cpu, median_s
from benchmarks.gpu_stages.isolated import Report
from benchmarks.gpu_stages.step import randoms
from dynajax.config import Activation
from dynajax.ops.ffn import activate, combine, pool_ffn, pool_ffn_reference
from dynajax.ops.linear import contract

SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the slots, admitted
RELU = Activation()
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}  # of the largest element
Parts = tuple[jax.Array, ...]


def run(report: Report) -> None:
    """From which live share on is a dense product over all slots faster than gathering the rows that are live?

    The engine masks: all slots are computed, whatever theta_g says. `gather` brings the admitted rows together and
    computes those; `gate_then_gather` computes every gate and gathers up and down of what is live. If one of them is
    faster at the live share of real models (`crossover_share` of 0.1 and more), the hot program should gather with a
    ladder of counts, and theta_g then saves time; if `crossover_share` is 0, masking stays.
    """
    report.add(**facts())
    slots, hidden = (688, 256) if is_cpu() else (11008, 4096)
    dtype = "float32" if is_cpu() else "float16"
    shape = jax.ShapeDtypeStruct((slots, hidden), dtype)
    parts = randoms((shape,) * 3, 0)
    h = jax.device_put(np.random.default_rng(1).standard_normal((1, hidden), np.float32))
    cases: list[dict[str, Any]] = []
    for share in SHARES[1::4] if is_cpu() else SHARES:
        case: dict[str, Any] = {"share": share, **measure(h, parts, share)}
        cases.append(case)
        report.add(slots=slots, hidden=hidden, dtype=dtype, cases=cases)
        for name, error in case["error"].items():
            if not error < TOLERANCE[dtype]:
                report.fail(f"{name} at a share of {share} is off by {error:.1e} of the largest element")
    faster = {
        name: max([case["share"] for case in cases if case["us"][name] < case["us"]["masked"]], default=0)
        for name in ("gather", "gate_then_gather")
    }
    report.add(crossover_share=faster, choice="gather" if max(faster.values()) >= SHARES[1] else "masked")


def measure(h: jax.Array, parts: Parts, share: float) -> dict[str, Any]:
    """Microseconds of each way with that share of the slots admitted, and how far each is off."""
    slots = len(parts[0])
    rng = np.random.default_rng(round(1000 * share))
    admitted = np.sort(rng.permutation(slots)[: max(1, round(share * slots))]).astype(np.int32)
    admit = np.zeros((1, slots), np.bool_)
    admit[0, admitted] = True
    wanted = np.asarray(masked_reference(h, parts, admit))
    ways: dict[str, tuple[Callable, tuple]] = {
        "masked": (lambda h, parts, admit: pool_ffn(h, parts, RELU, admit)[0], (h, parts, jax.device_put(admit))),
        "gather": (gathered, (h, parts, jax.device_put(admitted))),
        "gate_then_gather": (
            lambda h, parts, admit: gate_then_gathered(h, parts, admit, len(admitted)),
            (h, parts, jax.device_put(admit)),
        ),
    }
    times, errors = {}, {}
    for name, (body, arguments) in ways.items():
        program = jax.jit(body).lower(*arguments).compile()
        found = np.asarray(program(*arguments))
        errors[name] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        seconds = median_s(lambda: program(*arguments).block_until_ready(), 5 if is_cpu() else 50)
        times[name] = round(1e6 * seconds, 1)
    read = sum(part.nbytes for part in parts)
    return {"us": times, "error": errors, "masked_gb_s": round(read / times["masked"] / 1e3, 1)}


def masked_reference(h: jax.Array, parts: Parts, admit: np.ndarray) -> jax.Array:
    """The plain FFN of the rows that are admitted, in float32."""
    chosen = tuple(part[np.flatnonzero(admit[0])] for part in parts)
    with jax.default_matmul_precision("highest"):
        return pool_ffn_reference(h, chosen, RELU)


def gathered(h: jax.Array, parts: Parts, rows: jax.Array) -> jax.Array:
    """The FFN of those rows [N] of the pool, brought together first."""
    gate, up, down = (part.at[rows].get(indices_are_sorted=True, unique_indices=True) for part in parts)
    values, _ = combine(contract("TD,GD->TG", h, gate), contract("TD,GD->TG", h, up), RELU)
    return contract("TG,GD->TD", values, down)


def gate_then_gathered(h: jax.Array, parts: Parts, admit: jax.Array, most: int) -> jax.Array:
    """Every gate; up and down only of at most so many slots that are admitted and whose gate is not zero."""
    gate, up, down = parts
    act = jnp.where(admit, activate(contract("TD,GD->TG", h, gate), RELU), jnp.float32(0))[0]
    (rows,) = jnp.nonzero(act, size=most, fill_value=0)
    kept = jnp.where(jnp.arange(most) < jnp.count_nonzero(act), act[rows], jnp.float32(0))[None]
    up, down = (part.at[rows].get(indices_are_sorted=False) for part in (up, down))
    return contract("TG,GD->TD", kept * contract("TD,GD->TG", h, up), down)
