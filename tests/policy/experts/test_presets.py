"""Names: of policies, their parts, their constants and placements; and what is said of wrong ones."""

from dataclasses import fields, replace

import numpy as np
import pytest

from dynajax.config import PolicyConfig
from dynajax.errors import UsageError
from dynajax.policy.experts.config import ExpertConfig, expert_config
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy, expert_policy, place_experts


def test_auto_is_scan_decayed_and_corrected():
    assert expert_policy("auto") == ExpertPolicy(assign="scan", cache="decayed", prefetch="corrected")
    assert {
        "auto",
        "scan",
        "dali",
        "static",
        "lru",
        "hybrimoe",
        "bandwidth-split",
        "fiddler",
        "layer-split",
        "none",
    } <= (set(PRESETS))


def test_a_part_given_replaces_the_presets_own():
    assert expert_policy("dali", cache="lru", assign=None) == replace(PRESETS["dali"], cache="lru")


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("best", {}, "--policy must be one of auto, scan, .*, got 'best'"),
        ("auto", {"assign": "greedy"}, "--assign must be one of scan, dali, .*, got 'greedy'"),
        ("auto", {"cache": "arc"}, "--cache must be one of decayed, .*, got 'arc'"),
        ("auto", {"prefetch": "all"}, "--prefetch must be one of corrected, .*, got 'all'"),
        ("auto", {"placement": "rows"}, "--placement must be one of equal, layers, none, got 'rows'"),
    ],
)
def test_unknown_names_are_named(name, parts, message):
    with pytest.raises(UsageError, match=message):
        expert_policy(name, **parts)


def test_constants_are_those_of_the_flags():
    """The defaults too: what benchmarks measure is what the engine runs."""
    assert expert_config(PolicyConfig()) == ExpertConfig()
    knobs = PolicyConfig(expert_decay=0.5, move_price=3.0, w_size=7, lead=2, safety=0.9)
    assert expert_config(knobs) == ExpertConfig(decay=0.5, move_price=3.0, w_size=7)


@pytest.mark.parametrize("setting", [{"lam": 2.0}, {"theta": 0.1}, {"decay": 0.9}, {"window_units": 3}])
def test_constants_of_neurons_are_refused(setting):
    with pytest.raises(
        UsageError, match=f"--set {next(iter(setting))} is of neurons; for experts there are expert_dec"
    ):
        expert_config(PolicyConfig(**setting))


@pytest.mark.parametrize("name", [field.name for field in fields(ExpertConfig)])
@pytest.mark.parametrize("value", [-1, True, "much", float("nan")])
def test_constants_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"^{name} must be "):
        ExpertConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decay", 1.0, "decay must be a number between 0 and 0.9999, got 1.0"),
        ("w_size", 0, "w_size must be an integer >= 1, got 0"),
        ("u_size", 1.5, "u_size must be an integer >= 1, got 1.5"),
        ("confidence", 1.1, "confidence must be a number between 0 and 1, got 1.1"),
    ],
)
def test_what_is_said_of_a_wrong_constant(name, value, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        ExpertConfig(**{name: value})


FREQUENCY = np.array([[0.1, 0.9, 0.2, 0.8], [0.5, 0.4, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]], np.float32)


def test_placements():
    """30 bytes at 3 a unit: 10 units. Equal: 3 in each layer and one more where it is used most."""
    buckets = [bucket.tolist() for bucket in place_experts("equal", FREQUENCY, 3, 30).buckets]
    assert buckets == [[1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
    assert [len(bucket) for bucket in place_experts("layers", FREQUENCY, 3, 30).buckets] == [0, 4, 4]
    assert [len(bucket) for bucket in place_experts("layers", FREQUENCY, 3, 11).buckets] == [0, 0, 0]
    assert place_experts("layers", FREQUENCY, 3, 99).resident == 12
    assert place_experts("none", FREQUENCY, 3, 99).resident == 0
    for kind in ("equal", "layers", "none"):
        place_experts(kind, FREQUENCY, 3, 30).check()
