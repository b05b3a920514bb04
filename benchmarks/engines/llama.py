"""llama.cpp as a child of `benchmarks.side_by_side`: the C interface of llama-cpp-python, without its Python sampling.

Needs llama_cpp and NumPy, nothing of this project beside `dynajax.benching.worker`. `make bench-deps` builds it for
this machine.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np

from dynajax.benching.worker import Logits, Opened, PlainSession, serve

CTX_STEP = 256  # llama.cpp rounds the cache to this
ERROR = 4  # of GGML_LOG_LEVEL


class LlamaSession(PlainSession):
    """A context with `batch` sequences, every setting but threads and sizes at llama.cpp's default."""

    def __init__(self, llama: Any, settings: dict[str, Any]):
        self._llama, self._batch, self._position = llama, settings["batch"], 0
        self._logged = llama.llama_log_callback(_log)  # kept, or the library would call what is gone
        llama.llama_log_set(self._logged, None)
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(settings["model"].encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['model']}: see its messages above")
        params = llama.llama_context_default_params()
        params.n_ctx = self._batch * -(-settings["ctx"] // CTX_STEP) * CTX_STEP
        params.n_seq_max = self._batch
        params.n_batch = max(params.n_batch, self._batch * settings["ctx"])
        params.n_threads = params.n_threads_batch = settings["threads"]
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens: lower the lengths")
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._tokens = llama.llama_batch_init(params.n_batch, 0, 1)

    def _forget(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._position = 0

    def _run(self, rows: list[list[int]]) -> Logits:
        tokens, at, ends = self._tokens, 0, []
        for row, ids in enumerate(rows):
            for offset, token in enumerate(ids):
                tokens.token[at], tokens.pos[at] = token, self._position + offset
                tokens.n_seq_id[at], tokens.seq_id[at][0] = 1, row
                tokens.logits[at] = offset == len(ids) - 1
                at += 1
            ends.append(at - 1)
        tokens.n_tokens = at
        if (code := self._llama.llama_decode(self._context, tokens)) != 0:
            raise RuntimeError(f"llama_decode gave {code} for {at} tokens at position {self._position}")
        self._position += len(rows[0])
        pointers = (self._llama.llama_get_logits_ith(self._context, end) for end in ends)
        return np.stack([np.ctypeslib.as_array(pointer, (self._vocab,)) for pointer in pointers])


def _log(level: int, text: bytes, _: Any) -> None:
    """Errors only: of every model there are hundreds of lines."""
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def open_session(settings: dict[str, Any]) -> Opened:
    """settings: model (a .gguf file), ctx (tokens a row), batch, threads."""
    llama = importlib.import_module("llama_cpp")
    begin = time.perf_counter()
    llama.llama_backend_init()
    session = LlamaSession(llama, settings)
    load_s = time.perf_counter() - begin
    print(llama.llama_print_system_info().decode(), flush=True)
    return Opened(session=session, load_s=load_s, row={"version": llama.__version__})


if __name__ == "__main__":
    serve(open_session)
