"""What was published of systems that place experts: DALI (arXiv 2602.03495), as third-party notes give its figures.

The paper's body was not available; three independent notes agree on models, batches and averages. Prompts of 64 tokens,
64 decoded, batches of 8 to 128 (decoding from 16); the weights' type and the share of experts on the device are not
stated. An average is over models and batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MACHINE = "dali-pc"
MODELS = ("deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b")
PROMPT, TOKENS = 64, 64  # of which SIMULATED are simulated
SIMULATED = 32
PREFILL_BATCHES = (8, 16, 32, 64, 128)
DECODE_BATCHES = (16, 32, 64, 128)
UNMODELLED = "moe-lightning"  # an offline pipeline of its own (arXiv 2411.11217), no policy of this engine

# DALI's speed over another system's.
DECODE_OVER: Mapping[str, float] = MappingProxyType(
    {"llama.cpp": 3.97, "ktransformers": 2.16, UNMODELLED: 1.48, "hybrimoe": 1.32}
)
PREFILL_OVER: Mapping[str, float] = MappingProxyType(
    {"llama.cpp": 7.62, "ktransformers": 3.80, UNMODELLED: 2.45, "hybrimoe": 2.00}
)
# Tokens a second of each sequence, batch 32.
ROW_TOK_S_BATCH = 32
ROW_TOK_S: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "deepseek-v2-lite": {"dali": 1.97, "hybrimoe": 1.25},
        "qwen3-30b-a3b": {"dali": 1.96, "hybrimoe": 1.75},
        "mixtral-8x7b": {"dali": 2.02, "hybrimoe": 1.65},
    }
)
