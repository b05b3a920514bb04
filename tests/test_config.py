"""Records that check themselves: what is accepted, and refusals that name the field."""

from dataclasses import FrozenInstanceError, replace

import pytest

from dynajax.config import Activation, EngineConfig, ModelSpec, PolicyConfig, Rope, parse_budget
from dynajax.errors import UsageError
from dynajax.testing import TINY


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        (" Auto ", None),
        ("8GiB", 8 * 2**30),
        ("600MiB", 600 * 2**20),
        ("900KiB", 900 * 2**10),
        ("1TiB", 2**40),
        ("12345B", 12345),
        (f"{2**53 - 1}B", 2**53 - 1),
        ("0.5 gib", 2**29),
        ("1e3MiB", 1000 * 2**20),
        ("2GB", 2 * 10**9),
        ("3kb", 3000),
        ("0.85", 0.85),
        ("1", 1.0),
        (1, 1),
        (2**40, 2**40),
        (0.85, 0.85),
        (1.0, 1.0),
    ],
)
def test_budgets(text, expected):
    found = parse_budget(text)
    assert found == expected and type(found) is type(expected)  # an int is bytes, a float a share


@pytest.mark.parametrize(
    "text",
    [
        "8",  # bytes or GiB? nobody knows
        "1.01",
        "0",
        "0GiB",
        "-1GiB",
        "-0.5",
        "nan",
        "nanGiB",
        "inf",
        "infGiB",
        "1e400GiB",
        "",
        "GiB",
        "8G",
        "8Gi",
        "8XiB",
        "8GiB4",
        "8GiB!",
        "0x8GiB",
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        float("nan"),
        float("inf"),
    ],
)
def test_refused_budgets(text):
    with pytest.raises(UsageError) as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["0.5B", "1e-9KiB", True])
def test_budgets_that_are_no_byte(text):
    with pytest.raises(UsageError):
        parse_budget(text)


def test_defaults_of_the_engine_settings():
    config = EngineConfig()
    assert (config.vram_budget, config.ctx, config.threads) == ("auto", None, None)
    assert replace(config, ctx=1, batch=1, threads=1).ctx == 1
    with pytest.raises(FrozenInstanceError):
        config.ctx = 2


CHOICES = {
    "sparsity": ("auto", "dense", "exact", "predicted"),
    "policy": (
        *("auto", "dynamic", "macro+micro", "macro", "micro", "static", "lru", "none"),
        *("scan", "dali", "hybrimoe", "hybrimoe-shipped", "bandwidth-split", "fiddler", "lfu", "layer-split"),
    ),
    "cache": ("auto", "decayed", "dali", "lru", "lfu", "ema", "static"),
    "prefetch": ("auto", "corrected", "residual", "residual-mean", "gate", "count", "none"),
    "staging": ("auto", "pinned_host", "registered", "plain"),
    "dtype": ("auto", "float32", "float16", "bfloat16", "int8", "int4"),
    "host_dtype": ("auto", "float32", "float16", "bfloat16", "int8", "int4"),
    "host_dense": ("own", "onednn", "blas"),
    "host_mode": ("auto", "threads", "callback", "ffi"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    for value in CHOICES[name]:
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in ("", "Auto", "float64", None, 1, ["auto"]):
        with pytest.raises(UsageError) as caught:
            EngineConfig(**{name: value})
        assert f"--{name.replace('_', '-')} must be one of {', '.join(CHOICES[name])}, got {value!r}" == str(
            caught.value
        )


@pytest.mark.parametrize("value", ["auto", "none", "mlp", "gate", "predictors/", "Auto"])
def test_a_predictor_is_a_name_or_a_folder(value):
    assert EngineConfig(predictor=value).predictor == value


@pytest.mark.parametrize("value", ["", None, 3])
def test_no_predictor_is_called_none(value):
    with pytest.raises(UsageError, match="--predictor must be auto, mlp, gate, none or a folder, got"):
        EngineConfig(predictor=value)


@pytest.mark.parametrize("knobs", [{"lam": 2, "lead": 1}, ["lam=2", "window_units=none"], ("lam=1", "lam=2")])
def test_constants_of_the_policy_as_a_mapping_or_as_text(knobs):
    assert EngineConfig(set=knobs).knobs == PolicyConfig(lam=2)


@pytest.mark.parametrize("knobs", [{"lambda": 2}, ["lambda=2"], {"lam": -1}, ["lam=-1"], ["lam"]])
def test_wrong_constants_are_refused_at_once(knobs):
    with pytest.raises(UsageError, match="lam"):
        EngineConfig(set=knobs)


def test_promises_that_always_hold_are_accepted():
    assert (EngineConfig().deterministic, EngineConfig().offline) == (False, False)
    assert EngineConfig(deterministic=True, offline=True).offline


@pytest.mark.parametrize("name", ["ctx", "batch", "threads"])
def test_counts(name):
    assert getattr(EngineConfig(**{name: 7}), name) == 7
    for value in (0, -1, -(2**70)):
        with pytest.raises(UsageError, match=f"--{name} must be an integer >= 1, got {value}"):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("name", ["ctx", "batch", "threads"])
@pytest.mark.parametrize("value", [1.5, "5", True])
def test_counts_are_integers(name, value):
    with pytest.raises(UsageError, match=name):
        EngineConfig(**{name: value})


def test_unknown_settings_fail():
    with pytest.raises(TypeError, match="budget"):
        EngineConfig(budget="8GiB")
    with pytest.raises(TypeError):
        EngineConfig("8GiB")


COUNTS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_positions")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", True, None])
def test_a_model_of_impossible_size(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got {value!r}$"):
        replace(TINY, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"heads": 4, "kv_heads": 8}, "heads must be a multiple of kv_heads, got 4 and 8"),
        ({"head_dim": 7}, "head_dim must be even for rotary positions, got 7"),
        ({"norm_eps": 0.0}, "norm_eps must be > 0, got 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be > 0, got nan"),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"activation": Activation(kind="drelu"), "gated": False}, "drelu needs a gate"),
        ({"shared_norm": True}, "shared_norm needs parallel"),
    ],
)
def test_an_inconsistent_model(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"theta": 0.0}, "rope theta and factor must be > 0, got 0.0 and 1.0"),
        ({"theta": float("nan")}, "rope theta and factor"),
        ({"kind": "linear", "factor": -2.0}, "rope theta and factor must be > 0, got 10000.0 and -2.0"),
        ({"kind": "llama3", "factor": 8.0}, "llama3 needs original_positions >= 1, got 0"),
        ({"kind": "yarn", "factor": 8.0}, "yarn needs original_positions >= 1, got 0"),
    ],
)
def test_impossible_rotary_positions(values, message):
    with pytest.raises(ValueError, match=message):
        Rope(**values)


def test_unusual_models_that_are_fine():
    smallest = dict.fromkeys(COUNTS, 1) | {"head_dim": 2}
    assert ModelSpec(**smallest).ffn_parts == 3
    assert replace(TINY, heads=3, kv_heads=1, head_dim=64).hidden == TINY.hidden  # heads x head_dim != hidden
    assert replace(TINY, head_dim=7, rope=None).rope is None  # only pairs are rotated


def test_the_shape_of_a_unit():
    """A bias takes a column for itself, and 31 of padding keep the next row on a cache line of its own."""
    assert (TINY.ffn_parts, TINY.unit_width) == (3, 32)
    biased = replace(TINY, gated=False, ffn_bias=True)
    assert (biased.ffn_parts, biased.unit_width) == (2, 64)


def test_parameters_of_a_block_by_hand():
    spec = replace(TINY, hidden=32, heads=4, kv_heads=2, head_dim=8)
    q, kv = 32 * 32, 32 * 16
    plain = 2 * q + 2 * kv + 2 * 32
    assert spec.block_parameters == plain
    assert replace(spec, norm="layer").block_parameters == plain + 2 * 32
    assert replace(spec, norm="layer", parallel=True, shared_norm=True).block_parameters == plain
    assert replace(spec, qkv_bias=True).block_parameters == plain + 32 + 16 + 16
    assert replace(spec, o_bias=True).block_parameters == plain + 32
    assert replace(spec, ffn_bias=True).block_parameters == plain + 32  # down's; the others travel with their units
    assert replace(spec, qk_norm=True).block_parameters == plain + 8 + 8
    assert (spec.norm_parameters, replace(spec, norm="layer").norm_parameters) == (32, 64)
    assert (spec.position_parameters, replace(spec, rope=None).position_parameters) == (0, 512 * 32)


def test_only_silu_has_no_zeros():
    kinds = ("relu", "fatrelu", "silu", "drelu")
    assert [Activation(kind=kind).has_zeros for kind in kinds] == [True, True, False, True]
