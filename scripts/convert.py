"""Convert PyTorch weights, a GGUF file, or PowerInfer's predictors and activation counts; runs nothing found in them.

    python scripts/convert.py --out ReluLLaMA-7B-safetensors --dtype float16 ReluLLaMA-7B

Every flag: --help. `dynajax convert` is the same command, installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation

from dynajax.cli import main

if __name__ == "__main__":
    main("convert")
