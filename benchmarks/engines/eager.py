"""transformers with torch as a child of `benchmarks.side_by_side`: eager, its own cache, no compilation."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from benchmarks.engines.worker import Logits, Opened, PlainSession, serve


class TorchSession(PlainSession):
    """A causal model of transformers and the cache of the current round."""

    def __init__(self, torch: Any, model: Any):
        self._torch, self._model, self._cache = torch, model, None

    def _forget(self) -> None:
        self._cache = None

    def _run(self, rows: list[list[int]]) -> Logits:
        with self._torch.inference_mode():
            told = self._model(
                input_ids=self._torch.tensor(rows), past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = told.past_key_values
        return np.asarray(told.logits[:, -1].float())


def open_session(settings: dict[str, Any]) -> Opened:
    """settings: model (a folder), dtype, threads."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(settings["threads"])
    begin = time.perf_counter()
    kind = getattr(torch, settings["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=kind).eval()
    row = {"version": transformers.__version__}
    return Opened(session=TorchSession(torch, model), load_s=time.perf_counter() - begin, row=row)


if __name__ == "__main__":
    serve(open_session)
