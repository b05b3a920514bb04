"""The engine's public face: results, streams, figures, failures."""

import threading

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, write_stats
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.errors import EngineError, MismatchError, NumericalError, UsageError
from dynajax.testing import load_decoder, make_checkpoint
from tests.engine.cases import PROMPT, SPECS


@pytest.fixture(scope="module")
def half(models):
    """An engine with about half of the units on the device."""
    whole = plan_for(str(models["relu"]), EngineConfig(ctx=256))
    budget = whole.smallest_budget_bytes + whole.pool // 2
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, ctx=256) as engine:
        yield engine


def test_stream_and_generate_agree(half):
    events = list(half.stream(PROMPT, max_new_tokens=6))
    result = half.generate(PROMPT, max_new_tokens=6)
    assert tuple(event.token_id for event in events) == result.token_ids
    assert [event.index for event in events] == list(range(6))
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
    assert result.text is None  # these models have no tokenizer


def test_seeds_decide_sampled_tokens_and_are_reported(half):
    sampled = {"max_new_tokens": 12, "temperature": 1.5}
    once, again = (half.generate(PROMPT, seed=7, **sampled) for _ in range(2))
    assert once.token_ids == again.token_ids
    assert half.generate(PROMPT, seed=8, **sampled).token_ids != once.token_ids
    fresh = half.generate(PROMPT, **sampled)
    assert half.generate(PROMPT, seed=fresh.seed, **sampled).token_ids == fresh.token_ids


def test_eos_ends_a_generation(half):
    first = half.generate(PROMPT, max_new_tokens=1).token_ids[0]
    spec = half._parts.prepared.spec
    assert first not in spec.eos_ids
    object.__setattr__(spec, "eos_ids", (first,))
    try:
        result = half.generate(PROMPT, max_new_tokens=5)
        assert (result.finish_reason, result.token_ids) == ("stop", (first,))
        assert half.generate(PROMPT, max_new_tokens=3, ignore_eos=True).finish_reason == "length"
    finally:
        object.__setattr__(spec, "eos_ids", SPECS["relu"].eos_ids)


def test_no_new_tokens_is_valid(half):
    result = half.generate(PROMPT, max_new_tokens=0)
    assert (result.token_ids, result.finish_reason, result.timings.decode_tok_s) == ((), "length", None)


def test_a_closed_stream_keeps_what_it_made(half):
    stream = half.stream(PROMPT, max_new_tokens=50)
    ids = [next(stream).token_id for _ in range(3)]
    stream.close()
    assert half.last_result.token_ids == tuple(ids)
    assert half.last_result.finish_reason == "cancelled"


def test_stop_ends_after_the_current_token(half):
    count = 0
    for _ in half.stream(PROMPT, max_new_tokens=50):
        count += 1
        if count == 2:
            half.stop()
    assert count == 2


def test_context_bounds_prompt_and_answer(half):
    with pytest.raises(UsageError, match="257 tokens, the context 256"):
        half.generate([5] * 257)
    result = half.generate([5] * 250, max_new_tokens=50)
    assert (len(result.token_ids), result.finish_reason) == (6, "length")
    assert half.generate([5] * 256, max_new_tokens=50).token_ids == ()


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([128], {}, r"\[0, 128\), got 128"),
        ([-1], {}, "got -1"),
        ("text", {}, "no tokenizer"),
        (PROMPT, {"temprature": 1}, "unknown setting 'temprature'"),
        (PROMPT, {"top_p": 0}, "top_p"),
    ],
)
def test_bad_requests_are_refused_and_harm_nothing(half, prompt, settings, message):
    before = half.generate(PROMPT, max_new_tokens=2).token_ids
    with pytest.raises(UsageError, match=message):
        half.generate(prompt, **settings)
    assert half.generate(PROMPT, max_new_tokens=2).token_ids == before


def test_empty_prompt_begins_with_bos(half):
    assert half.generate([], max_new_tokens=3).token_ids == half.generate([1], max_new_tokens=3).token_ids


def test_a_failed_step_leaves_an_engine_like_new(half, monkeypatch):
    expected = half.generate(PROMPT, max_new_tokens=4).token_ids
    run, calls = half._parts.cold.run, []

    def failing(layer, h):
        calls.append(layer)
        if len(calls) == 5:
            raise OSError("the host failed")
        return run(layer, h)

    monkeypatch.setattr(half._parts.cold, "run", failing)
    with pytest.raises(OSError, match="the host failed"):
        half.generate(PROMPT, max_new_tokens=4)
    monkeypatch.undo()
    assert half.generate(PROMPT, max_new_tokens=4).token_ids == expected


def test_an_exception_in_a_callback_keeps_its_type(models):
    with Engine.from_pretrained(str(models["relu"]), vram_budget="700KiB", ctx=256, host_mode="callback") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=2).token_ids
        run = engine._parts.cold.run
        engine._parts.prepared.bridge.cold.run = lambda *_: (_ for _ in ()).throw(OSError("the host failed"))
        with pytest.raises(OSError, match="the host failed"):
            engine.generate(PROMPT, max_new_tokens=2)
        engine._parts.prepared.bridge.cold.run = run
        assert engine.generate(PROMPT, max_new_tokens=2).token_ids == expected


def test_nan_logits_end_with_an_error(half, monkeypatch):
    step = half._parts.stepper.step
    monkeypatch.setattr(half._parts.stepper, "step", lambda *a: step(*a) * np.nan)
    with pytest.raises(NumericalError):
        half.generate(PROMPT, max_new_tokens=2)


def test_figures_agree_with_a_count_by_hand(half, models):
    """Live units of decoded tokens by the flax module's gates, and where the engine's buckets put them."""
    result = half.generate(PROMPT, max_new_tokens=6)
    model = load_decoder(Checkpoint.open(models["relu"]))
    ids = np.array([*PROMPT, *result.token_ids[:-1]], np.int32)
    _, gates = model(ids[None])
    live = np.stack([np.asarray(gate)[0] > 0 for gate in gates])[:, len(PROMPT) - 1 :]  # [L, tokens, F]
    hot = np.zeros((len(live), 1, live.shape[2]), np.bool_)
    for layer in range(len(live)):
        hot[layer, 0, half._parts.pool.bucket(layer)] = True
    units = result.units
    assert units.live_per_token == live.sum() / live.shape[1]
    assert units.density == pytest.approx(live.mean())
    assert units.hot_share == (live & hot).sum() / live.sum()
    assert units.hot_share_layers_ge_1 == (live & hot)[1:].sum() / live[1:].sum()
    assert units.computed_hot_share == pytest.approx(hot.mean())
    assert 0 < result.ffn["cold_share"] < 1
    assert result.host["bytes_read"] > 0


def test_statistics_steer_placement_and_strangers_are_refused(models, tmp_path):
    folder, spec = models["relu"], SPECS["relu"]
    checkpoint = Checkpoint.open(folder)
    frequency = np.random.default_rng(0).random((spec.layers, spec.ffn), np.float32)
    mine = tmp_path / "mine.npz"
    write_stats(mine, fingerprint=checkpoint.fingerprint(), frequency=frequency, tokens=10)
    whole = plan_for(str(folder), EngineConfig(ctx=256))
    settings = {"vram_budget": whole.smallest_budget_bytes + whole.pool // 2, "ctx": 256, "stats": str(mine)}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        for layer in range(spec.layers):
            bucket = engine._parts.pool.bucket(layer)
            cold = np.setdiff1d(np.arange(spec.ffn), bucket)
            assert frequency[layer, bucket].min() >= frequency[layer, cold].max()
    other = make_checkpoint(tmp_path / "other", spec, seed=1)
    with pytest.raises(MismatchError, match="another|was made for"):
        Engine.from_pretrained(str(other), **settings)


def test_policy_none_keeps_the_device_empty(models):
    with Engine.from_pretrained(str(models["relu"]), policy="none", ctx=256) as engine:
        assert engine.stats()["pool_slots"] == [0] * SPECS["relu"].layers
        assert engine.generate(PROMPT, max_new_tokens=2).policy == "none"


def test_threads_take_turns(half):
    expected = half.generate(PROMPT, max_new_tokens=5).token_ids
    seen = []

    def ask():
        seen.append(half.generate(PROMPT, max_new_tokens=5).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [expected] * 3


def test_close_twice_then_refuse(models):
    engine = Engine.from_pretrained(str(models["relu"]), ctx=256)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPT)
