"""`bench`: rows of policies that take turns, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from dynajax.benching.rounds import Task
from dynajax.cli.bench import head_of, tokens_from
from dynajax.config import ModelSpec
from dynajax.errors import UsageError

HELDOUT = Path(__file__).parents[1] / "data" / "heldout"
SHORT = ("--prompt-tokens", 8, "--new-tokens", 4, "--repeat", 2)
BUDGET = ("--vram-budget", "880KiB", "--dtype", "float32")


def test_policies_against_each_other(command, model):
    ended = command(
        "bench", "--model", model, *SHORT, *BUDGET, "--policy", "static,lru", "--sparsity", "exact", "--json"
    )
    told = ended.json("bench")
    assert [row["name"] for row in told["rows"]] == ["exact:static", "exact:lru"]
    assert [row["policy"] for row in told["rows"]] == ["static", "lru"]
    assert told["tokens"] == "topics:12" and told["platform"] == "cpu" and told["link"] is None
    assert told["kernel"]["dtype"] == "float32" and told["kernel"]["read"]["min_us"] > 0
    for row in told["rows"]:
        best, median = row["spread"]["best_step_s"], 1 / row["decode_tok_s"]
        assert 0 < best <= median <= row["spread"]["p90_step_s"] and row["spread"]["rounds"] == 2
        assert row["spread"]["best_prefill_s"] <= 8 / row["prefill_tok_s"] <= row["spread"]["p90_prefill_s"]
        assert row["agreement"] == 1.0, "exact: where a neuron lives changes no answer"
        assert 0 < row["hot_share"] < 1 and row["compile_s"] > 0 and row["load_s"] > 0
        assert row["budget"] == "880KiB" and row["memory"]["peak_bytes"] <= row["budget_bytes"] == 880 * 2**10
        assert row["peak_rss_bytes"] > row["memory"]["peak_bytes"]
    lines = head_of(told).splitlines()
    assert lines[0].startswith("machine") and any(line.startswith("host rows, float32") for line in lines)
    assert not any(line.startswith("link") for line in lines)
    link = {"staging": "plain", "gb_s": 24.0, "t0_s": 1e-5, "pageable_gb_s": 9.0}
    assert "link, plain" in head_of(told | {"link": link, "kernel": None})
    assert "bench: 4/4" in ended.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--policy", "static,"), "--policy takes names with commas between them, got 'static,'"),
        (("--policy", "static,best"), "--policy must be one of"),
        (("--sparsity", "most"), "--sparsity must be one of"),
        (("--prompt-tokens", 500, "--new-tokens", 100), "prompt and new tokens are 600"),
        (("--ctx", 16), "prompt and new tokens are 192, the context is 16"),
        (("--text", HELDOUT, "--ids", "random:9"), "give one of --text FILE|DIR and --ids FILE"),
        (("--ids", "random:20"), "random:20 has not 1 x 192 tokens in a row"),
    ],
)
def test_refusals(command, model, argv, words):
    ended = command("bench", "--model", model, *argv)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err.splitlines()[-1]


SPEC = ModelSpec(layers=1, hidden=32, ffn=64, heads=2, kv_heads=2, head_dim=16, vocab=600, max_positions=512)


def task(**changes):
    return Task(**{"model": "m", "prompt_tokens": 5, "new_tokens": 3, "batch": 2, "threads": 1, **changes})


def test_every_row_reads_a_window_of_its_own(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(20, dtype=np.int32))
    prompts, following = tokens_from(None, str(tmp_path / "ids.npy"), tmp_path, SPEC, task())
    assert prompts == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]] and following == [[5, 13], [6, 14], [7, 15]]
    with pytest.raises(UsageError, match="has not 3 x 8 tokens in a row"):
        tokens_from(None, str(tmp_path / "ids.npy"), tmp_path, SPEC, task(batch=3))


def test_a_text_is_read_in_windows(model):
    (row, other), following = tokens_from(HELDOUT, None, model, SPEC, task())
    assert row != other and len(row) == 5 and np.shape(following) == (3, 2)


def test_ids_that_are_made_up(tmp_path):
    made = tokens_from(None, None, tmp_path, SPEC, task())
    assert made == tokens_from(None, None, tmp_path, SPEC, task())
    assert np.shape(made[0]) == (2, 5) and np.shape(made[1]) == (3, 2) and np.min(made[0]) >= 512
