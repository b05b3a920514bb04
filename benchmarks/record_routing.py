"""Make the recording that ships for the simulator: windows of the held-out texts, each read and then continued.

40 % of the experts are on the device, and costs are fixed, so that the simulator makes the same plans.

python -m benchmarks.record_routing --model tiny-moe --out dynajax/assets/activity/tiny-moe.npz
"""

import argparse
from pathlib import Path

from benchmarks.expert_engine import opened, texts
from dynajax import Engine
from dynajax.trace import Recorder

WINDOWS, PROMPT, CONTINUED, SHARE = 32, 64, 64, 0.4
WISHES = {"policy": "scan", "prefetch": "corrected", "deterministic": True, "set": ("record_scores=true",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    recorder = Recorder()
    with Engine(opened(args.model, SHARE, 1, PROMPT + CONTINUED, WISHES)) as engine:
        engine.record(recorder)
        for seed, ids in enumerate(texts(args.model, WINDOWS, PROMPT).tolist()):
            engine.generate(ids, max_new_tokens=CONTINUED, temperature=1.0, seed=seed, ignore_eos=True)
        engine.record(None)
    recorder.write(args.out)
    print(f"{recorder.tokens} tokens, {args.out.stat().st_size / 1e6:.2f} MB: {args.out}")


if __name__ == "__main__":
    main()
