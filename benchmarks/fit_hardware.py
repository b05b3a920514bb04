"""Fits what the published tables leave open of a machine: to Transformers, llama.cpp and PowerInfer, to nothing else.

    python -m benchmarks.fit_hardware pc-high --write
    python -m benchmarks.fit_hardware pc-low

DynamicInfer's figures and every share stay out of it, so that what the simulator says of them is a prediction. The
objective is the sum of the eighth powers of the errors, so that the worst row counts most. Prints each row, and ends in
one line of JSON; --write puts the figures into the machine's file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from dynajax.sim.compare import Job, SystemName, simulate
from dynajax.sim.hardware import Hardware, load_hardware
from dynajax.sim.published import ROWS, PublishedRow

FOLDER = Path(__file__).parents[1] / "dynajax" / "assets" / "hardware"
FITTED: tuple[SystemName, ...] = ("transformers", "llama.cpp", "powerinfer")
TOKENS = 4  # a static placement needs few


def machine(base: Hardware, values: Mapping[str, float]) -> Hardware:
    """The machine with these figures.

    *_reserved_bytes: what a system that places whole layers leaves free. sync_s: PowerInfer's hand-over.
    """
    rates = {name.removeprefix("cpu_"): value for name, value in values.items() if name.startswith("cpu_")}
    rates = {name: min(rate, base.host_bps) for name, rate in rates.items()}  # nobody reads faster than memory
    rates |= {"bfloat16": rates["float16"]}
    systems = {
        name: {**base.systems.get(name, {}), "reserved_bytes": int(values[f"{name}_reserved_bytes"])}
        for name in ("transformers", "llama.cpp")
    }
    systems["powerinfer"] = {**base.systems.get("powerinfer", {}), "sync_s": values["sync_s"]}
    return replace(base, cpu_bps=rates, pageable_bps=values["pageable_bps"], systems=systems)


def errors(hardware: Hardware, rows: Sequence[PublishedRow]) -> dict[tuple[str, str], float]:
    """simulated / published - 1 of every figure that is fitted."""
    found = {}
    for row in rows:
        job = Job(model=row.model, dtype=row.dtype, hardware=hardware, tokens=TOKENS)
        for name in FITTED:
            found[row.name, name] = simulate(job, name).tok_s / row.tok_s[name] - 1
    return found


def fit(base: Hardware, start: Mapping[str, float], rows: Sequence[PublishedRow]) -> dict[str, float]:
    """The values with the smallest errors, from several starts."""
    names = list(start)

    def values(point: np.ndarray) -> dict[str, float]:
        return {name: float(start[name] * np.exp(x)) for name, x in zip(names, point, strict=True)}

    def loss(point: np.ndarray) -> float:
        found = np.array(list(errors(machine(base, values(point)), rows).values()))
        return float(((found / 0.15) ** 8).sum())

    rng = np.random.default_rng(0)
    starts = [np.zeros(len(names)), *(rng.uniform(-0.4, 0.4, len(names)) for _ in range(3))]
    best = min(
        (
            minimize(loss, x, method="Nelder-Mead", options={"maxfev": 250, "initial_simplex": simplex(x)})
            for x in starts
        ),
        key=lambda result: result.fun,
    )
    return values(best.x)


def simplex(point: np.ndarray) -> np.ndarray:
    """Corners far enough apart to see over the steps that whole layers make."""
    return np.concatenate([point[None], point[None] + 0.15 * np.eye(len(point))])


def start_of(base: Hardware) -> dict[str, float]:
    """Where the search begins: what the file says now."""
    own = base.systems.get("powerinfer", {})
    reserved = {
        f"{name}_reserved_bytes": float(base.systems.get(name, {}).get("reserved_bytes", 3 * base.reserved_bytes))
        for name in ("transformers", "llama.cpp")
    }
    rates = {f"cpu_{name}": rate for name, rate in base.cpu_bps.items() if name != "bfloat16"}
    return {"pageable_bps": base.pageable_bps, **reserved, **rates,
            "sync_s": float(own.get("sync_s", base.sync_s))}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=["pc-high", "pc-low", "pc-low-12gb"])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    base = load_hardware(args.machine)
    rows = [row for row in ROWS if args.machine in (row.machine, row.hardware)]
    values = fit(base, start_of(base), rows)
    values = {name: min(value, base.host_bps) if name.startswith("cpu_") else value for name, value in values.items()}
    rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
    found = errors(fitted := machine(base, rounded), rows)
    for (row, name), error in found.items():
        print(f"{row:24} {name:14} {error:+7.1%}")
    if args.write:
        text = json.dumps(fitted.to_json(), indent=2) + "\n"
        (FOLDER / f"{args.machine}.json").write_text(text, encoding="utf-8")
    worst = max(abs(error) for error in found.values())
    print(json.dumps({"machine": args.machine, "constants": rounded, "figures": len(found), "worst": round(worst, 4)}))


if __name__ == "__main__":
    main()
