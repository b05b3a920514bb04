"""Switch Transformers through the engine: wherever experts are and whoever computes them, every step's logits are those
of the float64 forward that reads the files; experts that are full drop the same tokens of a prompt."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax import Engine
from dynajax.budget import dense_bytes, kv_bytes
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.engine.mixture.encoded import first_come
from dynajax.engine.result import Result
from dynajax.engine.seeing import trace
from dynajax.errors import UsageError
from dynajax.ops.routing import first_come as first_come_on_device
from dynajax.testing import make_switch
from dynajax.testing.switch import switch_logits
from dynajax.timeline import Timeline
from dynajax.trace import Recorder
from dynajax.verify import Settings, verify
from tests.engine.mixture.zoo import CTX, assert_close, opened

RNG = np.random.default_rng(7)
SOURCES = [RNG.integers(2, 96, length) for length in (70, 1, 131)]
TARGETS = [np.concatenate([[0], RNG.integers(2, 96, 11)]) for _ in SOURCES]
CAPACITY = 5  # an encoder's layer drops more than half of 70 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_switch(tmp_path_factory.mktemp("switch") / "model", seed=3, expert_capacity=CAPACITY)


@pytest.fixture(scope="module")
def expected(folder):
    return [switch_logits(folder, source, target) for source, target in zip(SOURCES, TARGETS, strict=True)]


def read(parts, rows):
    """The prompts of some rows."""
    for row in rows:
        parts.stepper.prefill(row, SOURCES[row].tolist(), lambda done, total: None)
    parts.reset_counters()


def write(parts, rows, expected, starts=(0, 0, 0), steps=12):
    """Steps of all those rows together, each compared."""
    active = np.isin(np.arange(parts.config.batch), rows)
    for step in range(steps):
        ids, at = np.zeros(len(active), np.int32), np.zeros(len(active), np.int32)
        for row in rows:
            at[row] = starts[row] + step
            ids[row] = TARGETS[row][at[row]]
        logits = parts.stepper.step(ids, at, active)
        for row in rows:
            assert_close(logits[row], expected[row][at[row]])


def test_this_capacity_drops_tokens(folder, expected):
    plenty = [switch_logits(make_switch(folder.parent / "plenty", seed=3), SOURCES[0], TARGETS[0])]
    with pytest.raises(AssertionError):
        assert_close(expected[0], plenty[0])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_sequence_at_every_share(folder, expected, share):
    with opened(folder, share) as parts:
        assert parts.prepared.host_mode == ("resident" if share == 1 else "ffi")
        read(parts, [0])
        write(parts, [0], expected)


@pytest.mark.parametrize("mode", ["threads", "callback", "ffi"])
def test_every_host_mode(folder, expected, mode):
    with opened(folder, 0.5, host_mode=mode, policy="static", batch=3) as parts:
        assert parts.prepared.host_mode == mode
        read(parts, [0, 1, 2])
        write(parts, [0, 1, 2], expected, steps=4)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["static", "scan", "lru"])
def test_rows_with_prompts_of_their_own(folder, expected, policy, share):
    with opened(folder, share, policy=policy, batch=3, host_mode="threads") as parts:
        assert parts.policy == policy
        read(parts, [2, 0, 1])
        write(parts, [0, 1, 2], expected, steps=3)
        write(parts, [0, 2], expected, starts=(3, 0, 3), steps=5)
        read(parts, [1])  # a new sequence where another one was
        write(parts, [1], expected, steps=3)
        if policy == "lru" and 0 < share < 1:
            assert parts.mixture.runner.moves.books.loads.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dali", "hybrimoe", "bandwidth-split", "fiddler", "lfu", "layer-split"])
def test_no_policy_changes_an_answer(folder, expected, policy):
    with opened(folder, 0.5, policy=policy, batch=3) as parts:
        assert parts.policy == policy
        read(parts, [2, 0, 1])
        write(parts, [0, 1, 2], expected)


def test_the_comparison_notices_other_rows_and_positions(folder, expected):
    with opened(folder, 0.5, batch=3) as parts:
        read(parts, [0, 1, 2])
        for wrong in (expected[::-1], [np.roll(logits, 1, axis=0) for logits in expected]):
            with pytest.raises(AssertionError):
                write(parts, [0, 2], wrong, steps=1)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_prompt_streams_experts_through_the_device(folder, expected, share, monkeypatch):
    """Every cold expert of a prompt goes through the buffers, whatever it costs."""
    from dynajax.engine.mixture.layers import Side
    from dynajax.engine.mixture.runner import MixtureRunner

    sides, streamed = MixtureRunner.sides, []

    def all_streamed(self, m, tokens):
        made = sides(self, m, tokens)
        if self.moves.mover is None:
            return made
        streamed.append(len(made.cold) + len(made.streamed))
        return Side(made.hot, made.cold[:0], np.sort(np.concatenate([made.cold, made.streamed])))

    monkeypatch.setattr(MixtureRunner, "sides", all_streamed)
    with opened(folder, share, policy="scan") as parts:
        read(parts, [0])
        write(parts, [0], expected, steps=2)
    assert share == 0 or sum(streamed) > 0


def greedy(folder, source, count):
    tokens = [0]
    for _ in range(count):
        tokens.append(int(switch_logits(folder, source, tokens)[-1].argmax()))
        if tokens[-1] == 1:
            break
    return tuple(tokens[1:])


def test_generate(folder):
    plan = plan_for(str(folder), EngineConfig(ctx=CTX, policy="none", vram_budget="64GiB", batch=3))
    settings: dict[str, Any] = {"ctx": CTX, "batch": 3, "vram_budget": plan.smallest_budget_bytes + 100_000}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        results = engine.generate([source.tolist() for source in SOURCES], max_new_tokens=8, temperature=0)
        assert isinstance(results, list)
        for result, source in zip(results, SOURCES, strict=True):
            assert result.token_ids == greedy(folder, source, 8)
            assert result.prompt_tokens == len(source)
        units = results[0].units
        assert units.hot_share is not None and units.hot_share_layers_ge_1 is not None
        assert units.kind == "expert" and 0 < units.hot_share < 1 and units.live_per_token == 2
        assert units.density == pytest.approx(1 / 4) and 0 <= units.hot_share_layers_ge_1 <= 1
        assert engine.stats()["units_per_layer"] == 4 and len(engine.stats()["pool_slots"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "scan"])
def test_greedy_tokens_are_those_of_transformers(folder, policy):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = transformers.SwitchTransformersForConditionalGeneration
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with opened(folder, 0.5, policy=policy, batch=3) as parts:
        engine = Engine(parts)
        found = engine.generate([source.tolist() for source in SOURCES], max_new_tokens=24, temperature=0)
        assert isinstance(found, list)
    for result, source in zip(found, SOURCES, strict=True):
        theirs = model.generate(torch.tensor(source[None, :]), max_new_tokens=24, do_sample=False, use_cache=True)
        assert result.token_ids == tuple(theirs[0, 1:].tolist())


def test_the_context_bounds_both_sides(folder):
    with Engine.from_pretrained(str(folder), ctx=16) as engine:
        result = engine.generate(SOURCES[0][:16].tolist(), max_new_tokens=40, temperature=0, ignore_eos=True)
        assert isinstance(result, Result)
        assert (result.prompt_tokens, len(result.token_ids), result.finish_reason) == (16, 16, "length")
        with pytest.raises(UsageError, match="the prompt has 17 tokens"):
            engine.generate(SOURCES[0][:17].tolist())
    with pytest.raises(UsageError, match="at most the model's 512 positions"):
        Engine.from_pretrained(str(folder), ctx=513)


def test_what_is_refused(folder):
    with Engine.from_pretrained(str(folder), ctx=16) as engine:
        with pytest.raises(UsageError, match="does not score"):
            engine.score([3, 4, 5])
        with pytest.raises(UsageError, match="is not recorded"):
            engine.record(Recorder())


def test_other_commands_say_that_they_do_not_know_encoders(folder):
    with pytest.raises(UsageError, match="cannot be verified yet"):
        verify(Settings(model=str(folder), config=EngineConfig()), lambda *progress: None, lambda run: None)


@pytest.mark.parametrize(("dtype", "worst"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_types_of_16_bits(folder, expected, dtype, worst):
    """As far off as their rounding; another position is farther. In the third step two experts are so near each other
    that rounding decides, in one layer."""
    steps = [step for step in range(len(TARGETS[0])) if step != 2]
    with opened(folder, 1.0, dtype=dtype, host_dtype=dtype) as parts:
        read(parts, [0])
        for step, token in enumerate(TARGETS[0].astype(np.int32)):
            logits = parts.stepper.step(np.array([token]), np.array([step], np.int32), np.ones(1, np.bool_))[0]
            far = [np.abs(logits - one).max() / np.abs(one).max() for one in expected[0]]
            assert step not in steps or far[step] < worst < min(far[:step] + far[step + 1 :])
        memory = parts.memory_figures()
        assert memory["peak_bytes"] <= memory["plan_bytes"] <= memory["budget_bytes"]


@pytest.mark.parametrize("policy", ["static", "scan"])
def test_a_timeline_changes_nothing(folder, expected, policy):
    timeline = Timeline()
    with opened(folder, 0.5, policy=policy, host_mode="threads") as parts:
        trace(parts, timeline)
        read(parts, [0])
        write(parts, [0], expected, steps=2)
        trace(parts, None)
    names = {name for _, name, *_ in timeline.spans()}
    assert {"read 0", "read 3", "attend 4", "attend 7", "head"} <= names and "attend 0" not in names


def test_observers_see_every_layer_with_experts(folder):
    """The encoder's layers the tokens that their experts take, the decoder's one token a step."""
    seen = []
    with Engine.from_pretrained(str(folder), ctx=CTX) as engine:
        engine.observe(lambda layer, hidden, live: seen.append((layer, hidden.shape, live)))
        engine.generate(SOURCES[0].tolist(), max_new_tokens=1, temperature=0)
    assert [layer for layer, *_ in seen] == [1, 3, 5, 7]
    for layer, (tokens, hidden), live in seen:
        assert hidden == 32 and live.shape == (tokens, 4) and (live.sum(axis=1) == 1).all()
        assert tokens == 1 if layer > 3 else CAPACITY < tokens < 70
        assert layer > 3 or live.sum(axis=0).max() == CAPACITY


def test_the_budget_counts_what_is_there(folder):
    with opened(folder, 1.0, batch=3) as parts:
        weights, state, shapes = parts.stepper.weights, parts.stepper.state, parts.prepared.programs.shapes
        held = jax.tree.leaves((weights.layers, weights.routing, weights.norm, weights.encoder_norm, weights.table))
        assert sum(array.nbytes for array in held) == dense_bytes(shapes.spec, "float32") == parts.prepared.memory.dense
        caches = (*state.ks, *state.vs, *state.seen_ks, *state.seen_vs)
        assert sum(cache.nbytes for cache in caches) == kv_bytes(shapes.spec, "float32", shapes.ctx, 3)
        assert len(caches) == 4 * 4


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_everybody_to_one_expert(folder, tmp_path, share):
    """Routers that say the same of all experts: the first takes what it may, and the others of a prompt go without."""
    folder = make_switch(tmp_path, seed=5, expert_capacity=CAPACITY)
    tensors = load_file(folder / "model.safetensors")
    flat = {name: np.zeros_like(value) for name, value in tensors.items() if "router" in name}
    save_file(tensors | flat, folder / "model.safetensors")
    expected = [switch_logits(folder, source, target) for source, target in zip(SOURCES, TARGETS, strict=True)]
    with opened(folder, share, policy="static", batch=3) as parts:
        read(parts, [0, 1, 2])
        write(parts, [0, 1, 2], expected, steps=2)


def test_first_come_is_the_same_on_both_sides():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 5, rng.integers(1, 60)).astype(np.int32)
        capacity = int(rng.integers(1, 12))
        taken = np.asarray(first_come_on_device(jnp.asarray(ids[None, :, None]), 5, capacity))[0, :, 0]
        assert first_come(ids, capacity).tolist() == np.flatnonzero(taken).tolist()
