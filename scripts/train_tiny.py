"""Train the small model that ships with the repository, from the corpus of scripts/build_corpus.py.

    python scripts/train_tiny.py --minutes 90 --out runs/tiny

Stops by the clock, always annealed; `--resume` goes on from the newest checkpoint of `--run`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("train-tiny")
