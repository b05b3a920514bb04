"""Every mixture through the engine: at every share on the device, in every mode and by every policy, it computes what
the float64 forward computes that reads the files."""

import itertools

import numpy as np
import pytest

from dynajax.policy.experts.presets import PRESETS
from hostcompute.dense import unavailable
from tests.engine.mixture.zoo import FAMILIES, SEED, TOKENS, assert_close, logits_at, opened

POLICIES = tuple(PRESETS)
POSITIONS = (0, 1, 7, 64, 130)  # the tokens before go through in chunks of 8 and 128
SAMPLE = [
    ("mixtral", 0.4, "scan"),
    ("qwen2_moe", 0.7, "dali"),
    ("qwen3_moe", 0.4, "lru"),
    ("olmoe", 0.7, "hybrimoe"),
    ("granitemoe", 0.4, "bandwidth-split"),
    ("deepseek_v2-lite", 0.7, "fiddler"),
]
GRID = [
    pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.slow])
    for case in itertools.product(FAMILIES, (0.4, 0.7), [p for p in POLICIES if p not in ("auto", "none", "static")])
]
SHARES_OF = [
    pytest.param(
        family, share, marks=[] if share == 0.4 or family in ("qwen2_moe", "deepseek_v2-lite") else [pytest.mark.slow]
    )
    for family in FAMILIES
    for share in (0.0, 0.4, 1.0)
]
MODES = [
    pytest.param(family, mode, marks=[] if mode != "callback" or family == "mixtral" else [pytest.mark.slow])
    for family in ("qwen2_moe", "mixtral", "deepseek_v2-lite")
    for mode in ("threads", "callback", "ffi")
]


@pytest.mark.parametrize(("family", "share"), SHARES_OF)
def test_logits_of_every_family_at_every_share(zoo, family, share):
    with opened(zoo.folder(family), share) as parts:
        assert parts.prepared.host_mode == ("resident" if share == 1 else "ffi")
        for position in POSITIONS if share else POSITIONS[-1:]:
            assert_close(logits_at(parts, position), zoo.logits(family)[position])


@pytest.mark.parametrize(("family", "share", "policy"), GRID)
def test_no_policy_changes_an_answer(zoo, family, share, policy):
    with opened(zoo.folder(family), share, policy=policy, batch=3, host_mode="threads") as parts:
        assert parts.policy == policy and parts.prepared.host_mode == "threads"
        for position in (1, 64, 130):
            assert_close(logits_at(parts, position, row=1), zoo.logits(family)[position])


@pytest.mark.parametrize(("family", "mode"), MODES)
def test_every_host_mode(zoo, family, mode):
    with opened(zoo.folder(family), 0.4, host_mode=mode, policy="static") as parts:
        assert parts.prepared.host_mode == mode
        for position in (0, 64):
            assert_close(logits_at(parts, position), zoo.logits(family)[position])


@pytest.mark.parametrize("dense", ["onednn", "blas"])
def test_libraries_multiply_as_our_kernels_do(zoo, dense):
    if (reason := unavailable(dense)) is not None:
        pytest.skip(reason)
    with opened(zoo.folder("qwen3_moe"), 0.4, host_dense=dense) as parts:
        assert parts.prepared.host_mode == "threads"
        for position in (0, 130):
            assert_close(logits_at(parts, position), zoo.logits("qwen3_moe")[position])


@pytest.mark.parametrize(("policy", "share"), [("auto", 0.4), ("static", 1.0), ("static", 0.4), ("scan", 0.7)])
def test_rows_of_a_batch_at_positions_of_their_own(zoo, policy, share):
    with opened(zoo.folder("qwen3_moe"), share, batch=8, policy=policy) as parts:
        at = np.array([130, 1, 20, 64, 3, 90, 7, 11], np.int32)
        for row, position in enumerate(at):
            parts.stepper.prefill(row, TOKENS[:position].tolist(), lambda done, total: None)
        parts.reset_counters()
        for active in (np.ones(8, np.bool_), np.arange(8) % 3 != 1):
            logits = parts.stepper.step(TOKENS[at].astype(np.int32), at, active)
            for row in np.flatnonzero(active):
                assert_close(logits[row], zoo.logits("qwen3_moe")[at[row]])


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_the_comparison_notices_other_weights_and_other_positions(zoo, family):
    with opened(zoo.folder(family), 0.4) as parts:
        found = logits_at(parts, 20)
    assert_close(found, zoo.logits(family)[20])
    for wrong in (zoo.logits(family, SEED + 1)[20], zoo.logits(family)[19], zoo.logits(family)[21]):
        with pytest.raises(AssertionError):
            assert_close(found, wrong)
