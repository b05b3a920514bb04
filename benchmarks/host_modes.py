"""What a decode step costs in each host mode, and what a mode costs per layer: the same engine several times over.

threads, callback and ffi compute the same half of the units on the host; resident has all of them on the device. One
step of each in turn, so that a noisy neighbour meets them all. Modes must give the same tokens where types are equal.

python -m benchmarks.host_modes --model smollm2-135m --steps 40
python -m benchmarks.host_modes --model smollm2-135m --dtypes float32 float16 bfloat16 --modes ffi resident
"""

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

from dynajax.benching.bandwidth import chunks, read_buffer, seconds, summary
from dynajax.benching.machine import machine
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.opening import Parts, open_parts
from hostcompute import HostPool, default_threads

PROMPT, WARM_UP = 16, 4
Key = tuple[str, str]  # device type, mode


def half_budget(model: str, config: EngineConfig) -> int:
    """Bytes that hold half of the units beside what every mode needs."""
    whole = plan_for(model, config)
    return whole.smallest_budget_bytes + whole.pool // 2


def opened(model: str, dtype: str, mode: str, ctx: int, host_dtype: str) -> Parts:
    settings: dict[str, Any] = {
        "ctx": ctx,
        "dtype": dtype,
        "host_dtype": host_dtype,
        "stats": "none",
        "host_mode": mode,
    }
    if mode == "resident":
        settings["host_mode"] = "auto"
    else:
        settings["vram_budget"] = half_budget(model, EngineConfig(**settings))
    parts = open_parts(model, EngineConfig(**settings), lambda stage, done, total: None, lambda plan: None)
    assert parts.prepared.host_mode == mode, parts.prepared.host_mode
    return parts


def one_step(parts: Parts, token: int, position: int) -> tuple[int, float]:
    """The next token and the seconds it took."""
    start = time.perf_counter()
    logits = parts.stepper.step(np.array([token], np.int32), np.array([position], np.int32), np.ones(1, np.bool_))
    return int(logits[0].argmax()), time.perf_counter() - start


def read_gb_s() -> float:
    """The read bandwidth of this machine: the median over pieces that have left the caches."""
    size = 2**26
    pieces = chunks(read_buffer(size), size)
    with HostPool(default_threads()) as pool:
        return size / float(np.median([seconds(lambda: pool.read_sum(next(pieces))) for _ in range(20)])) / 1e9


def step_bytes(parts: Parts) -> float:
    """Bytes of weights that a step reads: all that is on the device, and what the host counted."""
    plan, counters = parts.prepared.memory, parts.cold.counters
    return plan.dense + parts.pool.nbytes + counters.bytes_read / max(1, parts.stepper.steps)


def measure(engines: dict[Key, Parts], steps: int) -> tuple[dict[Key, list[float]], bool]:
    """Seconds of every counted step, and whether all modes chose the same tokens where their types are equal."""
    prompt = np.random.default_rng(0).integers(0, next(iter(engines.values())).prepared.spec.vocab, PROMPT).tolist()
    chosen = {key: [prompt[-1]] for key in engines}
    spent_s: dict[Key, list[float]] = {key: [] for key in engines}
    for parts in engines.values():
        parts.stepper.prefill(0, prompt[:-1], lambda done, total: None)
    for step in range(WARM_UP + steps):
        for key, parts in engines.items():
            token, spent = one_step(parts, chosen[key][-1], PROMPT - 1 + step)
            chosen[key].append(token)
            if step >= WARM_UP:
                spent_s[key].append(spent)
    answers = {(dtype, tuple(tokens)) for (dtype, _), tokens in chosen.items()}
    return spent_s, len(answers) == len({dtype for dtype, _ in engines})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-relullama")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of the device")
    parser.add_argument("--host-dtype", default="auto")
    parser.add_argument("--modes", nargs="+", default=["threads", "callback", "ffi", "resident"])
    args = parser.parse_args()
    ctx = PROMPT + WARM_UP + args.steps
    keys = [(dtype, mode) for dtype in args.dtypes for mode in args.modes]
    engines = {(dtype, mode): opened(args.model, dtype, mode, ctx, args.host_dtype) for dtype, mode in keys}
    try:
        spent_s, equal = measure(engines, args.steps)
        spec = engines[keys[0]].prepared.spec
        compile_s = {key: parts.prepared.programs.compile_s for key, parts in engines.items()}
        work = {key: step_bytes(parts) for key, parts in engines.items()}
    finally:
        for parts in engines.values():
            parts.close()
    if not equal:
        raise RuntimeError("the modes chose different tokens")
    limit = read_gb_s()
    fastest = min(float(np.median(spent)) for spent in spent_s.values())
    rows = [
        {
            "dtype": key[0],
            "mode": key[1],
            **summary(spent, work[key]),
            "share_of_read_bandwidth": work[key] / float(np.median(spent)) / 1e9 / limit,
            "tok_s": 1 / float(np.median(spent)),
            "above_fastest_us_per_layer": 1e6 * (float(np.median(spent)) - fastest) / spec.layers,
            "compile_s": compile_s[key],
        }
        for key, spent in spent_s.items()
    ]
    for row in rows:
        print(
            f"{row['dtype']:9} {row['mode']:9} {row['tok_s']:7.1f} tok/s, {row['above_fastest_us_per_layer']:7.1f} "
            f"us a layer above the fastest, "
            f"{row['share_of_read_bandwidth']:.0%} of {limit:.1f} GB/s"
        )
    shape = {"model": args.model, "layers": spec.layers, "hidden": spec.hidden, "ffn": spec.ffn}
    print(
        json.dumps(
            {
                "machine": machine(),
                "jax": jax.__version__,
                **shape,
                "steps": args.steps,
                "read_gb_s": limit,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
