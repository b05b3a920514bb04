"""Decoding in simulated time: the tables of the DynamicInfer paper, or policies on what a model did.

    python scripts/simulate.py --trace synthetic:relullama-13b --hardware pc-high --policy static,dynamic
    python scripts/simulate.py --table paper

Every flag: --help. `dynajax simulate` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("simulate")
