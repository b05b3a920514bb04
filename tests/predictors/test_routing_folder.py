"""The folder of routing predictors: round trip, other models' folders, damage, what it gives to whom."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dynajax.errors import MismatchError, ModelError, NumericalError, StorageError, UsageError
from predictors.folder import Manifest, write_predictors
from predictors.routing import load_corrections
from predictors.routing_folder import (
    RoutingEntry,
    RoutingManifest,
    read_routing,
    read_routing_manifest,
    write_routing,
)

OWNER = "ab" * 32
D, RANK = 8, 3
TOLD = {"recall": 0.5, "top1": {"8": 0.25, "32": None}}


def entry(lead, asked, kind, rank=0):
    return RoutingEntry(lead=lead, asked=asked, kind=kind, rank=rank, metrics={"gate": TOLD, kind: TOLD})


MANIFEST = RoutingManifest(
    fingerprint=OWNER, layers=(0, 2, 3), hidden=D, experts=6, top_k=2, lead=2, dtype="float16", source="a test",
    tokens=1000, entries=(entry(1, 0, "corrected", RANK), entry(1, 1, "residual"), entry(2, 0, "gate")),
)  # fmt: skip
SIZES = {"layers": 3, "hidden": D}


def tree_of(manifest=MANIFEST):
    rng = np.random.default_rng(0)
    return {
        key: {name: rng.standard_normal(shape).astype(kind) for name, (shape, kind) in arrays.items()}
        for key, arrays in manifest.arrays().items()
    }


@pytest.fixture
def folder(tmp_path):
    return write_routing(tmp_path / "p", MANIFEST, tree_of())


def test_round_trip(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "weights"]
    assert [path.name for path in folder.parent.iterdir()] == ["p"]
    manifest, tree = read_routing(folder, fingerprint=OWNER, **SIZES)
    assert manifest == MANIFEST == read_routing_manifest(folder)
    assert json.loads((folder / "manifest.json").read_text())["kind"] == "experts"
    for key, arrays in tree_of().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(tree[key][name], array)
            with pytest.raises(AssertionError):
                np.testing.assert_array_equal(tree[key][name], array + 1)


def test_what_each_kind_gets(folder):
    tree, means = tree_of(), tree_of()["means"]["hidden"]
    found = load_corrections(folder, "corrected", 1, 3, D, OWNER)
    assert {m: one.kind for m, one in found.items()} == {0: "corrected", 1: "residual"}
    for name, array in zip(("shift", "down", "up"), found[0].arrays, strict=True):
        np.testing.assert_array_equal(array, tree["001-000"][name].astype("f4"))
        assert array.dtype == np.float32
    np.testing.assert_allclose(found[1].shift, means[2] - means[1], rtol=1e-6)
    assert found[1].down.shape == (0, D) and found[1].up.shape == (D, 0)
    far = load_corrections(folder, "residual", 2, 3, D, OWNER)
    np.testing.assert_allclose(far[0].shift, means[2] - means[0], rtol=1e-6)
    assert load_corrections(folder, "corrected", 2, 3, D, OWNER)[0].kind == "gate"
    mean = load_corrections(folder, "residual-mean", 1, 3, D, OWNER)
    np.testing.assert_array_equal([one.shift for one in mean.values()], -means[:2])
    assert load_corrections(folder, "gate", 1, 3, D, OWNER) == {} == load_corrections(None, "residual", 1, 3, D)
    with pytest.raises(UsageError, match="looks 1 to 2 layers ahead, not 3: run scripts/train_predictors.py with"):
        load_corrections(folder, "residual", 3, 3, D, OWNER)
    with pytest.raises(ValueError, match="kind must be one of"):
        load_corrections(folder, "count", 1, 3, D, OWNER)


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"fingerprint": "cd" * 32}, "was made for the model abababababab, this one is cdcdcdcdcdcd"),
        ({"layers": 4}, "3 layers with experts, not 4"),
        ({"hidden": 16}, "8 hidden, not 16"),
    ],
)
def test_another_models_folder(folder, wanted, named):
    with pytest.raises(MismatchError, match=named) as caught:
        read_routing(folder, **{"fingerprint": OWNER, **SIZES, **wanted})
    assert caught.value.exit_code == 5 and "\n" not in str(caught.value)


def test_predictors_of_neurons_are_refused(tmp_path):
    neurons = Manifest(fingerprint=OWNER, layers=1, hidden=D, ffn=4, ranks=(2,), dtype="float32", source="a test")
    arrays = [tuple(np.zeros(shape, np.float32) for shape in neurons.shapes(0))]
    with pytest.raises(MismatchError, match="holds predictors of neurons, and this model has experts"):
        read_routing(write_predictors(tmp_path / "n", neurons, arrays), fingerprint=OWNER, **SIZES)
    with pytest.raises(StorageError, match="no predictor folder"):
        read_routing_manifest(tmp_path / "missing")


def edit(folder, **changes):
    record = json.loads((folder / "manifest.json").read_text()) | changes
    record = {key: value for key, value in record.items() if value != "dropped"}
    (folder / "manifest.json").write_text(json.dumps(record))


ENTRIES = [{"lead": 1, "asked": 0, "kind": "gate", "rank": 0, "metrics": {}}]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "has version 2"),
        ({"kind": "birds"}, "kind must not be 'birds'"),
        ({"hidden": 0}, "hidden must be an integer from 1"),
        ({"experts": "6"}, "experts must be an integer"),
        ({"top_k": 7}, "top_k must not be 7"),
        ({"layers": [2, 0, 3]}, "layers must be ascending integers"),
        ({"layers": [0, 2]}, "lead must not be 2"),
        ({"fingerprint": 5}, "fingerprint must not be 5"),
        ({"fingerprint": "dropped"}, "fingerprint must not be None"),
        ({"dtype": "float8"}, "dtype must not be"),
        ({"tokens": -1}, "tokens must not be -1"),
        ({"entries": ENTRIES}, "entries must be one a lead and layer, 3"),
        ({"entries": [{"lead": 1}]}, "an entry has lead, expected"),
        ({"entries": [ENTRIES[0] | {"kind": "corrected"}]}, "kind 'corrected' and rank 0"),
        ({"entries": [ENTRIES[0] | {"metrics": {"gate": {"recall": "x", "top1": {}}}}]}, "metrics must not be"),
        ({"files": {}}, "files must be an object"),
    ],
)
def test_a_damaged_manifest(folder, changes, named):
    edit(folder, **changes)
    with pytest.raises(ModelError, match=named) as caught:
        read_routing(folder, fingerprint=OWNER, **SIZES)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_damaged_weights(folder):
    path = max((path for path in (folder / "weights").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match="is damaged: .*: train it again"):
        read_routing(folder, fingerprint=OWNER, **SIZES)


def test_nothing_wrong_is_written(tmp_path):
    tree = tree_of()
    tree["means"]["hidden"][0, 0] = np.nan
    with pytest.raises(NumericalError, match="hidden of means .* holds NaN"):
        write_routing(tmp_path / "p", MANIFEST, tree)
    for changes, named in (({"tokens": -1}, "tokens must not be"), ({"dtype": "float32"}, "down of 001-000 must be")):
        with pytest.raises(ValueError, match=named):
            write_routing(tmp_path / "p", replace(MANIFEST, **changes), tree_of())
    with pytest.raises(ValueError, match="weights of 001-000, expected 001-000, means"):
        write_routing(tmp_path / "p", MANIFEST, {"001-000": tree_of()["001-000"]})
    assert not list(tmp_path.iterdir())
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "mine").touch()
    with pytest.raises(UsageError, match="exists and is not"):
        write_routing(tmp_path / "p", MANIFEST, tree_of())
