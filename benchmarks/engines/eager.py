"""transformers with torch as a child of `benchmarks.side_by_side`: eager, its own cache, no compilation.

With a budget accelerate places the modules: on a GPU as many as the budget holds and the rest in host memory; without
one host memory up to the budget is the device and the rest is on disk. A file on disk that was read before comes from
the system's cache: what is measured then is accelerate's hooks and the copies.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from dynajax.benching.worker import Logits, Opened, PlainSession, serve
from dynajax.errors import UsageError

UNBOUNDED = 2**50  # bytes of host memory beside a GPU


class TorchSession(PlainSession):
    """A causal model of transformers and the cache of the current round."""

    def __init__(self, torch: Any, model: Any):
        self._torch, self._model, self._cache = torch, model, None
        self._device = next(device for device in (p.device for p in model.parameters()) if device.type != "meta")

    def _forget(self) -> None:
        self._cache = None

    def _run(self, rows: list[list[int]]) -> Logits:
        ids = self._torch.tensor(rows, device=self._device)
        with self._torch.inference_mode():
            told = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = told.past_key_values
        return np.asarray(told.logits[:, -1].float().cpu())


def placement(torch: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What `from_pretrained` is told for accelerate."""
    budget_bytes = settings["budget_bytes"]
    most = {0: budget_bytes, "cpu": UNBOUNDED} if torch.cuda.is_available() else {"cpu": budget_bytes}
    return {"device_map": "auto", "max_memory": most, "offload_folder": settings["offload_folder"]}


def open_session(settings: dict[str, Any]) -> Opened:
    """settings: model (a folder), dtype, threads; for accelerate budget_bytes and offload_folder, too.

    UsageError: a package is missing.
    """
    offloads = "budget_bytes" in settings
    names = ("torch", "transformers", "accelerate") if offloads else ("torch", "transformers")
    try:
        found = {name: importlib.import_module(name) for name in names}
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this Python has no {error.name}: pip install {' '.join(names)}, or name another by --torch-python"
        ) from error
    torch, transformers = found["torch"], found["transformers"]
    torch.set_num_threads(settings["threads"])
    begin = time.perf_counter()
    kept: dict[str, Any] = {"dtype": getattr(torch, settings["dtype"])}
    if offloads:
        kept |= placement(torch, settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], **kept).eval()
    row = {"version": " ".join(f"{name} {module.__version__}" for name, module in found.items())}
    if offloads:
        row["note"] = places(model)
    return Opened(session=TorchSession(torch, model), load_s=time.perf_counter() - begin, row=row)


def places(model: Any) -> str:
    """How many modules are where, as accelerate decided."""
    places = [str(place) for place in getattr(model, "hf_device_map", {}).values()]
    return ", ".join(f"{places.count(place)} modules on {place}" for place in sorted(set(places)))


if __name__ == "__main__":
    serve(open_session)
