"""Few programs, each compiled once."""

import pytest

from dynajax import Engine
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.programs import MAX_PROGRAMS
from tests.engine.cases import PROMPT


@pytest.mark.parametrize("mode", ["threads", "ffi"])
def test_a_second_prompt_compiles_only_the_buckets_it_is_the_first_to_need(models, mode):
    whole = plan_for(str(models["relu"]), EngineConfig(ctx=512, host_mode=mode))
    budget = whole.smallest_budget_bytes + whole.pool * 2 // 5
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, ctx=512, host_mode=mode) as engine:
        kinds = engine._parts.prepared.programs
        engine.generate(PROMPT, max_new_tokens=3)
        first = set(kinds.kinds)
        engine.generate(PROMPT[:20], max_new_tokens=30)
        assert set(kinds.kinds) == first
        engine.generate([5] * 300, max_new_tokens=3)
        new = set(kinds.kinds) - first
        step = ("attend_rows", 512) if mode == "threads" else ("token_rows", 512, *engine._parts.pool.slots)
        assert new <= {step, ("attend_chunk", 8, 512)}
        assert kinds.count <= MAX_PROGRAMS
        assert engine.stats()["programs"] == kinds.count
