"""What a policy is simulated with: settings of a sweep, budgets, contexts, predictors and the bound."""

import pytest

from dynajax.config import PolicyConfig
from dynajax.errors import FitError, UsageError
from dynajax.sim import compare, whatif
from dynajax.sim.hardware import load_hardware
from dynajax.sim.models import SPECS
from dynajax.sim.synthetic import RECIPES
from dynajax.sim.systems import gate_bytes
from dynajax.sim.whatif import Setting, Setup, answers, budget_of, context_of, sweep_of, weights_of

PC = load_hardware("pc-low")
ROOM = PC.device_bytes - PC.reserved_bytes
WEIGHTS = weights_of(SPECS["relullama-7b"], "auto", "auto")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Drawn traces of a few tokens and neurons."""
    monkeypatch.setattr(whatif, "PROMPT", 5)
    monkeypatch.setattr(whatif, "TOKENS", 3)
    monkeypatch.setattr(compare, "WIDTH", 96)


def setup(**changes) -> Setup:
    values = {"name": "a", "source": RECIPES["relullama-7b"], "weights": WEIGHTS, "hardware": PC, "budget_bytes": ROOM,
              "context": 512, "skips": True, "gate_first": True}  # fmt: skip
    return Setup(**(values | changes))


def test_a_sweep_changes_what_it_names_and_the_last_name_first():
    base = PolicyConfig(decay=0.9)
    found = sweep_of(base, "lam=0.3/1, window_s=none/0.5 ,rank=8")
    assert [(s.config.lam, s.config.window_s, s.rank, s.quality) for s in found] == [
        (0.3, None, 8, None), (0.3, 0.5, 8, None), (1, None, 8, None), (1, 0.5, 8, None)
    ]  # fmt: skip
    assert all(s.config.decay == 0.9 for s in found)
    assert dict(found[1].swept) == {"lam": 0.3, "window_s": 0.5, "rank": 8}
    (only,) = sweep_of(base, None)
    assert only == Setting(config=base)


def test_types_follow_each_other():
    assert (WEIGHTS.dtype, WEIGHTS.host_dtype, WEIGHTS.kv_dtype) == ("float16", "float16", "float16")
    wide = weights_of(SPECS["relullama-7b"], "float32", "auto")
    assert (wide.dtype, wide.host_dtype) == ("float32", "float16")
    low = weights_of(SPECS["relullama-7b"], "int4", "auto")
    assert (low.dtype, low.host_dtype, low.kv_dtype) == ("int4", "int4", "float16")
    with pytest.raises(UsageError, match="no size is known of 'int5'"):
        weights_of(SPECS["relullama-7b"], "int5", "auto")


def test_a_budget_is_of_what_a_plan_may_use():
    assert budget_of(None, PC) == ROOM and budget_of(0.5, PC) == ROOM // 2 and budget_of(7, PC) == 7
    with pytest.raises(FitError, match=f"pc-low has {ROOM} bytes"):
        budget_of(ROOM + 1, PC)


def test_a_cache_holds_the_trace():
    recipe = RECIPES["relullama-7b"]
    assert context_of(recipe, None) == 512 and context_of(recipe, 8) == 8
    with pytest.raises(UsageError, match="at least the 8 tokens"):
        context_of(recipe, 7)


@pytest.mark.parametrize(
    ("policy", "skips", "config", "copies", "programs"),
    [
        ("dynamic", True, {}, 1, 2),
        ("dynamic", True, {"place_bits": 1}, 1.5 / 4.5 + 1, 2),
        ("dynamic", True, {"lead": 0, "place_bits": 1}, 1, 1),
        ("dynamic", False, {"lead": 0}, 1, 1),
        ("macro", True, {}, 1, 1),
        ("static", False, {}, 0, 0),
    ],
)
def test_predictors_are_those_that_are_asked(policy, skips, config, copies, programs):
    found = whatif._Predictors.of(setup(skips=skips), policy, Setting(config=PolicyConfig(**config)))
    assert found.held == pytest.approx(copies * gate_bytes(WEIGHTS, 4)) and found.programs == programs
    ranked = whatif._Predictors.of(setup(skips=skips), policy, Setting(config=PolicyConfig(**config), rank=10))
    size = 32 * 10 * (4096 + 11008) * 2
    assert (ranked.held, ranked.read, ranked.programs) == (size * programs, size * programs, programs)


def test_answers_stay_below_the_bound_and_more_memory_helps():
    found = [next(answers(setup(budget_bytes=int(share * ROOM)), ["dynamic"], [Setting(config=PolicyConfig())]))
             for share in (0.6, 1.0)]  # fmt: skip
    assert found[0].figures["decode_tok_s"] < found[1].figures["decode_tok_s"]
    assert found[0].figures["pool_share"] < found[1].figures["pool_share"]
    assert all(answer.figures["decode_tok_s"] < answer.bound_tok_s for answer in found)


def test_migrated_neurons_are_the_models(monkeypatch):
    coarse = next(answers(setup(), ["lru"], [Setting(config=PolicyConfig())]))
    monkeypatch.setattr(compare, "WIDTH", 192)
    compare.drawn.cache_clear()
    fine = next(answers(setup(), ["lru"], [Setting(config=PolicyConfig())]))
    compare.drawn.cache_clear()
    assert 0.5 < coarse.figures["migrated_per_token"] / fine.figures["migrated_per_token"] < 2
