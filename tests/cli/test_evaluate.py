"""`evaluate`: a row a sparsity, and what is refused."""

from pathlib import Path

import pytest

HELDOUT = Path(__file__).parents[1] / "data" / "heldout"
ARGV = ("evaluate", "--text", HELDOUT, "--tokens", 120, "--ctx", 64, "--vram-budget", "700KiB")


def test_every_sparsity_has_its_row(command, model):
    rows = command(*ARGV, "--model", model, "--json").json("evaluate")["rows"]
    assert [row["sparsity"] for row in rows] == ["dense", "exact", "predicted"]
    dense, exact, predicted = rows
    assert exact["loss_nats"] == pytest.approx(dense["loss_nats"], abs=1e-4)
    assert dense["density"] == 1 and dense["random_mask_loss"] is None and dense["recall"] is None
    assert 0.2 < exact["density"] < 0.8 and 0.2 < predicted["density"] < 0.9
    assert predicted["recall"] > 0.9 and predicted["predictor"] == "gate"
    assert exact["no_ffn_loss"] == pytest.approx(predicted["no_ffn_loss"], abs=1e-4)
    assert all(row["tokens"] == dense["tokens"] > 100 for row in rows)
    assert predicted["host_bytes_read"] > 0


def test_a_table_for_people(command, model):
    ended = command(*ARGV, "--model", model, "--sparsity", "predicted", "--set", "theta=0.9")
    assert ended.code == 0
    head, row = ended.out.strip().splitlines()
    assert head.split()[:2] == ["sparsity", "tokens"] and row.split()[0] == "predicted"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sparsity", "dense,sparse"), "--sparsity must name some of dense, exact, predicted, got 'sparse'"),
        (("--ids", "random:9"), "give one of --text FILE|DIR and --ids FILE"),
        (("--sparsity", "predicted", "--predictor", "none"), "--sparsity predicted needs a predictor"),
        (("--predictor", "mlp"), "this model has none: run scripts/train_predictors.py"),
    ],
)
def test_refusals(command, model, argv, words):
    ended = command(*ARGV, "--model", model, *argv)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
