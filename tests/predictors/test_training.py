"""The streaming trainer on a synthetic model: it learns, resumes bit for bit, and keeps to its memory."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dynajax.config import Activation
from predictors.calibration import recall_at, top_mask
from predictors.fitting import Settings, loss_of
from predictors.folder import read_entries, write_predictors
from predictors.forms import Form, Shape, form_bytes
from predictors.gate import GateSource, gate_params
from predictors.scoring import scores
from predictors.selection import default_forms, mlp_rank
from predictors.training import Trainer

L, D, F, W = 3, 24, 40, 56  # W: inputs carry a bias column and padding
SHAPE = Shape(layers=L, hidden=D, ffn=F)
GATE, CORRECTED, MLP = Form(kind="gate", bits=1), Form(kind="gate", bits=1, rank=8), Form(kind="mlp", rank=16)
SETTINGS = Settings(tokens=3000, batch=64, passes=2, held_share=0.125, span=16, rate=1e-2, warmup=5)


class Model:
    """Streams that grow from layer to layer by a mean and a non-linear part; a gate a layer decides who is live."""

    def __init__(self, activation="relu"):
        rng = np.random.default_rng(0)
        self.gates = rng.standard_normal((L, F, D)).astype(np.float32) / D**0.5
        self.ups = rng.standard_normal((L, F, D)).astype(np.float32) / D**0.5
        self.norms = 1 + 0.2 * rng.standard_normal((L, D)).astype(np.float32)
        self.means = 2 * rng.standard_normal((L, D)).astype(np.float32)
        self.turns = rng.standard_normal((L, D, D)).astype(np.float32) / D**0.5
        self.silu = activation == "silu"
        self.shape = Shape(layers=L, hidden=D, ffn=F, activation=Activation(kind=activation))

    def __call__(self, count, seed=0):
        """-> streams [T, D], inputs [T, W], live [T, F]; lists over layers."""
        x = np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)
        streams, inputs, live = [], [], []
        for i in range(L):
            x = x + self.means[i] + 0.5 * np.abs(x) @ self.turns[i].T
            h = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * self.norms[i]
            gate = h @ self.gates[i].T
            streams.append(x)
            inputs.append(np.pad(h, ((0, 0), (0, W - D)), constant_values=1))
            live.append(
                top_mask(np.abs(gate / (1 + np.exp(-gate)) * (h @ self.ups[i].T)), 0.3) if self.silu else gate > 1
            )
        return streams, inputs, live

    def source(self, layer):
        rows = (self.gates[layer], self.ups[layer]) if self.silu else (self.gates[layer],)
        return GateSource(rows=rows, norm=self.norms[layer])


def make(forms=(GATE, CORRECTED, MLP), leads=(0, 1), settings=SETTINGS, seed=0, model=None):
    model = model or Model()
    return Trainer(model.shape, leads, forms, settings, seed, sources=model.source)


def feed(trainer, data, sizes, begin=0):
    at, end = begin, len(data[2][0])
    while at < end:
        size = next(sizes)
        trainer.feed(*([part[at : at + size] for part in layers] for layers in data))
        at += size


def repeat(*sizes):
    while True:
        yield from sizes


def same(a, b):
    left, right = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, x), (_, y) in zip(left, right, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def by_task(measured):
    return {(one.entry.form.name, one.entry.lead, one.entry.layer): one for one in measured}


@pytest.fixture(scope="module")
def trained():
    model = Model()
    trainer = make(model=model)
    feed(trainer, model(3000), repeat(200))
    trainer.finish()
    return trainer, model


def test_training_beats_the_start_and_the_prior(trained):
    trainer, model = trained
    before, test = make(), model(600, seed=9)
    feed(before, model(500), repeat(500))  # the buffer is not full yet: no step was made
    assert before.step == 0
    start, end = by_task(before.evaluate(*test)), by_task(trainer.evaluate(*test))
    for key, one in end.items():
        told, old = one.entry.metrics, start[key].entry.metrics
        assert told["entropy"] < told["prior_entropy"] and told["calibration_error"] < 0.03, key
        if one.entry.form.is_trained:
            assert told["entropy"] < 0.98 * old["entropy"], key
    for layer in range(1, L):
        plain, corrected = (end[form, 1, layer].entry.metrics["recall"]["1.0"] for form in ("gate1", "gate1+8"))
        assert corrected > plain + 0.01, layer
    for layer in range(L):  # static frequencies are what an mlp has to beat
        live = test[2][layer]
        known = recall_at(np.broadcast_to(model(3000)[2][layer].mean(axis=0), live.shape), live, 1.0)[0]
        assert end["mlp16", 0, layer].entry.metrics["recall"]["1.0"] > known + (0.02 if layer == 0 else 0)


def test_untrained_gates_get_the_mean_residual(trained):
    trainer, model = trained
    one = by_task(trainer.metrics())["gate1", 1, 2]
    streams, _, _ = model(3000)
    number = np.arange(3000)
    kept = (number // 16) % 8 != 7
    expected = (streams[2] - streams[1]).astype(np.float64)[kept].mean(axis=0)
    np.testing.assert_allclose(one.arrays["shift"], expected, atol=2e-3)


def test_metrics_are_those_of_the_scores(trained):
    trainer, model = trained
    streams, inputs, live = model(300, seed=5)
    one = by_task(trainer.evaluate(streams, inputs, live, "float32"))["gate1+8", 1, 2]
    params = gate_params(SHAPE, one.entry.form, model.source(2), trained=one.arrays)
    z = np.asarray(scores(params, streams[1], SHAPE, one.entry.form))
    for factor in (1.0, 1.3, 1.6, 2.0):
        expected = recall_at(z, live[2], factor)
        told = one.entry.metrics["recall"][str(factor)], one.entry.metrics["precision"][str(factor)]
        np.testing.assert_allclose(told, expected, atol=0.01)  # vectors were held in half precision
    np.testing.assert_allclose(one.entry.metrics["density"], live[2].mean())
    np.testing.assert_allclose(one.arrays["histogram"].sum(), 1, rtol=1e-5)


def test_chunking_changes_nothing(trained):
    trainer, model = trained
    other = make()
    feed(other, model(3000), repeat(1, 7, 300, 64, 900))
    other.finish()
    same(trainer.state(), other.state())
    different = make(seed=1)
    feed(different, model(3000), repeat(200))
    different.finish()
    with pytest.raises(AssertionError):
        same(trainer.state(), different.state())


def test_a_resumed_run_is_bit_equal(trained, tmp_path):
    trainer, model = trained
    first = make()
    feed(first, [[part[:2500] for part in layers] for layers in model(3000)], repeat(130))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first.state())
    del first
    second = make()
    with ocp.StandardCheckpointer() as checkpointer:
        second.restore(checkpointer.restore(tmp_path / "state", second.state()))
    assert 0 < second.tokens == 2500 and 0 < second.step < trainer.step
    feed(second, model(3000), repeat(77), begin=second.tokens)
    second.finish()
    same(trainer.state(), second.state())
    same([one.arrays for one in trainer.metrics()], [one.arrays for one in second.metrics()])
    with pytest.raises(ValueError, match="other forms or leads"):
        make(forms=(MLP,)).restore(second.state())


def test_buffers_keep_to_their_bytes():
    limit = 60_000
    trainer = make(settings=Settings(tokens=3000, batch=32, passes=1, span=8, held_share=0.25, buffer_bytes=limit))
    assert limit * 0.9 < trainer.buffer_bytes <= limit
    model = Model()
    feed(trainer, model(2000), repeat(500))
    held = sum(array.nbytes for name in ("buffer", "held") for array in trainer.state()[name].values())
    assert held <= limit + 16 and trainer.step > 10
    with pytest.raises(ValueError, match="buffer_bytes must hold 4/3 batch tokens, [0-9]+ bytes, got 1000"):
        make(settings=Settings(buffer_bytes=1000))


def test_the_folder_of_a_trainer(trained, tmp_path):
    trainer, _ = trained
    manifest, weights = trainer.result(fingerprint="ab" * 32, source="a test")
    folder = write_predictors(tmp_path / "p", manifest, weights)
    found, entries = read_entries(folder, fingerprint="ab" * 32, layers=L, hidden=D, ffn=F)
    assert found == manifest and found.tokens == 3000 and found.lead == 1
    assert [(entry.lead, entry.layer) for entry, _ in entries] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    for entry, arrays in entries:
        same(dict(arrays), weights[entry.key])
    cheap, _ = trainer.result(fingerprint=None, source="a test", budget_bytes=0)
    assert all(
        form_bytes(SHAPE, entry.form) == min(form_bytes(SHAPE, form.at(entry.lead)) for form in (GATE, CORRECTED, MLP))
        for entry in cheap.entries
    )


def test_silu_sets_are_learned_from_gate_and_up():
    model = Model("silu")
    forms = (Form(kind="gate", bits=4), Form(kind="gate", bits=1, rank=8), MLP)
    trainer = make(forms=forms, leads=(0, 1), model=model)
    feed(trainer, model(3000), repeat(500))
    trainer.finish()
    found = by_task(trainer.evaluate(*model(400, seed=7)))
    assert found["gate4", 0, 1].entry.metrics["recall"]["1.0"] > 0.9
    for one in found.values():
        assert one.entry.metrics["entropy"] < one.entry.metrics["prior_entropy"]


def test_wrong_calls():
    model = Model()
    with pytest.raises(ValueError, match="leads must lie from 0 to 2"):
        make(leads=(3,))
    with pytest.raises(ValueError, match="gate forms need the weights"):
        Trainer(SHAPE, (0,), (GATE,), SETTINGS)
    with pytest.raises(ValueError, match="held_share must be"):
        Settings(held_share=0.9)
    trainer = make(leads=(1,), forms=(GATE,))
    assert trainer.reads == ("stream",)
    streams, _, live = model(5)
    trainer.feed(streams, None, live)
    with pytest.raises(RuntimeError, match="no tokens were held out"):
        trainer.metrics()
    for bad in ((None, None, live), (streams[:2], None, live), (streams, None, live[:2]), (streams, None, streams)):
        with pytest.raises(ValueError, match="must be"):
            trainer.feed(*bad)


def test_balanced_loss_in_float64():
    rng = np.random.default_rng(0)
    z, live = rng.standard_normal((6, 9)).astype(np.float32) * 4, rng.random((6, 9)) < 0.2
    p = 1 / (1 + np.exp(-z.astype(np.float64)))
    expected = np.where(live, -np.log(p), (live.mean() + 0.005) * -np.log1p(-p)).mean()
    np.testing.assert_allclose(loss_of(z, live, 0.005), expected, rtol=1e-5)


def test_default_forms_are_of_like_bytes():
    shape = Shape(layers=40, hidden=5120, ffn=13824)
    forms = default_forms(shape)
    sizes = {form.name: form_bytes(shape, form) for form in forms}
    assert sizes["gate1+128"] - sizes["gate1"] == 2 * 5120 * 128 * 34 // 32 + 4 * 5120
    mlp = next(form for form in forms if form.kind == "mlp")
    assert form_bytes(shape, mlp) <= sizes["gate4"] < form_bytes(shape, Form(kind="mlp", rank=mlp.rank + 32))
    assert mlp.rank == mlp_rank(shape, 4)
    with pytest.raises(ValueError, match="kinds must name"):
        default_forms(shape, ())
