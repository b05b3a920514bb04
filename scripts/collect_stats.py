"""Count which neurons a text makes live, for placement.

    python scripts/collect_stats.py --text tests/data/heldout --out stats.npz

Every flag: --help. `dynajax collect-stats` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("collect-stats")
