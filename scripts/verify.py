"""Compare the engine with a plain float64 forward, layer by layer.

    python scripts/verify.py --model tiny-relullama

Every flag: --help. `dynajax verify` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("verify")
