"""Skipping in one program, where the CPU backend holds every neuron: what the threads say, and what is counted."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from dynajax import Engine
from dynajax.checkpoint import Checkpoint
from dynajax.errors import NumericalError, UsageError
from dynajax.quant import pack
from hostcompute.ffi import unavailable
from predictors.folder import Manifest, read_manifest, write_predictors
from predictors.forms import Entry, Form
from tests.engine.cases import PROMPT, SPECS
from tests.engine.planned_cases import CTX, budget, decode, opened

TEXT = [*PROMPT, 5, 9, 77, 3]
IDS = np.array([TEXT, TEXT[::-1]]).T
NEW = 40
PREDICTED = {"sparsity": "predicted", "ctx": CTX, "policy": "static", "deterministic": True}


@pytest.fixture(scope="module", autouse=True)
def handler() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no FFI handler: {reason}")


@contextmanager
def whole(folder, **settings):
    """Everything is there, as by default on the CPU backend."""
    with Engine.from_pretrained(str(folder), **PREDICTED | settings) as engine:
        yield engine


KINDS = [("relu", "float32"), ("silu", "float32"), ("fatrelu", "float32"), ("relu-tied", "float32")]
KINDS += [("silu", "int8"), ("relu", "int4"), ("relu", "bfloat16")]


@pytest.mark.parametrize("skip_lead", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_the_threads_say_the_same(models, name, dtype, skip_lead):
    """Logits of two rows, the figures of a generation, the scores of a text; and only one of them is one program."""
    settings = {"set": {"theta": 0.4, "skip_lead": skip_lead, "lead": 1}, "batch": 2, "dtype": dtype}
    narrow = {"vram_budget": budget(models[name], 100, **PREDICTED | settings)}  # the threads' chunks of a text
    found = []
    for which in (whole(models[name], **settings | narrow), opened(models[name], 100, **PREDICTED | settings)):
        with which as engine:
            parts = engine._parts
            logits = decode(parts, IDS, 5)
            result = engine.generate(list(PROMPT), max_new_tokens=NEW, ignore_eos=True)
            found.append((logits, result, engine.score(TEXT, check=True), engine.stats(), parts.pool.slots))
    one, threads = found
    np.testing.assert_allclose(one[0], threads[0], rtol=0, atol=2e-5)
    assert one[1].token_ids == threads[1].token_ids
    assert one[1].units == threads[1].units and one[1].units.recall is not None and one[1].units.hot_share == 1
    assert 0 < one[1].units.density < (0.7 if name == "silu" else 0.6)
    np.testing.assert_allclose(one[2].logprobs, threads[2].logprobs, rtol=0, atol=2e-5)
    for counts in ("computed", "live", "found"):
        assert getattr(one[2].counts, counts).tolist() == getattr(threads[2].counts, counts).tolist()
    assert (one[3]["host_mode"], threads[3]["host_mode"]) == ("resident", "threads")
    assert one[4] == threads[4] == (SPECS[name].ffn,) * SPECS[name].layers
    kinds = {kind[0] for kind in one[3]["program_kinds"]}
    assert "token_skipping_rows" in kinds and not kinds & {"attend_rows", "hot_admitted_rows"}
    if dtype == "int4":
        return  # four bits of gates of four bits foretell all there is, and the plain model says the same
    with opened(models[name], 100, **PREDICTED | settings | {"sparsity": "dense"}) as engine:
        plain = decode(engine._parts, IDS, 5)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(plain, threads[0], rtol=0, atol=2e-3)


def test_scores_are_those_of_decoding(models):
    with whole(models["relu"], set={"theta": 0.4}) as engine:
        scored = engine.score(TEXT)
        logits = decode(engine._parts, np.array(TEXT[:-1])[:, None], 0)[:, 0].astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs, expected[np.arange(len(TEXT) - 1), TEXT[1:]], atol=2e-4)


def test_rows_that_rest_count_for_nothing(models):
    """Of a batch of two one row ends early: figures are those of the rows alone."""
    prompts, found = [list(PROMPT), list(PROMPT[5:20])], []
    for batch in (1, 2):
        with whole(models["relu"], batch=batch, set={"theta": 0.4}) as engine:
            results = [engine.generate(prompts[0], max_new_tokens=NEW, ignore_eos=True)] if batch == 1 else None
            if results is None:
                parts = engine._parts
                parts.reset_counters()
                for row, prompt in enumerate([prompts[0][:-1], prompts[1][:-1]]):
                    parts.stepper.prefill(row, prompt, lambda done, total: None)
                parts.reset_counters()
                ids, at = np.zeros(2, np.int32), np.zeros(2, np.int32)
                for step, token in enumerate([prompts[0][-1], *found[0][0]][:-1]):
                    ids[0], at[0] = token, len(prompts[0]) - 1 + step
                    parts.stepper.step(ids, at, np.array([True, False]))
                found.append(parts.runner.books)
            else:
                found.append((results[0].token_ids, engine._parts.runner.books))
    for field in ("rows", "hot_computed", "seen_rows", "seen_live", "seen_computed"):
        assert getattr(found[1], field).tolist() == getattr(found[0][1], field).tolist(), field
    assert found[1].seen_live.sum() > 0


def test_prompts_are_skipped_if_asked_for(models):
    with whole(models["relu"], set={"theta": 0.4, "sparse_prefill": True}) as one:
        found = decode(one._parts, IDS[:, :1], 30)
    with opened(models["relu"], 100, **PREDICTED, set={"theta": 0.4, "sparse_prefill": True}) as threads:
        np.testing.assert_allclose(found, decode(threads._parts, IDS[:, :1], 30), rtol=0, atol=2e-5)
    with whole(models["relu"], set={"theta": 0.4}) as plain, pytest.raises(AssertionError):
        np.testing.assert_allclose(found, decode(plain._parts, IDS[:, :1], 30), rtol=0, atol=2e-5)


def test_the_plan_holds(models):
    """The predictors are in the budget; with less than everything the threads do it."""
    for share, mode in ((100, "resident"), (50, "threads")):
        settings = PREDICTED | {"vram_budget": budget(models["relu"], share, **PREDICTED)}
        with Engine.from_pretrained(str(models["relu"]), **settings) as engine:
            memory = engine.generate(list(PROMPT), max_new_tokens=3).memory
            assert engine.stats()["host_mode"] == mode
            assert memory["peak_bytes"] <= memory["budget_bytes"]
    with whole(models["relu"]) as engine:
        long = (PROMPT * 8)[:130]  # with a chunk of the widest kind
        memory, plan = engine.generate(long, max_new_tokens=3).memory, engine._parts.prepared.memory
        engine.score(TEXT, check=True)
        assert engine.stats()["memory"]["peak_bytes"] <= memory["budget_bytes"] and plan.predictors > 0
        assert abs(memory["plan_bytes"] - memory["peak_bytes"]) <= 0.02 * memory["peak_bytes"]


FORMS = (Form(kind="mlp", rank=32), Form(kind="mlp", rank=12), Form(kind="gate", bits=2, rank=32))


def trained(folder, model):
    """A predictor of every form, for the layers in their order; they know nothing."""
    checkpoint, rng = Checkpoint.open(model), np.random.default_rng(0)
    spec = checkpoint.spec
    entries = tuple(Entry(layer=layer, lead=0, form=form) for layer, form in enumerate(FORMS))
    manifest = Manifest(
        fingerprint=checkpoint.fingerprint(), layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn, ranks=(),
        dtype="float16", source="a test", kind="mixed", entries=entries,
    )  # fmt: skip
    weights = {
        key: {name: (0.3 * rng.standard_normal(shape)).astype(kind) for name, (shape, kind) in arrays.items()}
        for key, arrays in manifest.arrays().items()
    }
    return write_predictors(folder, manifest, weights), weights


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_trained_matrices_are_eight_bits_either_way(models, tmp_path, dtype):
    """Whatever the weights are: both ways go by one set of scores, and hold and read what was planned."""
    folder, weights = trained(tmp_path / "p", models["relu"])
    settings = PREDICTED | {"predictor": str(folder), "dtype": dtype, "set": {"lead": 0}}
    found = []
    for which in (whole(models["relu"], **settings), opened(models["relu"], 100, **settings)):
        with which as engine:
            parts = engine._parts
            runner = parts.runner if parts.plans is None else parts.plans.runner
            found.append((decode(parts, IDS[:, :1], 5), engine.score(TEXT, check=True).counts))
            held = {place: runner.predictors.arrays(place)[0] for place in parts.prepared.prediction.entries}
            sent = sum(array.nbytes for params in held.values() for array in params.values())
            assert sent == parts.prepared.prediction.bytes == parts.prepared.memory.predictors
            assert sent == parts.prepared.prediction.read_bytes(parts.prepared.spec)
            floats = sum(array.nbytes for kept in weights.values() for array in kept.values() if array.ndim == 2)
            codes = sum(held[0, 2][name].nbytes for name in ("codes0", "scales0")) + held[0, 2]["shift"].nbytes
            narrow = 12 * 96 * 2  # what 12 columns leave as it was
            assert sent == (floats - narrow) * 17 // 32 + narrow + codes
            for layer, name in ((0, "fc1"), (0, "fc2"), (1, "fc1"), (2, "narrow"), (2, "wide")):
                expected = pack(weights[f"000-{layer:03}"][name], 8)
                np.testing.assert_array_equal(np.asarray(held[0, layer][name]), expected)
    (one, counts), (threads, others) = found
    np.testing.assert_allclose(one, threads, rtol=0, atol=2e-5)
    for name in ("computed", "live", "found"):
        assert getattr(counts, name).tolist() == getattr(others, name).tolist()
    assert 0 < counts.computed.sum() < len(TEXT) * 3 * 96


def test_a_predictor_beyond_float16_is_refused(models, tmp_path):
    folder, weights = trained(tmp_path / "p", models["relu"])
    manifest = replace(read_manifest(folder), dtype="float32")
    wide = {key: {name: value.astype(np.float32) for name, value in kept.items()} for key, kept in weights.items()}
    wide["000-001"]["fc1"][2, 7] = 1e6
    other = write_predictors(tmp_path / "wide", manifest, wide)
    with (
        pytest.raises(NumericalError, match="the predictor of layer 1, lead 0: .*within float16: train it again"),
        whole(models["relu"], predictor=str(other)),
    ):
        pass


def test_it_is_seen_layer_by_layer_and_not_recorded(models):
    from dynajax.trace import Recorder

    with whole(models["relu"]) as engine:
        seen = []
        engine.observe(lambda layer, hidden, live: seen.append(layer))
        engine.generate(list(PROMPT), max_new_tokens=2)
        assert seen[-3:] == [0, 1, 2]
        engine.observe(None)
        with pytest.raises(UsageError, match="--host-mode threads"):
            engine.record(Recorder())
