"""How every `auto` of sparsity, policy and predictor is resolved, and what is said about it."""

import logging
from dataclasses import replace

import pytest

from dynajax.config import EngineConfig
from dynajax.engine import strategy
from dynajax.engine.prediction import choose
from dynajax.errors import UsageError
from predictors.forms import Form
from tests.engine.cases import SPECS

RELU, SILU = SPECS["relu"], SPECS["silu"]


def resolved(monkeypatch, spec=RELU, platform="cuda", trained=None, folder=None, **config):
    monkeypatch.setattr(strategy, "find_folder", lambda *_: trained)
    monkeypatch.setattr(strategy, "manifest_of", lambda *_: None)
    return strategy.resolve(EngineConfig(**config), spec, folder, None, platform)


@pytest.mark.parametrize(
    ("spec", "platform", "trained", "config", "expected"),
    [
        (RELU, "cuda", None, {}, ("exact", "dynamic", True)),
        (RELU, "cpu", None, {}, ("exact", "static", True)),
        (RELU, "cuda", "folder", {}, ("predicted", "dynamic", True)),
        (RELU, "cpu", "folder", {}, ("predicted", "static", True)),
        (RELU, "cpu", "folder", {"host_mode": "ffi"}, ("exact", "static", True)),
        (SILU, "cuda", None, {}, ("dense", "static", True)),
        (SILU, "cuda", "folder", {}, ("predicted", "dynamic", True)),
        (SILU, "cuda", None, {"sparsity": "predicted"}, ("predicted", "dynamic", True)),
        (RELU, "cuda", None, {"policy": "dynamic"}, ("exact", "dynamic", False)),
        (RELU, "cuda", None, {"deterministic": True}, ("exact", "dynamic", False)),
        (RELU, "cuda", None, {"sparsity": "dense", "policy": "macro"}, ("dense", "macro", False)),
    ],
)
def test_what_auto_means(monkeypatch, spec, platform, trained, config, expected):
    found = resolved(monkeypatch, spec, platform, trained, **config)
    assert (found.sparsity, found.policy, found.guarded) == expected


def test_a_model_wholly_on_the_device_skips_and_moves_nothing(monkeypatch):
    whole = resolved(monkeypatch, trained="folder").resident(RELU, skips=False)
    assert (whole.sparsity, whole.policy, whole.planned, whole.guarded) == ("exact", "static", False, False)
    assert resolved(monkeypatch, sparsity="dense").resident(RELU, skips=False).sparsity == "dense"
    asked = resolved(monkeypatch, trained="folder").resident(RELU, skips=True)
    assert (asked.sparsity, asked.policy, asked.planned, asked.skips) == ("predicted", "static", False, True)


def test_what_guesses_without_training_is_said_once_and_only_where_something_guesses(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        for quiet in ({"platform": "cpu"}, {"predictor": "gate"}, {"policy": "macro"}, {"trained": "folder"}):
            resolved(monkeypatch, **quiet)
        assert not caplog.records
        resolved(monkeypatch)
        resolved(monkeypatch, platform="cpu", sparsity="predicted")
    assert [record.message[:26] for record in caplog.records] == ["no predictors were trained"] * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sparsity": "predicted", "host_mode": "ffi"}, "--sparsity predicted needs --host-mode threads"),
        ({"policy": "lru", "host_mode": "callback"}, "--policy lru needs --host-mode threads"),
        ({"sparsity": "predicted", "predictor": "none"}, "--sparsity predicted needs a predictor"),
        ({"spec": SILU, "policy": "macro"}, "--policy macro has nothing to follow: silu is never zero"),
    ],
)
def test_refusals(monkeypatch, config, words):
    with pytest.raises(UsageError, match=words):
        resolved(monkeypatch, **config)


def chosen(spec=RELU, skips=True, places=True, **knobs):
    return choose(spec, EngineConfig(set=knobs).knobs, None, None, skips=skips, places=places)


def test_untrained_predictors_are_those_that_are_asked_for():
    both = chosen(lead=2)
    layers = range(RELU.layers)
    assert set(both.entries) == {(0, layer) for layer in layers} | {(2, 2)}
    assert both.entries[0, 1].form == Form(kind="gate", bits=4) and both.entries[2, 2].form.bits == 4
    assert [both.skipping(layer) for layer in layers] == [(0, 0), (0, 1), (0, 2)]
    early = chosen(lead=1, skip_lead=1, places=False, skip_bits=2)
    assert [early.skipping(layer) for layer in layers] == [(0, 0), (1, 1), (1, 2)]
    assert {entry.form.bits for entry in early.entries.values()} == {2}
    assert chosen(skips=False, places=False).entries == {} and chosen(skips=False, places=False).kind == "none"
    assert set(chosen(skips=False, lead=1).entries) == {(1, 1), (1, 2), (0, 0)}


def test_the_density_of_what_has_no_zeros_and_of_what_is_told():
    assert chosen().density is None and chosen(SILU).density == 0.5
    assert chosen(density=0.25).density == chosen(SILU, density=0.25).density == 0.25


def test_parallel_layers_look_no_layer_ahead():
    parallel = replace(RELU, parallel=True)
    assert chosen(parallel, lead=2).lead == 0
    assert {lead for lead, _ in chosen(parallel, lead=2).entries} == {0}
