"""Fetch the public-domain training texts, check their hashes, and write train/, heldout/ and manifest.json.

    python scripts/build_corpus.py --out corpus --tokenizer runs/tiny

Needs `apt-get` (Debian bookworm, after `apt-get update`) and `npm`. `dynajax build-corpus` is the same, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("build-corpus")
