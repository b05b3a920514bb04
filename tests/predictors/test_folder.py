"""The predictor folder: round trip, other models' folders, damage, interruption."""

import json
import logging
import os
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from dynajax.errors import MismatchError, ModelError, NumericalError, StorageError, UsageError
from predictors.folder import Manifest, read_entries, read_manifest, read_predictors, write_predictors
from predictors.forms import Entry, Form, Shape
from predictors.scoring import scores

OWNER = "ab" * 32
MANIFEST = Manifest(
    fingerprint=OWNER, layers=3, hidden=8, ffn=12, ranks=(4, 2, 5), dtype="float32", source="a test", lead=2,
    threshold=0.25, tokens=1000, metrics={"recall": [0.9, 0.8, 0.7]},
)  # fmt: skip
SIZES = {"layers": 3, "hidden": 8, "ffn": 12}


def weights_of(manifest=MANIFEST):
    kind = ml_dtypes.bfloat16 if manifest.dtype == "bfloat16" else manifest.dtype
    rng = np.random.default_rng(0)
    return [tuple(rng.standard_normal(s).astype(kind) for s in manifest.shapes(i)) for i in range(manifest.layers)]


@pytest.fixture
def folder(tmp_path):
    return write_predictors(tmp_path / "p", MANIFEST, weights_of())


def edit(folder, **changes):
    record = json.loads((folder / "manifest.json").read_text()) | changes
    record = {key: value for key, value in record.items() if value != "dropped"}
    (folder / "manifest.json").write_text(json.dumps(record))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip(tmp_path, dtype):
    manifest = replace(MANIFEST, dtype=dtype)
    folder = write_predictors(tmp_path / "p", manifest, weights_of(manifest))
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    found, weights = read_predictors(folder, fingerprint=OWNER, **SIZES)
    assert found == manifest == read_manifest(folder)
    for ours, theirs in zip(weights, weights_of(manifest), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert isinstance(a, np.ndarray) and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_unknowns_are_null(tmp_path, caplog):
    unknown = replace(MANIFEST, fingerprint=None, threshold=None, tokens=None, metrics=None)
    folder = write_predictors(tmp_path / "p", unknown, weights_of())
    with caplog.at_level(logging.INFO, "predictors"):
        assert read_predictors(folder, fingerprint=OWNER, **SIZES)[0] == unknown
    assert ["only the sizes were compared" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"fingerprint": "cd" * 32}, "was made for the model abababababab, this one is cdcdcdcdcdcd"),
        ({"layers": 4}, "3 layers, not 4"),
        ({"hidden": 16, "ffn": 24}, "8 hidden, not 16, 12 ffn, not 24"),
    ],
)
def test_another_models_folder(folder, wanted, named):
    with pytest.raises(MismatchError, match=named) as caught:
        read_predictors(folder, **{"fingerprint": OWNER, **SIZES, **wanted})
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "has version 2"),
        ({"version": "dropped"}, "has version None"),
        ({"kind": "gate"}, "kind must not be 'gate'"),
        ({"ranks": [4, 2]}, "ranks must be a list of 3"),
        ({"ranks": [4, 2, 0]}, "ranks must be integers from 1"),
        ({"ranks": [4, 2, 2**40]}, "ranks must be integers from 1"),
        ({"layers": True}, "layers must be an integer"),
        ({"dtype": ["float32"]}, "dtype must not be"),
        ({"dtype": "int8"}, "dtype must not be"),
        ({"lead": 3}, "lead must not be 3"),
        ({"threshold": "high"}, "threshold must not be"),
        ({"threshold": float("nan")}, "threshold must not be nan"),
        ({"tokens": -1}, "tokens must not be"),
        ({"metrics": []}, "metrics must not be"),
        ({"fingerprint": 5}, "fingerprint must not be"),
        ({"tokens": "dropped"}, "tokens must not be None"),
        ({"files": "dropped"}, "files must be an object, got None"),
        ({"files": []}, "files must be an object"),
        ({"files": {"../x": "0"}}, "is damaged: ../x, "),
        ({"ranks": [4, 2, 6]}, "does not hold what manifest.json says"),
        ({"dtype": "float16"}, "does not hold what manifest.json says"),
    ],
)
def test_manifests_that_are_wrong(folder, changes, named):
    edit(folder, **changes)
    with pytest.raises(ModelError) as caught:
        read_predictors(folder, fingerprint=OWNER, **SIZES)
    assert named in str(caught.value) and str(caught.value).isprintable()


def test_damaged_weights(folder, tmp_path):
    with pytest.raises(StorageError, match="no predictor folder"):
        read_predictors(tmp_path / "absent", fingerprint=OWNER, **SIZES)
    paths = [path for path in sorted((folder / "weights").rglob("*")) if path.is_file()]
    for path in paths:
        broken = shutil.copytree(folder, tmp_path / "broken")
        inside = broken / path.relative_to(folder)
        inside.write_bytes(inside.read_bytes()[:-1])
        with pytest.raises(ModelError, match=f"is damaged: {path.relative_to(folder / 'weights')}: convert or train"):
            read_predictors(broken, fingerprint=OWNER, **SIZES)
        inside.unlink()
        inside.symlink_to(path)
        with pytest.raises(ModelError, match="is damaged"):
            read_predictors(broken, fingerprint=OWNER, **SIZES)
        shutil.rmtree(broken)
    (folder / "weights" / "more").write_text("x")
    with pytest.raises(ModelError, match="is damaged: more: "):
        read_predictors(folder, fingerprint=OWNER, **SIZES)
    shutil.rmtree(folder / "weights")
    with pytest.raises(ModelError, match="is damaged"):
        read_predictors(folder, fingerprint=OWNER, **SIZES)
    (folder / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"manifest\.json is missing"):
        read_manifest(folder)


def test_only_sound_predictors_are_written(tmp_path):
    weights = weights_of()
    for manifest, wrong in (
        (MANIFEST, weights[:2]),
        (MANIFEST, [(b, a) for a, b in weights]),
        (replace(MANIFEST, dtype="float16"), weights),
        (replace(MANIFEST, lead=-1), weights),
        (replace(MANIFEST, ranks=(4, 2)), weights),
    ):
        with pytest.raises(ValueError):
            write_predictors(tmp_path / "p", manifest, wrong)
    weights[1][0][0, 0] = np.inf
    with pytest.raises(NumericalError, match="fc1 of layer 1"):
        write_predictors(tmp_path / "p", MANIFEST, weights)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device: make room"):
        write_predictors(tmp_path / "p", MANIFEST, weights_of())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    write_predictors(tmp_path / "p", MANIFEST, weights_of())
    with pytest.raises(UsageError, match="is not empty"):
        write_predictors(tmp_path / "p", MANIFEST, weights_of())


# --- mixed ------------------------------------------------------------------------------------------------------------

MIXED = replace(
    MANIFEST,
    kind="mixed",
    ranks=(),
    dtype="float16",
    threshold=None,
    entries=(
        Entry(layer=0, lead=0, form=Form(kind="gate", bits=4), slope=2.0, intercept=-1.5, metrics={"density": 0.1}),
        Entry(layer=1, lead=0, form=Form(kind="gate", bits=1, rank=3), slope=2.0),
        Entry(layer=1, lead=1, form=Form(kind="gate", bits=1, rank=3, reads="stream")),
        Entry(layer=2, lead=2, form=Form(kind="mlp", rank=4)),
    ),
)


def mixed_weights():
    rng = np.random.default_rng(0)
    return {
        key: {name: rng.standard_normal(shape).astype(kind) for name, (shape, kind) in part.items()}
        for key, part in MIXED.arrays().items()
    }


def test_mixed_round_trip(tmp_path):
    folder, weights = write_predictors(tmp_path / "p", MIXED, mixed_weights()), mixed_weights()
    found, entries = read_entries(folder, fingerprint=OWNER, **SIZES)
    assert found == MIXED == read_manifest(folder)
    assert tuple(entry for entry, _ in entries) == MIXED.entries
    assert [sorted(arrays) for _, arrays in entries] == [
        ["histogram"],
        ["histogram", "narrow", "shift", "wide"],
        ["histogram", "narrow", "shift", "wide"],
        ["fc1", "fc2", "histogram"],
    ]
    for entry, arrays in entries:
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, weights[entry.key][name])
            assert array.dtype == (np.float16 if name in ("fc1", "fc2", "narrow", "wide") else np.float32)
    with pytest.raises(MismatchError, match="several forms"):
        read_predictors(folder, fingerprint=OWNER, **SIZES)
    with pytest.raises(MismatchError, match="4 layers|3 layers, not 4"):
        read_entries(folder, fingerprint=OWNER, **{**SIZES, "layers": 4})
    weights["001-001"]["wide"][0, 0] = np.nan
    with pytest.raises(NumericalError, match=r"wide of layer 1 \(lead 1\)"):
        write_predictors(tmp_path / "q", MIXED, weights)


def test_converted_folders_become_entries_that_compute(folder):
    _, entries = read_entries(folder, fingerprint=OWNER, **SIZES)
    _, pairs = read_predictors(folder, fingerprint=OWNER, **SIZES)
    shape = Shape(layers=3, hidden=8, ffn=12)
    assert [(entry.layer, entry.lead, entry.form.rank) for entry, _ in entries] == [(2, 2, 5)]  # its lead is 2
    entry, arrays = entries[0]
    assert entry.form.reads == "stream" and entry.intercept == -0.25
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    expected = np.maximum(x.astype(np.float64) @ pairs[2][0].T, 0) @ pairs[2][1].T
    np.testing.assert_allclose(scores(dict(arrays), x, shape, entry.form), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("entries",), [], "entries must be a list, empty unless kind is mixed"),
        (("entries",), "dropped", "entries must be a list"),
        (("ranks",), [1, 1, 1], "ranks must be a list of 0"),
        (("entries", 0), {}, "an entry must have layer"),
        (("entries", 0, "form"), {"kind": "gate"}, "a form must have kind"),
        (("entries", 0, "form", "bits"), 3, "bits must be 1, 2, 4 or 8, got 3"),
        (("entries", 0, "form", "bits"), [], "must be integers"),
        (("entries", 0, "form", "kind"), [], "kind must be gate or mlp"),
        (("entries", 0, "form", "weighted"), 1, "weighted must be true or false"),
        (("entries", 0, "layer"), 3, "layer must be from its lead to 2, got 3"),
        (("entries", 0, "layer"), 1, "entries must be one a layer and lead"),
        (("entries", 0, "slope"), float("inf"), "slope and intercept must be finite"),
        (("entries", 3, "form", "rank"), 5, "does not hold what manifest.json says"),
    ],
)
def test_entries_that_are_wrong(tmp_path, path, value, named):
    folder = write_predictors(tmp_path / "p", MIXED, mixed_weights())
    record = json.loads((folder / "manifest.json").read_text())
    inside = record
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    edit(folder, **{path[0]: record[path[0]]})
    with pytest.raises(ModelError) as caught:
        read_entries(folder, fingerprint=OWNER, **SIZES)
    assert named in str(caught.value) and str(caught.value).isprintable()
