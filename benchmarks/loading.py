"""Host memory while a model is loaded: the peak of the process less what the device holds, beside the weights' bytes.

    python -m benchmarks.loading --model runs/moe-4gb --vram-budget 2GiB

On the CPU backend the device's arrays are memory of the process; they are subtracted. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from dynajax.config import EngineConfig
from dynajax.engine.opening import open_parts

SHARE, MORE = 1.10, 2**29  # the promise: peak <= 1.10 x weights in host memory + 0.5 GiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--vram-budget", default="2GiB")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--ctx", type=int, default=256)
    args = parser.parse_args()
    config = EngineConfig(vram_budget=args.vram_budget, ctx=args.ctx, policy=args.policy)
    begin = time.perf_counter()
    parts = open_parts(args.model, config, lambda *_: None, lambda _: None)
    load_s = time.perf_counter() - begin
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = parts.memory_figures()
    host, device = memory["host_bytes"], memory["peak_bytes"]
    allowed = SHARE * host + MORE
    told = {
        "peak_rss_bytes": peak,
        "device_bytes": device,
        "host_bytes": host,
        "allowed_bytes": int(allowed),
        "kept": peak - device <= allowed,
        "over_weights": (peak - device) / host,
        "load_s": load_s,
        "gb_s": host / 1e9 / load_s,
    }
    parts.close()
    print(f"peak {peak / 2**30:.2f} GiB, device {device / 2**30:.2f}, host weights {host / 2**30:.2f}")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
