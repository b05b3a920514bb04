"""What the stages of the device check exist for: each finds what it looks for where that is broken on purpose."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_stages import (
    arms,
    donation,
    host_threads,
    link,
    masked,
    memory_kinds,
    mixtral,
    staging,
    step,
    tokens,
)
from benchmarks.gpu_stages.isolated import Outcome, Report
from benchmarks.gpu_stages.other_ways import Throttled
from dynajax.benching import kernel
from dynajax.staging import Plain


@pytest.fixture
def problems(tmp_path):
    """Runs a stage's function in this process -> what it found wrong."""

    def run(function, *arguments) -> list[str]:
        path = tmp_path / "report.jsonl"
        function(Report(path), *arguments)
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return [entry["problem"] for entry in entries if "problem" in entry]

    return run


def test_memory_kinds_notices_data_that_changes_on_its_way(problems, monkeypatch):
    sent = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda value, *where: sent(value + 1, *where))
    assert "a round trip through the device changed the data" in problems(memory_kinds.run)


def test_link_notices_a_source_that_sends_something_else(problems, monkeypatch):
    def sources(plain):
        return {"wrong": lambda: (lambda: jax.device_put(plain[::-1]), lambda: None)}

    monkeypatch.setattr(link, "sources", sources)
    found = problems(link.run)
    assert len(found) == 2 and all("what arrived is not what was sent" in problem for problem in found)


def test_link_notices_that_nothing_can_be_sent(problems, monkeypatch):
    def fails():
        raise RuntimeError("no DMA")

    monkeypatch.setattr(link, "sources", lambda plain: {"broken": fails})
    assert problems(link.run) == ["no transfer works"]


@pytest.mark.parametrize("way", ["gathered", "gate_then_gathered"])
def test_masked_notices_a_row_that_is_left_out(problems, monkeypatch, way):
    def broken(h, parts, *admitted):
        return right(h, tuple(part.at[0].set(0) for part in parts), *admitted)

    right = getattr(masked, way)
    monkeypatch.setattr(masked, way, broken)
    monkeypatch.setattr(masked, "SHARES", (0.1, 1.0))
    name = {"gathered": "gather", "gate_then_gathered": "gate_then_gather"}[way]
    found = problems(masked.run)
    assert len(found) == 1 and found[0].startswith(f"{name} at a share of 1.0 is off")


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda write, parts, rows, slots: write(parts, rows, (slots + 1) % len(parts[0])), "writes something else"),
        (lambda write, parts, *rest: write(tuple(jnp.roll(part, 1, axis=0) for part in parts), *rest), "temporaries"),
    ],
)
def test_donation_notices_rows_that_go_elsewhere_and_a_pool_that_is_copied(problems, monkeypatch, broken, complaint):
    monkeypatch.setattr(donation, "ROWS", (8,))
    monkeypatch.setattr(donation, "ROWS_OF_LARGE", ())
    monkeypatch.setattr(donation, "POOLS", {"float16": np.dtype(np.float16)})
    right = donation.write_slots
    monkeypatch.setattr(donation, "write_slots", lambda *a: broken(right, *a))
    assert any(complaint in problem for problem in problems(donation.run))


def test_host_threads_notices_a_kernel_that_is_off(problems, monkeypatch):
    right = kernel.ffn_reference
    monkeypatch.setattr(kernel, "ffn_reference", lambda *a: (right(*a)[0] * 1.001, right(*a)[1]))
    with pytest.raises(RuntimeError, match="the kernel is wrong"):
        problems(host_threads.run)


def test_staging_notices_a_block_that_arrives_damaged(problems, monkeypatch):
    monkeypatch.setattr(Plain, "send", lambda self, block: jax.device_put(block * 2).block_until_ready())
    assert "plain: the block did not arrive as it was sent" in problems(staging.run)


def test_step_notices_a_stream_that_is_not_finite(problems, monkeypatch):
    right = step.randoms
    monkeypatch.setattr(step, "randoms", lambda *a: tuple(array * jnp.nan for array in right(*a)))
    monkeypatch.setattr(step, "EIGHTHS", (2,))
    assert problems(step.run) == ["float32, 2/8 of the neurons: the stream is not finite"]


def test_tokens_notices_another_token(problems, monkeypatch):
    reference = Outcome(ok=True, seconds=1.0, figures={"tokens": [5] * tokens.NEW_TOKENS}, error=None)
    monkeypatch.setattr(tokens, "run_isolated", lambda *a, **k: reference)
    monkeypatch.setattr(tokens, "generate", lambda *a: ([5, 6, *[5] * (tokens.NEW_TOKENS - 2)], 0.5))
    monkeypatch.setattr(tokens, "budgets", lambda *a: {"smallest": 1, "two_fifths": 2})
    said = [f"float32, budget {name}: token 1 differs from the CPU's" for name in ("smallest", "two_fifths")]
    assert problems(tokens.run) == said


FIGURES = {"migrated": 0, "policy": "any"}


def run_with(problems, monkeypatch, answers: dict) -> list[str]:
    """The arms' checks, of arms that answer so: figures and tokens by name, or an exception."""

    def run_arm(drawn, arm, setting):
        if isinstance(answers[arm.name], Exception):
            raise answers[arm.name]
        return answers[arm.name]

    monkeypatch.setattr(arms, "run_arm", run_arm)
    some = arms.chosen(*answers)
    return problems(arms.run_arms, "arms", SimpleNamespace(dtype="float32"), some, arms.Setting(budget_bytes=1))


def test_arms_notice_another_token_an_idle_policy_that_moves_and_an_arm_that_fails(problems, monkeypatch):
    right = (FIGURES, [1, 2, 3])
    assert run_with(problems, monkeypatch, {"layer_split": right, "static": right, "micro": right}) == []
    answers = {
        "layer_split": right,
        "exact": (FIGURES, [1, 9, 3]),
        "static": ({**FIGURES, "migrated": 2}, [4]),
        "dynamic": ValueError("broken"),
        "streaming": ValueError("no such memory"),  # which is an answer
    }
    assert run_with(problems, monkeypatch, answers) == [
        "dynamic: ValueError: broken",
        "static: 2 neurons moved",
        "exact: token 1 is another than without it",
    ]


def test_arms_without_time_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "run_arm", lambda *_: pytest.fail("there was no time"))
    report = Report(tmp_path / "report.jsonl", limit_s=0)
    some = arms.chosen("layer_split", "dynamic")
    arms.run_arms(report, "arms", SimpleNamespace(dtype="float32"), some, arms.Setting(budget_bytes=1))
    (line,) = (tmp_path / "report.jsonl").read_text().splitlines()
    assert json.loads(line) == {"figures": {"arms_left_out": ["layer_split", "dynamic"]}}


def test_mixtral_notices_tokens_that_depend_on_the_policy(problems, monkeypatch):
    monkeypatch.setattr(mixtral.make_moe, "write", lambda *a, **k: 0)
    monkeypatch.setattr(mixtral, "keep_residuals", lambda *a: None)

    def generate(*_, policy, tell, **more):
        if tell is not None:
            tell(0, np.zeros((1, 4), np.float32), None)
        return {"tokens": [[1, 2 if policy == "lru" else 3]], "migrated": 1}

    monkeypatch.setattr(mixtral, "generate", generate)
    assert problems(mixtral.run) == ["static: 1 experts moved", "lru: the tokens depend on where experts are"]


def test_a_throttle_that_does_not_wait_is_seen():
    sends = Throttled(Plain(jax.local_devices()[0]), 1e12)  # faster than any memory here
    sends.send(np.zeros(2**20, np.float32))
    assert 0 < sends.fastest_bytes_s < 1e12
    slow = Throttled(Plain(jax.local_devices()[0]), 1e9)
    slow.send(np.zeros(2**20, np.float32))
    assert slow.fastest_bytes_s <= 1e9
