"""Draw where the neurons of a layer were, and which of them were live, in every token of a recording.

    python scripts/generate.py --prompt "Call me Ishmael." --vram-budget 9MiB --policy dynamic --record run.npz
    python scripts/plot_residency.py --record run.npz --layer 3 --out residency.png

Every flag: --help. `dynajax plot-residency` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("plot-residency")
