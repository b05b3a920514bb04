"""Measure the held-out loss of a model, dense, exact and predicted.

    python scripts/evaluate.py --text tests/data/heldout --sparsity dense,exact,predicted

Every flag: --help. `dynajax evaluate` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("evaluate")
