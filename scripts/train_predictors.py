"""Train predictors of a model's live neurons while it reads a text.

    python scripts/train_predictors.py --text corpus/train --tokens 100000 --lead 2 --out predictors-tiny

`--resume` goes on with an interrupted run. Every flag: --help. `dynajax train-predictors` is the same, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("train-predictors")
