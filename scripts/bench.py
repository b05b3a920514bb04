"""Measure how fast a model runs here, policies against each other.

    python scripts/bench.py --vram-budget 9MiB --policy static,lru,dynamic

Every flag: --help. `dynajax bench` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("bench")
