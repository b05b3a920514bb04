"""The engine's public face: results, streams, figures, failures."""

import threading

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, write_stats
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.cold import ColdSide
from dynajax.engine.threads import ThreadsRunner
from dynajax.errors import EngineError, FitError, MismatchError, NumericalError, UsageError
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
    prepared = half._parts.prepared
    assert first not in prepared.eos_ids
    object.__setattr__(prepared, "eos_ids", (first,))
    try:
        result = half.generate(PROMPT, max_new_tokens=5)
        assert (result.finish_reason, result.token_ids) == ("stop", (first,))
        assert half.generate(PROMPT, max_new_tokens=3, ignore_eos=True).finish_reason == "length"
    finally:
        object.__setattr__(prepared, "eos_ids", SPECS["relu"].eos_ids)


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


def test_an_open_stream_refuses_its_own_thread_and_yields_to_close(models):
    with Engine.from_pretrained(str(models["relu"]), ctx=256) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=9)
        next(stream)
        with pytest.raises(UsageError, match="a stream of this engine is open"):
            engine.generate(PROMPT)
        stream.close()
        assert len(engine.generate(PROMPT, max_new_tokens=2).token_ids) == 2
        left_open = engine.stream(PROMPT, max_new_tokens=9)
        next(left_open)
    assert list(left_open) == []


def test_stop_ends_every_batch_of_a_list(models):
    with Engine.from_pretrained(str(models["relu"]), ctx=256, batch=2) as engine:
        step, calls = engine._parts.stepper.step, []

        def stopping(*args):
            calls.append(1)
            if len(calls) == 2:
                engine.stop()
            return step(*args)

        engine._parts.stepper.step = stopping
        results = engine.generate([PROMPT] * 3, max_new_tokens=20)
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [(2, "cancelled")] * 2 + [(0, "cancelled")]


@pytest.mark.parametrize("mode", ["auto", "threads"])
def test_stop_during_a_prompt_ends_between_its_layers(models, monkeypatch, mode):
    seen = []
    settings = {"ctx": 256, "host_mode": mode, "progress": lambda *args: seen.append(args)}
    with Engine.from_pretrained(str(models["relu"]), **settings) as engine:
        attend, calls = ThreadsRunner.attend_chunk, []

        def stopping(self, state, layer, *args):
            calls.append(layer)
            if len(calls) == 1:
                engine.stop()
            return attend(self, state, layer, *args)

        monkeypatch.setattr(ThreadsRunner, "attend_chunk", stopping)
        result = engine.generate([PROMPT[0]] * 8, max_new_tokens=5)
        assert set(calls) == {0}
        assert (result.token_ids, result.finish_reason) == ((), "cancelled")
        engine.generate(PROMPT, max_new_tokens=1)
    assert [args for args in seen if args[0] == "prefill"][-1] == ("prefill", 100, 100)
    assert {args[0] for args in seen} == {"compile", "load", "place", "prefill"}


@pytest.mark.parametrize("mode", ["auto", "threads", "ffi"])
@pytest.mark.parametrize("policy", ["static", "none"])
def test_every_stage_of_loading_is_reported_to_its_end(models, mode, policy):
    seen = []
    settings = {"ctx": 256, "host_mode": mode, "policy": policy, "progress": lambda *args: seen.append(args)}
    Engine.from_pretrained(str(models["relu"]), **settings).close()
    for stage in ("compile", "load", "place"):
        counts = [args[1:] for args in seen if args[0] == stage]
        assert [total for _, total in counts] == [counts[-1][0]] * len(counts)
        assert [done for done, _ in counts] == list(range(1, len(counts) + 1)), stage


def test_a_list_is_checked_before_any_of_it_runs(half, monkeypatch):
    monkeypatch.setattr(half._parts.stepper, "prefill", lambda *_: pytest.fail("a prompt ran"))
    with pytest.raises(UsageError, match=r"\[0, 128\)"):
        half.generate([[5, 6], [7, 999]], max_new_tokens=2)


def test_device_errors_become_our_own(half, monkeypatch):
    from jax.errors import JaxRuntimeError

    for text, kind in (
        ("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.", FitError),
        ("INTERNAL: x", EngineError),
    ):

        def failing(*_, text=text):
            raise JaxRuntimeError(text)

        monkeypatch.setattr(half._parts.stepper, "step", failing)
        with pytest.raises(kind, match=text.split(":")[0]):
            half.generate(PROMPT, max_new_tokens=2)


def test_the_asked_context_is_the_limit_though_the_cache_is_rounded_up(models):
    with Engine.from_pretrained(str(models["relu"]), ctx=41) as engine:
        assert len(engine.generate(PROMPT, max_new_tokens=50).token_ids) == 41 - len(PROMPT)
        with pytest.raises(UsageError, match="42 tokens, the context 41"):
            engine.generate([5] * 42)


def test_prefill_speed_counts_every_row(models):
    with Engine.from_pretrained(str(models["relu"]), ctx=256, batch=3) as engine:
        timings = engine.generate([PROMPT] * 3, max_new_tokens=1)[1].timings
    assert timings.prefill_tok_s == pytest.approx(3 * (len(PROMPT) - 1) / timings.prefill_s)


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
        (["a", "b"], {}, "no tokenizer"),
        ([5, "b"], {}, "sequence of token ids"),
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


def half_budget(folder, **config):
    whole = plan_for(str(folder), EngineConfig(ctx=256, **config))
    return whole.smallest_budget_bytes + whole.pool // 2


@pytest.mark.parametrize("mode", ["threads", "callback"])
def test_a_failed_step_leaves_an_engine_like_new(models, monkeypatch, mode):
    settings = {"ctx": 256, "host_mode": mode}
    budget = half_budget(models["relu"], host_mode=mode)
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, **settings) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=4).token_ids
        run, calls = engine._parts.cold.run, []

        def failing(layer, h):
            calls.append(layer)
            if len(calls) == 5:  # the prompt takes two
                raise OSError("the host failed")
            return run(layer, h)

        monkeypatch.setattr(ColdSide, "run", lambda self, layer, h: failing(layer, h))
        with pytest.raises(OSError, match="the host failed") as caught:
            engine.generate(PROMPT, max_new_tokens=4)
        monkeypatch.undo()
        assert len(calls) == 5
        assert caught.value.__traceback__ is not None  # and its frames, which refer to the old caches
        assert engine._parts.meter.sample() <= budget
        with pytest.raises(UsageError, match="nothing was generated"):
            _ = engine.last_result
        result = engine.generate(PROMPT, max_new_tokens=4)
        assert result.token_ids == expected
        assert result.memory["peak_bytes"] <= budget


def test_nan_logits_end_with_an_error(half, monkeypatch):
    step = half._parts.stepper.step
    monkeypatch.setattr(half._parts.stepper, "step", lambda *a: step(*a) * np.nan)
    with pytest.raises(NumericalError):
        half.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize("mode", ["threads", "ffi"])
def test_figures_agree_with_a_count_by_hand(models, mode):
    """Live units of decoded tokens by the flax module's gates, and where the engine's buckets put them."""
    settings = {"ctx": 256, "host_mode": mode}
    budget = half_budget(models["relu"], host_mode=mode)
    with Engine.from_pretrained(str(models["relu"]), vram_budget=budget, **settings) as engine:
        result = engine.generate(PROMPT, max_new_tokens=6)
        buckets = [engine._parts.pool.bucket(layer) for layer in range(SPECS["relu"].layers)]
    model = load_decoder(Checkpoint.open(models["relu"]))
    ids = np.array([*PROMPT, *result.token_ids[:-1]], np.int32)
    _, gates = model(ids[None])
    live = np.stack([np.asarray(gate)[0] > 0 for gate in gates])[:, len(PROMPT) - 1 :]  # [L, tokens, F]
    hot = np.zeros((len(live), 1, live.shape[2]), np.bool_)
    for layer, bucket in enumerate(buckets):
        hot[layer, 0, bucket] = True
    units = result.units
    assert units.live_per_token == live.sum() / live.shape[1]
    assert units.density == pytest.approx(live.mean())
    assert units.hot_share == (live & hot).sum() / live.sum()
    assert units.hot_share_layers_ge_1 == (live & hot)[1:].sum() / live[1:].sum()
    assert units.computed_hot_share == pytest.approx(hot.mean())
    assert result.host["bytes_read"] > 0 and result.ffn["cold_s"] > 0
    if mode == "threads":
        assert 0 < result.ffn["cold_share"] < 1
    else:  # one program: its halves cannot be told apart
        assert result.ffn["hot_s"] is None and result.ffn["cold_share"] is None


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


def test_a_placement_without_statistics_says_so(models, caplog):
    whole = plan_for(str(models["relu"]), EngineConfig(ctx=256))
    assert caplog.messages == []  # everything fits: nothing was lost
    plan_for(str(models["relu"]), EngineConfig(ctx=256, vram_budget=whole.smallest_budget_bytes + whole.pool // 2))
    assert ["no activation statistics" in message for message in caplog.messages] == [True]
    plan_for("tiny-relullama", EngineConfig(ctx=256, vram_budget="9MiB"))
    assert len(caplog.messages) == 1


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
