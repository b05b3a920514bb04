"""Routings that a text hardly gives: everybody to one expert, experts that nobody wants, ties; memory full of NaN; runs
that must be alike bit for bit; what a failed move leaves behind."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynajax import Engine
from dynajax.errors import EngineError, StorageError, UsageError
from dynajax.pool import DevicePool
from dynajax.programs import MAX_PROGRAMS
from dynajax.testing import make_moe
from dynajax.testing.oracle import family_logits
from dynajax.transfer import UnitTransfer
from tests.engine.mixture.zoo import CTX, TOKENS, assert_close, folder_unit_bytes, logits_at, opened


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model whose routers say the same of every expert: of equals the first win, for every token."""
    folder = make_moe(tmp_path_factory.mktemp("tied") / "model", "qwen3_moe", seed=5)
    tensors = load_file(folder / "model.safetensors")
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers
    save_file(tensors | {name: np.zeros_like(tensors[name]) for name in routers}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("share", "policy"), [(0.0, "static"), (0.5, "scan"), (0.5, "lru"), (0.5, "static"), (1.0, "auto")]
)
def test_ties_send_everybody_to_the_first_experts(tied, share, policy):
    expected = family_logits(tied, TOKENS)
    with opened(tied, share, policy=policy, batch=2) as parts:
        for position in (0, 64, 130):
            assert_close(logits_at(parts, position, row=1), expected[position])


@pytest.fixture
def dirty_memory(monkeypatch):
    """Pools come as a GPU might give them."""

    def allocate(self):
        self._parts = [tuple(jnp.full(shape, jnp.nan, dtype) for _ in range(n)) for shape, dtype, n in self._shapes]

    monkeypatch.setattr(DevicePool, "_allocate", allocate)


@pytest.mark.parametrize("policy", ["static", "scan", "lru"])
def test_nothing_is_read_before_it_was_filled(zoo, dirty_memory, policy):
    with opened(zoo.folder("mixtral"), 0.4, policy=policy) as parts:
        for position in (0, 64, 130):
            assert_close(logits_at(parts, position), zoo.logits("mixtral")[position])


def generated(folder, **settings):
    plan = {"ctx": CTX, "policy": "scan", "deterministic": True, "vram_budget": "auto"} | settings
    with Engine.from_pretrained(str(folder), **plan) as engine:
        result = engine.generate(TOKENS[:20].tolist(), max_new_tokens=24, temperature=0, seed=0)
        return result, engine.stats()["layers"]


def budget_of(folder, share):
    with opened(folder, share, policy="scan") as parts:
        return parts.prepared.memory.budget_bytes


def test_two_deterministic_runs_are_alike(zoo):
    folder = zoo.folder("qwen3_moe")
    budget = budget_of(folder, 0.5)
    (one, layers), (two, others) = (generated(folder, vram_budget=budget) for _ in range(2))
    timed = {"host_s"}
    assert one.token_ids == two.token_ids and one.units == two.units and one.units.migrated > 0
    assert [{k: v for k, v in row.items() if k not in timed} for row in layers] == [
        {k: v for k, v in row.items() if k not in timed} for row in others
    ]


def test_a_failed_move_fails_the_step_and_not_the_engine(zoo, monkeypatch):
    folder = zoo.folder("qwen3_moe")
    settings = {"ctx": CTX, "policy": "lru", "vram_budget": budget_of(folder, 0.5)}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        ids = TOKENS[:20].tolist()
        good = engine.generate(ids, max_new_tokens=12, temperature=0)

        bring = UnitTransfer.bring

        def fails(*args):
            if threading.current_thread().name == "dynajax-mover":
                raise StorageError("the disk is on fire")
            return bring(*args)

        with monkeypatch.context() as patch:
            patch.setattr(UnitTransfer, "bring", fails)
            with pytest.raises((StorageError, EngineError), match="on fire"):
                engine.generate(ids, max_new_tokens=12, temperature=0)
        assert engine.generate(ids, max_new_tokens=12, temperature=0).token_ids == good.token_ids


def test_settings_of_neurons_are_refused(zoo):
    folder = str(zoo.folder("mixtral"))
    for settings, words in (
        ({"policy": "dynamic"}, "places neurons"),
        ({"sparsity": "predicted"}, "routing is never altered"),
        ({"sparsity": "exact"}, "needs true zeros"),
        ({"policy": "scan", "host_mode": "ffi"}, "needs --host-mode threads"),
    ):
        with pytest.raises(UsageError, match=words):
            Engine.from_pretrained(folder, **settings)


@pytest.mark.parametrize("policy", ["static", "scan"])
def test_few_programs_whatever_comes(zoo, policy):
    with opened(zoo.folder("qwen2_moe"), 0.5, policy=policy, batch=8) as parts:
        for position in (130, 1, 64, 20, 8):
            logits_at(parts, position)
        assert parts.prepared.programs.count < MAX_PROGRAMS // 2


def test_large_experts_move_in_pieces(zoo, monkeypatch):
    folder = zoo.folder("mixtral")
    monkeypatch.setattr("dynajax.transfer.PIECE_BYTES", folder_unit_bytes(folder) // 7)
    with opened(folder, 0.5, policy="lru") as parts:
        assert parts.mixture.runner.layers.spec.unit_rows > 3
        for position in (1, 64, 130):
            assert_close(logits_at(parts, position), zoo.logits("mixtral")[position])
