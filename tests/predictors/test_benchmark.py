"""benchmarks/predictors.py runs, and its last line is JSON."""

import json

from benchmarks.predictors import main


def test_smoke(capsys):
    main(
        ["--tokens", "2048", "--passes", "1", "--batch", "256", "--kinds", "mlp", "--leads", "1", "--test-windows", "4"]
    )
    *table, last = capsys.readouterr().out.strip().splitlines()
    told = json.loads(last)
    assert any(line.startswith("mlp") for line in table) and told["test_tokens"] == 1024
    assert {row["form"][:3] for row in told["rows"]} == {"mlp", "fre"} and len(told["rows"]) == 3 * 7 + 7
