"""Measure the machine this runs on, and write its figures for the simulator.

    python scripts/profile_machine.py --out machine.json

Every flag: --help. `dynajax profile-machine` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("profile-machine")
