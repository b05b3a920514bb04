"""Generate text with a model that need not fit the device.

    python scripts/generate.py --prompt "Call me Ishmael." --max-new-tokens 64 --vram-budget 9MiB

Every flag: --help. `dynajax generate` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("generate")
