"""Folders with one file a layer: predictors and activation counts."""

import json

import ml_dtypes
import numpy as np
import pytest

from dynajax.checkpoint import Checkpoint, read_stats
from dynajax.config import ModelSpec
from dynajax.convert.detect import kind_of
from dynajax.convert.layer_files import layer_files
from dynajax.convert.predictors import convert_predictors
from dynajax.convert.statistics import convert_statistics
from dynajax.errors import MismatchError, ModelError, NumericalError, UsageError
from dynajax.testing import make_checkpoint
from predictors.folder import read_predictors
from tests.convert.torch_files import Raw, save

LAYERS, HIDDEN, FFN = 12, 32, 48  # twelve, so that text order is wrong
SPEC = ModelSpec(
    layers=LAYERS, hidden=HIDDEN, ffn=FFN, heads=2, kv_heads=2, head_dim=16, vocab=64, max_positions=64, bos_id=0,
    eos_ids=(1,),
)  # fmt: skip
SIZES = {"layers": LAYERS, "hidden": HIDDEN, "ffn": FFN}


def pair(layer, kind=np.float32):
    rng = np.random.default_rng(layer)
    rank = 3 + layer % 4
    return [rng.standard_normal(shape).astype(kind) for shape in ((rank, HIDDEN), (FFN, rank))]


def predictor_files(folder, names=("fc1.weight", "fc2.weight"), kind=np.float32):
    folder.mkdir()
    for layer in range(LAYERS):
        save(folder / f"model_{layer}.pt", dict(zip(names, pair(layer, kind), strict=True)))
    return folder


def count_files(folder, kind=np.int64):
    folder.mkdir()
    for layer in range(LAYERS):
        save(folder / f"activation_{layer}.pt", (np.arange(FFN) * 10 + layer).astype(kind))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "twelve", SPEC)


# --- predictors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("fc1.weight", "fc2.weight"),
        ("0.weight", "1.weight"),
        ("0.weight", "2.weight"),
        ("a.fc1.weight", "a.fc2.weight"),
    ],
)
def test_every_layer_gets_its_own_predictor(tmp_path, names):
    folder = convert_predictors(predictor_files(tmp_path / "in", names), tmp_path / "out")
    manifest, weights = read_predictors(folder, fingerprint=None, **SIZES)
    assert manifest.ranks == tuple(3 + i % 4 for i in range(LAYERS))
    assert (manifest.fingerprint, manifest.dtype, manifest.lead) == (None, "float32", 0)
    assert (manifest.threshold, manifest.tokens, manifest.metrics) == (None, None, None)
    for layer, found in enumerate(weights):
        for ours, theirs in zip(found, pair(layer), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    record = json.loads((folder / "manifest.json").read_text())
    assert record["version"] == 1 and record["kind"] == "mlp" and "of in" in record["source"]


def test_the_order_is_by_number(tmp_path):
    names = [path.name for path in layer_files(predictor_files(tmp_path / "in"), "model")]
    assert names == [f"model_{i}.pt" for i in range(LAYERS)]
    assert names != sorted(names)  # the trap is set


@pytest.mark.parametrize(("kind", "dtype", "written"), [
    (np.float16, None, "float16"), (ml_dtypes.bfloat16, None, "bfloat16"), (np.float64, None, "float32"),
    (np.float32, "float16", "float16"),
])  # fmt: skip
def test_predictor_types(tmp_path, kind, dtype, written):
    folder = convert_predictors(predictor_files(tmp_path / "in", kind=kind), tmp_path / "out", dtype=dtype)
    manifest, weights = read_predictors(folder, fingerprint=None, **SIZES)
    assert manifest.dtype == written
    np.testing.assert_array_equal(weights[5][1], pair(5, kind)[1].astype(weights[5][1].dtype))


def test_predictors_for_a_model(tmp_path, model):
    source = predictor_files(tmp_path / "in")
    manifest, _ = read_predictors(
        convert_predictors(source, tmp_path / "out", model=model),
        fingerprint=Checkpoint.open(model).fingerprint(),
        **SIZES,
    )
    assert manifest.fingerprint == Checkpoint.open(model).fingerprint()
    (source / f"model_{LAYERS - 1}.pt").unlink()
    with pytest.raises(MismatchError, match="is for 11 layers, hidden 32, ffn 48; the model has 12, 32, 48"):
        convert_predictors(source, tmp_path / "other", model=model)


def test_layers_that_are_missing_or_twice(tmp_path):
    source = predictor_files(tmp_path / "in")
    for layer in (3, 10):
        (source / f"model_{layer}.pt").unlink()
    with pytest.raises(ModelError, match=r"lacks model_10\.pt, model_3\.pt"):
        convert_predictors(source, tmp_path / "out")
    for layer in ("03", "3", "10"):
        save(source / f"model_{layer}.pt", dict(zip(("fc1.weight", "fc2.weight"), pair(0), strict=True)))
    with pytest.raises(ModelError, match=r"a layer twice: model_03\.pt, model_3\.pt"):
        convert_predictors(source, tmp_path / "out")
    (source / "model_03.pt").unlink()
    (source / "model_999999999.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="numbers a layer 999999999"):
        convert_predictors(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"fc1.weight": pair(1)[0]}, "and nothing else, found fc1.weight"),
        ({"fc1.weight": pair(1)[0], "fc2.weight": pair(1)[1], "fc1.bias": pair(1)[0]}, "nothing else, found fc1.bias"),
        ({"fc1.weight": pair(1)[0], "xfc2.weight": pair(1)[1]}, "nothing else"),
        ({"fc1.weight": pair(1)[0], "fc2.weight": pair(2)[1]}, "expected floats"),
        ({"fc1.weight": pair(1)[0].astype(np.int64), "fc2.weight": pair(1)[1]}, "expected floats"),
        ({"fc1.weight": pair(1)[0][0], "fc2.weight": pair(1)[1]}, "expected floats"),
        ({"fc1.weight": pair(1)[0][:, :-1], "fc2.weight": pair(1)[1]}, "layer 1 is for hidden 31 and ffn 48, layer 0"),
    ],
)
def test_files_that_are_no_predictors(tmp_path, content, named):
    source = predictor_files(tmp_path / "in")
    save(source / "model_1.pt", content)
    with pytest.raises(ModelError, match=named):
        convert_predictors(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_predictors_with_nan(tmp_path):
    source = predictor_files(tmp_path / "in")
    fc1, fc2 = pair(7)
    fc2[1, 1] = np.nan
    save(source / "model_7.pt", {"fc1.weight": fc1, "fc2.weight": fc2})
    with pytest.raises(NumericalError, match=r"fc2\.weight holds NaN"):
        convert_predictors(source, tmp_path / "out")


# --- statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float16])
def test_counts_become_frequencies(tmp_path, model, kind):
    path = convert_statistics(count_files(tmp_path / "in", kind), tmp_path / "out", model=model)
    assert path == tmp_path / "out" / "activations.npz"
    found = read_stats(path, SPEC, Checkpoint.open(model).fingerprint())
    most = (FFN - 1) * 10 + LAYERS - 1
    expected = (np.arange(FFN)[None] * 10 + np.arange(LAYERS)[:, None]) / most  # layer 10 is not layer 2
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with np.load(path) as archive:
        assert archive["tokens"] == most


def test_counts_that_do_not_fit(tmp_path, model):
    source = count_files(tmp_path / "in")
    convert_statistics(source, tmp_path / "out", model=model)
    with pytest.raises(UsageError, match="exists: remove it first"):
        convert_statistics(source, tmp_path / "out", model=model)
    for content, error, named in (
        (np.arange(FFN + 1), MismatchError, "counts 49 neurons, the model has 48 a layer"),
        (np.full(FFN, -1), ModelError, "negative"),
        (np.full(FFN, np.nan, np.float32), ModelError, "NaN"),
        (np.ones((FFN, 1)), ModelError, "one tensor of counts"),
        (Raw(np.ones(1), (FFN,), (0,)), ModelError, "reaches beyond"),
    ):
        save(source / "activation_3.pt", content)
        with pytest.raises(error, match=named):
            convert_statistics(source, tmp_path / "new", model=model)
    (source / "activation_3.pt").unlink()
    with pytest.raises(ModelError, match=r"lacks activation_3\.pt"):
        convert_statistics(source, tmp_path / "new", model=model)
    for path in source.iterdir():
        save(path, np.zeros(FFN, np.int64))
    save(source / "activation_3.pt", np.zeros(FFN, np.int64))
    with pytest.raises(ModelError, match="counts no activation at all"):
        convert_statistics(source, tmp_path / "new", model=model)
    (source / "activation_11.pt").unlink()
    with pytest.raises(MismatchError, match="has 11 layers, the model has 12"):
        convert_statistics(source, tmp_path / "new", model=model)
    assert not (tmp_path / "new").exists()


# --- what is it? --------------------------------------------------------------------------------------


def test_kinds(tmp_path):
    def folder(name, *files):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"")
        return tmp_path / name

    assert kind_of(folder("a", "pytorch_model.bin", "config.json")) == "weights"
    assert kind_of(folder("b", "pytorch_model-00001-of-00002.bin")) == "weights"
    assert kind_of(folder("c", "model_0.pt")) == "predictors"
    assert kind_of(folder("d", "activation_0.pt")) == "statistics"
    assert kind_of(folder("e", "x.gguf") / "x.gguf") == "gguf"
    for source, error, named in (
        (folder("f", "model_0.pt", "activation_0.pt"), UsageError, "holds predictors and statistics"),
        (tmp_path / "e", UsageError, r"name the GGUF file itself \(x\.gguf\)"),
        (tmp_path / "a" / "pytorch_model.bin", UsageError, "name the folder"),
        (tmp_path / "a" / "config.json", ModelError, "nothing to convert"),
        (folder("g", "model.safetensors"), ModelError, "has safetensors already"),
        (folder("h", "model_x.pt"), ModelError, "nothing to convert"),
        (tmp_path / "absent", ModelError, "no file or folder"),
    ):
        with pytest.raises(error, match=named):
            kind_of(source)


# --- what torch writes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_that_torch_saved(tmp_path, model):
    torch = pytest.importorskip("torch")
    (tmp_path / "p").mkdir()
    (tmp_path / "a").mkdir()
    for layer in range(LAYERS):
        fc1, fc2 = map(torch.from_numpy, pair(layer))
        net = torch.nn.Sequential(torch.nn.Linear(*fc1.T.shape, bias=False), torch.nn.Linear(*fc2.T.shape, bias=False))
        net.load_state_dict({"0.weight": fc1, "1.weight": fc2})
        torch.save(net.state_dict(), tmp_path / "p" / f"model_{layer}.pt")
        torch.save(torch.arange(FFN) + layer, tmp_path / "a" / f"activation_{layer}.pt")
    folder = convert_predictors(tmp_path / "p", tmp_path / "predictors", model=model)
    _, weights = read_predictors(folder, fingerprint=None, **SIZES)
    np.testing.assert_array_equal(weights[10][0], pair(10)[0])
    path = convert_statistics(tmp_path / "a", tmp_path / "stats", model=model)
    assert read_stats(path, SPEC, None)[10, 0] == np.float32(10 / (FFN + LAYERS - 2))
