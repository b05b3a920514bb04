"""What transformers computes with tiny-relullama: greedy tokens and logits, kept as small files for the tests.

    pip install torch transformers && python tests/references/transformers_reference.py

writes tests/references/tiny-relullama.npz anew. Needed once for every new set of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = ROOT / "dynajax" / "assets" / "tiny-relullama"
FILE = HERE / "tiny-relullama.npz"
PROMPT = "It was a truth"
NEW_TOKENS = 64
POSITIONS = (0, 1, 20, -1)  # of prompt and answer together


def compute() -> dict[str, np.ndarray]:
    """prompt_ids [T], token_ids [64] by greedy decoding, logits float32 [4, V] at POSITIONS. Needs torch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        logits = model(ids).logits[0, list(POSITIONS)]
    return {
        "prompt_ids": prompt[0].numpy().astype(np.int32),
        "token_ids": ids[0, prompt.shape[1] :].numpy().astype(np.int32),
        "logits": logits.numpy().astype(np.float32),
    }


if __name__ == "__main__":
    np.savez_compressed(FILE, **compute())
