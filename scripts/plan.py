"""Show where every byte of device and host memory would go, before anything is loaded.

    python scripts/plan.py --model tiny-relullama --vram-budget 9MiB --ctx 256

Every flag: --help. `dynajax plan` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("plan")
