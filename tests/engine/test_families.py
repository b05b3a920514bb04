"""Every dense family through the engine, at every budget, against the float64 forward that reads the files."""

import contextlib
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dynajax import Engine
from dynajax.checkpoint import Checkpoint, read_spec
from dynajax.checkpoint.mapping import declared_parameters
from dynajax.config import EngineConfig
from dynajax.engine import plan_for
from dynajax.testing.families import FAMILIES, write
from dynajax.testing.oracle import family_logits
from tests.shared_programs import shared_programs

CTX = 208
POSITIONS = (0, 1, 20, 200)
TOKENS = np.random.default_rng(7).integers(0, 96, max(POSITIONS) + 1)
SEED, LAYERS = 3, 2
SIZES = {"num_hidden_layers": LAYERS}
FFN_NAMES = {"opt": "ffn_dim", "falcon": "ffn_hidden_size"}  # 320: half of the units is more than any temporary
SHARES = {"none": None, "half": 50, "everything": 100}  # of the units, on the device
MODES = ("llama", "opt", "bamboo", "falcon-40b")  # one of each residual layout, and dReLU
WIDELY = ("llama", "opt", "bamboo")  # the others differ in what is not placed
BUDGETS = [
    pytest.param(family, share, marks=[] if share == "half" or family in WIDELY else [pytest.mark.slow])
    for family in FAMILIES
    for share in SHARES
]
HOST_MODES = [
    pytest.param(family, mode, marks=[] if mode == "ffi" or family == "opt" else [pytest.mark.slow])
    for family in MODES
    for mode in ("threads", "callback", "ffi")
]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """What the programs compute counts here, not their speed."""
    with shared_programs({"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}):
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family) -> where its model lies, written once."""
    root = tmp_path_factory.mktemp("families")

    def folder(family: str, seed: int = SEED) -> Path:
        path = root / f"{family}-{seed}"
        if not path.exists():
            write(path, family, seed=seed, **SIZES, **{FFN_NAMES.get(family.split("-")[0], "intermediate_size"): 320})
        return path

    return folder


@pytest.fixture(scope="module")
def expected_of(folder_of):
    """expected_of(family) -> the oracle's logits [T, V], computed once."""
    done = {}

    def expected(family: str, seed: int = SEED) -> np.ndarray:
        if (family, seed) not in done:
            done[family, seed] = family_logits(folder_of(family, seed), TOKENS)
        return done[family, seed]

    return expected


@contextlib.contextmanager
def opened(folder: Path, share: str, **settings):
    """The open engine's parts, with that share of the units on the device."""
    settings = {"ctx": CTX, **settings}
    if SHARES[share] is None:
        settings["policy"] = "none"
    else:
        whole = plan_for(str(folder), EngineConfig(**{"host_mode": "ffi", **settings}))
        settings["vram_budget"] = whole.smallest_budget_bytes + whole.pool * SHARES[share] // 100
    with Engine.from_pretrained(str(folder), **settings) as engine:
        parts = engine._parts
        resident = parts.prepared.memory.units_resident / parts.prepared.memory.units_total
        assert {"none": resident == 0, "half": 0.3 < resident < 0.6, "everything": resident == 1}[share]
        yield parts


def logits_at(parts, position: int, row: int = 0, rows: int = 1) -> np.ndarray:
    """A prompt up to a position, and a step there."""
    ids, at = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    ids[row], at[row] = TOKENS[position], position
    if position:
        parts.stepper.prefill(row, TOKENS[:position].tolist(), lambda done, total: None)
    return parts.stepper.step(ids, at, np.arange(rows) == row)[row]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def sparsities(folder: Path) -> list[str]:
    return ["dense", "exact"] if read_spec(folder).activation.has_zeros else ["dense"]


@pytest.mark.parametrize(("family", "share"), BUDGETS)
def test_logits_of_every_family_at_every_budget(folder_of, expected_of, family, share):
    for sparsity in sparsities(folder_of(family)):
        with opened(folder_of(family), share, sparsity=sparsity) as parts:
            assert parts.prepared.host_mode == ("resident" if share == "everything" else "ffi")
            for position in POSITIONS:
                assert_close(logits_at(parts, position), expected_of(family)[position])


@pytest.mark.parametrize(("family", "mode"), HOST_MODES)
def test_every_host_mode(folder_of, expected_of, family, mode):
    for sparsity in ("exact",) if mode == "callback" else ("dense", "exact"):  # whose programs are not shared
        with opened(folder_of(family), "half", host_mode=mode, sparsity=sparsity) as parts:
            assert parts.prepared.host_mode == mode
            for position in POSITIONS:
                assert_close(logits_at(parts, position), expected_of(family)[position])


@pytest.mark.parametrize("family", ["opt", "falcon-40b"])
@pytest.mark.parametrize("mode", ["threads", "auto"])
def test_rows_of_a_batch_at_positions_of_their_own(folder_of, expected_of, family, mode):
    with opened(folder_of(family), "half", batch=3, host_mode=mode) as parts:
        at = np.array([200, 1, 20], np.int32)
        for row, position in enumerate(at):
            parts.stepper.prefill(row, TOKENS[:position].tolist(), lambda done, total: None)
        logits = parts.stepper.step(TOKENS[at].astype(np.int32), at, np.ones(3, np.bool_))
        for row, position in enumerate(at):
            assert_close(logits[row], expected_of(family)[position])
        logits = parts.stepper.step(TOKENS[at].astype(np.int32), at, np.array([True, False, True]))
        assert_close(logits[[0, 2]], expected_of(family)[at[[0, 2]]])


@pytest.mark.parametrize("family", MODES)
def test_the_comparison_notices_other_weights_and_other_positions(folder_of, expected_of, family):
    with opened(folder_of(family), "half") as parts:
        found = logits_at(parts, 20)
    assert_close(found, expected_of(family)[20])
    for wrong in (expected_of(family, SEED + 1)[20], expected_of(family)[19], expected_of(family)[21]):
        with pytest.raises(AssertionError):
            assert_close(found, wrong)


def test_padding_behind_the_last_learned_position(tmp_path):
    """205 of them, and a cache of 208: a chunk's padding at its very end has none."""
    folder = write(tmp_path, "opt", seed=SEED, **SIZES, max_position_embeddings=205)
    expected = family_logits(folder, TOKENS)
    with Engine.from_pretrained(str(folder)) as engine:
        assert (engine._parts.prepared.ctx, engine._parts.prepared.programs.shapes.ctx) == (205, 208)
        ids = [*TOKENS.tolist(), 5, 6, 7]
        engine.generate(ids, max_new_tokens=1)  # a padded chunk at the very end
        assert_close(logits_at(engine._parts, 200), expected[200])


# --- books ----------------------------------------------------------------------------------------------


def nbytes(arrays) -> int:
    """Of distinct arrays: a tied head is the embedding."""
    return sum(array.nbytes for array in {id(array): array for array in jax.tree.leaves(arrays)}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_bytes_add_up(folder_of, family):
    folder = folder_of(family)
    checkpoint = Checkpoint.open(folder)
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if "predictor" not in name}
    assert checkpoint.parameters == declared_parameters(checkpoint.spec) == sum(t.size for t in stored.values())
    with opened(folder, "half") as parts:
        weights, memory, spec = parts.stepper.weights, parts.prepared.memory, parts.prepared.spec
        assert [sum(leaf.size for leaf in layer) for layer in weights.layers] == [spec.block_parameters] * LAYERS
        assert memory.dense == nbytes((weights.layers, weights.norm, weights.table, weights.tables))
        assert memory.pool == parts.pool.nbytes
        nothing = {"staging": 0, "statistics": 0}
        assert memory.host == {"units": parts.store.nbytes, "embed": nbytes(weights.host_tables)} | nothing
        assert spec.tied == bool(weights.tables) != bool(weights.host_tables)
