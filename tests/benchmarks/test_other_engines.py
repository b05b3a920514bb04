"""PowerInfer's binary and torch's models as children, with doubles in the place of what is not installed here."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.engines import eager, powerinfer
from dynajax.benching.children import Child, Contender
from dynajax.benching.rounds import Task, measure, row_of, table
from dynajax.errors import UsageError

BINARY = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do case $1 in -n) new=$2;; -p) prompt=$2;; esac; shift; done
set -- $prompt
echo "llama_print_timings:        load time =    1500.00 ms" >&2
echo "llama_print_timings:      sample time =       1.00 ms /   $new runs   (    0.10 ms per token)" >&2
echo "llama_print_timings: prompt eval time =     200.00 ms /   $(($# + 1)) tokens (    9.00 ms per token)" >&2
echo "llama_print_timings:        eval time =     300.00 ms /   $(({runs})) runs   (    9.00 ms per token)" >&2
echo "llama_print_timings:       total time =     501.00 ms" >&2
exit {code}
"""


def binary(tmp_path, runs="new - 1", code=0):
    path, log = tmp_path / "main", tmp_path / "log"
    path.write_text(BINARY.format(log=log, runs=runs, code=code))
    path.chmod(0o755)
    settings = {"binary": str(path), "model": "m.gguf", "ctx": 20, "threads": 2, "budget_bytes": 2**29}
    return settings, log


def rival(settings):
    return Contender(
        name="powerinfer:q4",
        engine="powerinfer",
        command=(sys.executable, "-m", "benchmarks.engines.powerinfer"),
        settings=settings,
        file_bytes=0,
    )


class Band:
    """No bandwidth is looked for."""

    best_gb_s = None

    def look(self):
        pass


def test_rounds_of_a_binary(tmp_path):
    settings, log = binary(tmp_path)
    task = Task(model="m", prompt_tokens=15, new_tokens=4, batch=1, threads=2)
    tokens = ([list(range(15))], [[1], [2], [3], [4]])
    found = measure([rival(settings)], tokens, 1, Band(), lambda *_: None, together=True)
    row = row_of(rival(settings), found["powerinfer:q4"], found["powerinfer:q4"], task, None)
    assert row["load_s"] == 1.5 and row["decode_tok_s"] == pytest.approx(3 / 0.3)
    assert row["prefill_tok_s"] == pytest.approx(16 / 0.2), "it read 16 tokens: 15 words and the one that begins"
    assert row["agreement"] is None and row["cpu_share"] is None and row["share_of_floor"] is None
    assert row["peak_rss_bytes"] > 2**18
    asked = log.read_text().splitlines()
    assert len(asked) == 3 and "-n 2" in asked[0] and "-n 4" in asked[1]
    assert "-m m.gguf -c 21 -t 2 --ignore-eos --temp 0 --vram-budget 0.500 -p the the the" in asked[1]
    assert table([row]).splitlines()[-1].startswith("| powerinfer:q4 | 10.00, 10.00 | 80.0 |  |  |  |")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"code": 3}, "ended with code 3 and without its timings; it said: llama_print_timings:       total"),
        ({"runs": "new / 2"}, "generated 3 of 4 tokens: give fewer"),
    ],
)
def test_runs_that_do_something_else_are_refused(tmp_path, changes, words):
    settings, _ = binary(tmp_path, **changes)
    with pytest.raises(UsageError, match=re.escape(words)):
        powerinfer.run_once(powerinfer.Binary(path=settings["binary"], arguments=()), 2, 4)


def test_a_binary_that_fails_is_one_error(tmp_path):
    settings, _ = binary(tmp_path, code=1)
    with pytest.raises(UsageError, match=r"powerinfer:q4: .*ended with code 1"), Child(rival(settings)):
        pass


# --- torch ---


def torch_double(*, gpu):
    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: gpu))


@pytest.mark.parametrize(
    ("gpu", "most"), [(False, {"cpu": 100}), (True, {0: 100, "cpu": eager.UNBOUNDED})], ids=["cpu", "gpu"]
)
def test_accelerate_is_told_the_budget(gpu, most):
    told = eager.placement(torch_double(gpu=gpu), {"budget_bytes": 100, "offload_folder": "there"})
    assert told == {"device_map": "auto", "max_memory": most, "offload_folder": "there"}


def test_a_package_that_is_missing_is_named(monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match="this Python has no accelerate: pip install torch transformers accelerate"):
        eager.open_session({"budget_bytes": 1})


class Model:
    """Counts what it is given; the last parameter is where inputs go, for the first is on no device."""

    hf_device_map = {"a": "disk", "b": "cpu", "c": "disk"}  # noqa: RUF012

    def parameters(self):
        return [SimpleNamespace(device=SimpleNamespace(type=kind)) for kind in ("meta", "cpu")]

    def __call__(self, *, input_ids, past_key_values, use_cache, logits_to_keep):
        seen = (past_key_values or 0) + len(input_ids[0])
        return SimpleNamespace(past_key_values=seen, logits=Tensor([[[float(seen), 0.0]]] * len(input_ids)))


class Tensor(np.ndarray):
    """What a session asks of torch's."""

    def __new__(cls, values):
        return np.asarray(values).view(cls)

    def float(self):
        return self

    def cpu(self):
        return self


def test_a_session_keeps_its_cache_within_a_round():
    torch = SimpleNamespace(tensor=lambda rows, device: rows, inference_mode=lambda: open("/dev/null"))  # noqa: SIM115
    session = eager.TorchSession(torch, Model())
    assert session.prefill([[1, 2, 3]])[0, 0] == 3 and session.step([4])[0, 0] == 4
    assert session.prefill([[1, 2]])[0, 0] == 2, "a round begins anew"
    assert eager.places(Model()) == "1 modules on cpu, 2 modules on disk"
