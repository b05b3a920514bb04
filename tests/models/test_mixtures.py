"""Mixtures of experts: the float64 reference, against transformers (slow) and by what defines each; the decoder."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dynajax.checkpoint import Checkpoint
from dynajax.checkpoint.spec import spec_of
from dynajax.config import Rope
from dynajax.models.decoder import LatentAttentionBlock, attention_block
from dynajax.ops.rotary import rotate
from dynajax.ops.routing import route, spread
from dynajax.reference import forward
from dynajax.reference.mixtures import choices, has_experts
from dynajax.testing import load_decoder
from dynajax.testing.families import FAMILIES
from dynajax.testing.mixtures import MIXTURES, make_moe, merge_experts
from dynajax.testing.oracle import family_logits

TOKENS = np.random.default_rng(7).integers(0, 96, 100)
LATE = 90


def made(family, **overrides):
    config = MIXTURES[family].config(**overrides)
    return config, MIXTURES[family].tensors(config, seed=3)


def change(found, expected):
    """The largest difference at LATE and after, as a share of the largest logit there."""
    return np.abs(found[LATE:] - expected[LATE:]).max() / np.abs(expected[LATE:]).max()


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


# --- the decoder --------------------------------------------------------------------------------------------------


CASES = {name: (name, {}) for name in MIXTURES} | {"deepseek-eps": ("deepseek_v2", {"rms_norm_eps": 1e-1})}


@pytest.mark.parametrize("case", CASES)
def test_the_decoder_equals_the_float64_forward(tmp_path, case):
    """Each read from a file of its own kind, with the experts apart or merged."""
    family, changes = CASES[case]
    apart = make_moe(tmp_path / "apart", family, seed=3, **changes)
    merged = make_moe(tmp_path / "merged", family, seed=3, merged=True, **changes)
    expected, checkpoint = family_logits(apart, TOKENS), Checkpoint.open(merged)
    assert_same(family_logits(merged, TOKENS), expected)
    decoder = load_decoder(checkpoint)
    logits, routed = nnx.jit(lambda model, tokens: model(tokens))(decoder, jnp.asarray(TOKENS[None, :]))
    assert_close(np.asarray(logits[0]), expected)
    assert [layer.shape for layer in routed] == [(1, 100, checkpoint.spec.units)] * len(checkpoint.spec.unit_layers)
    with pytest.raises(AssertionError):
        assert_close(np.asarray(logits[0]), np.roll(expected, 1, axis=1))


def test_latents_with_a_cache(tmp_path):
    """One latent and one rotated key a token serve all heads; a token at a time gives what all together give."""
    checkpoint = Checkpoint.open(make_moe(tmp_path, "deepseek_v2", seed=3))
    spec, block = checkpoint.spec, load_decoder(checkpoint).attention[1]
    assert isinstance(block, LatentAttentionBlock)

    @nnx.jit
    def step(block, keys, values, x, at):
        positions = at[None, None]
        q, k, v = block.project(x, positions)
        keys, values = (jax.lax.dynamic_update_slice(a, b, (0, at, 0, 0)) for a, b in ((keys, k), (values, v)))
        mixed = block.mix(q, keys, values, positions)
        return keys, values, mixed, block.merge(x, mixed)

    x = jax.random.normal(jax.random.key(0), (1, 12, spec.hidden))
    whole = nnx.jit(lambda block, x, at: block(x, at))(block, x, jnp.arange(12, dtype=jnp.int32)[None, :])
    keys, values = (jnp.zeros((1, 12, spec.cache_heads, width)) for width in (spec.key_width, spec.value_width))
    assert (keys.shape, values.shape) == ((1, 12, 1, 18 + 12), (1, 12, 1, 0))
    for at in range(12):
        keys, values, mixed, out = step(block, keys, values, x[:, at : at + 1], jnp.int32(at))
        assert mixed.shape == (1, 1, spec.heads, 18)
        for one, every in zip(out, whole, strict=True):
            np.testing.assert_allclose(one[:, 0], every[:, at], rtol=1e-5, atol=1e-5)


def test_neighbours_are_rotated_as_pairs_of_halves():
    x, positions = jax.random.normal(jax.random.key(1), (2, 5, 3, 12)), jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1))
    halves = rotate(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), positions, Rope())
    np.testing.assert_array_equal(rotate(x, positions, Rope(interleaved=True)), halves)
    assert np.abs(halves - rotate(x, positions, Rope())).max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "latents need head_dim 26 and as many kv_heads as heads"),
        ({"kv_heads": 2}, "latents need head_dim 26 and as many kv_heads as heads"),
        ({"rope": None}, "attention with latents rotates"),
        ({"window": 64}, "attention with latents rotates"),
        ({"qkv_bias": True}, "attention with latents rotates"),
        ({"latent": {"rotary": 11}}, "rotary must be even, got 11"),
        ({"latent": {"kv_rank": 0}}, "kv_rank must be >= 1, got 0"),
    ],
)
def test_impossible_latents(changes, message):
    spec = spec_of(MIXTURES["deepseek_v2"].config(), "deepseek_v2")
    with pytest.raises(ValueError, match=message):
        replace(spec, **{name: replace(spec.latent, **v) if name == "latent" else v for name, v in changes.items()})


@pytest.mark.parametrize("family", MIXTURES)
def test_parameters_of_a_block_are_those_it_has(family):
    spec = spec_of(MIXTURES[family].config(), family)
    block = nnx.eval_shape(lambda: attention_block(spec, nnx.Rngs(0), jnp.float32))
    state = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    assert spec.block_parameters == sum(leaf.size for leaf in state.values())


def test_a_router_in_float32_stays_that_in_a_bfloat16_model(tmp_path):
    decoder = load_decoder(Checkpoint.open(make_moe(tmp_path, "deepseek_v2")), "bfloat16")
    assert decoder.ffn[1].block.router.dtype == jnp.float32
    assert decoder.ffn[1].block.up.dtype == decoder.ffn[1].up.dtype == jnp.bfloat16


# --- routing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v2-lite", "deepseek_v2"])
def test_routing_with_equal_scores(family, renormalise):
    """Whole numbers as logits: many equals, of which the expert of lower number goes first, and the lower group."""
    config = MIXTURES[family].config()
    if family in ("qwen3_moe", "olmoe"):
        config["norm_topk_prob"] = renormalise
    router = spec_of(config, family).experts.router
    logits = np.random.default_rng(5).integers(-2, 3, (400, router.experts)).astype(np.float64)
    logits[0] = 0  # all of them
    ids, weights = choices(config, logits)
    assert ids[0].tolist() == list(range(router.top_k))
    found, share = route(jnp.asarray(logits, jnp.float32), None, router)
    np.testing.assert_array_equal(found, ids)
    np.testing.assert_allclose(share, weights, rtol=1e-5)
    dense = spread(found, share, router.experts)
    np.testing.assert_allclose(np.take_along_axis(np.asarray(dense), ids, 1), weights, rtol=1e-5)


def test_experts_of_groups_that_are_not_chosen_get_nothing():
    config = MIXTURES["deepseek_v2"].config()  # 4 groups of 2, the best 2 of them, 3 experts
    logits = np.array([[5.0, 0.0, 4.0, 1.0, 3.9, 3.8, -1.0, -2.0]])
    ids, weights = choices(config, logits)
    assert ids.tolist() == [[0, 2, 3]]
    scores = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(weights[0], 2.5 * scores[ids[0]])


# --- what defines a family ----------------------------------------------------------------------------------------


def alike(tensors):
    """The same tensors with every expert of a layer a copy of its first."""
    return {
        name: tensors[first] if (first := first_expert(name)) in tensors else value for name, value in tensors.items()
    }


def first_expert(name):
    at, _, rest = name.partition(".experts.")
    return f"{at}.experts.0.{rest.split('.', 1)[1]}" if "." in rest else name


@pytest.mark.parametrize(("family", "dense"), [("mixtral-window", "mistral"), ("qwen3_moe", "qwen3")])
def test_equal_experts_with_weights_that_sum_up_to_one_are_one_ffn(family, dense):
    config, tensors = made(family)
    tensors = alike(tensors)
    names = {"block_sparse_moe.experts.0.w1": "mlp.gate_proj", "block_sparse_moe.experts.0.w3": "mlp.up_proj"}
    names |= {"block_sparse_moe.experts.0.w2": "mlp.down_proj"}
    names |= {f"mlp.experts.0.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    plain = {}
    for name, value in tensors.items():
        old = next((old for old in names if old in name), None)
        if old is not None:
            plain[name.replace(old, names[old])] = value
        elif ".experts." not in name and ".gate.weight" not in name:
            plain[name] = value
    changed = {"model_type": dense, "architectures": FAMILIES[dense].base["architectures"]}
    assert_same(forward(config, tensors, TOKENS), forward(config | changed, plain, TOKENS))


def test_granite_without_multipliers_is_mixtral():
    """The softmax over the chosen logits is that over all, over the sum of the chosen."""
    neutral = {
        "embedding_multiplier": 1,
        "residual_multiplier": 1,
        "logits_scaling": 1,
        "attention_multiplier": 10**-0.5,
    }
    config, tensors = made("granitemoe", **neutral)
    renamed = {}
    for name, value in merge_experts(tensors).items():
        renamed[name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")] = value
    mixtral = {**config, "model_type": "mixtral", "sliding_window": None}
    assert_same(forward(config, tensors, TOKENS), forward(mixtral, renamed, TOKENS))


def test_a_shared_expert_counts_half_where_its_gate_is_silent():
    """Without what the others add and with twice its own down, it is the FFN of a dense model."""
    config, tensors = made("qwen2_moe", mlp_only_layers=[], intermediate_size=44)
    plain = {name.replace("shared_expert.", ""): value for name, value in tensors.items() if ".experts." not in name}
    silent = {}
    for name, value in tensors.items():
        zero = "shared_expert_gate" in name or (".experts." in name and "down_proj" in name)
        silent[name] = value * (0 if zero else 2 if "shared_expert.down_proj" in name else 1)
    dense = {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert_same(forward(config, silent, TOKENS), forward(dense, plain, TOKENS))
    assert change(forward(config, tensors, TOKENS), forward(dense, plain, TOKENS)) > 1e-2


def test_all_experts_chosen_are_all_experts_weighed():
    """With as many choices as experts, and weights not renormalised, order and ties are of no account."""
    config, tensors = made("olmoe", num_experts_per_tok=8)
    turned = {}
    for name, value in tensors.items():
        at, _, rest = name.partition(".experts.")
        expert, _, part = rest.partition(".")
        turned[f"{at}.experts.{(int(expert) + 3) % 8}.{part}" if rest else name] = value
        if name.endswith("mlp.gate.weight"):
            turned[name] = np.roll(value, 3, axis=0)
    assert_same(forward(config, turned, TOKENS), forward(config, tensors, TOKENS))


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen2_moe", [0, 2]), ("qwen3_moe-sparse", [1]), ("deepseek_v2", [1, 2]), ("mixtral", [0, 1, 2])],
)
def test_which_layers_have_experts(family, layers):
    config = MIXTURES[family].config()
    assert [layer for layer in range(3) if has_experts(config, layer)] == layers
    assert spec_of(config, family).unit_layers == tuple(layers)


# --- every part and setting matters -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in MIXTURES if name not in ("mixtral-window", "qwen3_moe-sparse")])
def test_every_tensor_matters(family):
    config, tensors = made(family)
    tensors, tokens = merge_experts(tensors), TOKENS[:50]
    expected = forward(config, tensors, tokens)
    rng = np.random.default_rng(1)
    for name, value in tensors.items():
        disturbed = value * (1 + 0.3 * rng.standard_normal(value.shape))
        found = forward(config, {**tensors, name: disturbed}, tokens)
        assert np.abs(found - expected).max() > 1e-3 * np.abs(expected).max(), name


SETTINGS = [
    *(("mixtral", {"sliding_window": size}) for size in (63, 64)),
    *(("granitemoe", {f"{name}_multiplier": 0.4}) for name in ("embedding", "residual", "attention")),
    ("granitemoe", {"logits_scaling": 3.0}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"num_experts_per_tok": 2}),
    ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v2", {"topk_group": 3}),
    ("deepseek_v2", {"rms_norm_eps": 1e-1}),
    ("deepseek_v2", {"rope_theta": 500.0}),
    *(
        ("deepseek_v2", {"rope_scaling": {**MIXTURES["deepseek_v2"].base["rope_scaling"], name: value}})
        for name, value in {"mscale": 0.5, "mscale_all_dim": 1.0, "factor": 4, "beta_fast": 2}.items()
    ),
]


@pytest.mark.parametrize(("family", "changed"), SETTINGS, ids=str)
def test_every_special_setting_matters(family, changed):
    config, tensors = made(family)
    assert change(forward({**config, **changed}, tensors, TOKENS), forward(config, tensors, TOKENS)) > 1e-3


@pytest.mark.parametrize("changed", [{"norm_topk_prob": True}, {"n_group": 2}, {"head_dim": 12}], ids=str)
def test_settings_that_must_not_matter(changed):
    config, tensors = made("deepseek_v2-lite")
    assert_same(forward({**config, **changed}, tensors, TOKENS), forward(config, tensors, TOKENS))


def test_a_window_of_qwens_has_no_reference():
    config, tensors = made("qwen3_moe")
    with pytest.raises(ValueError, match="no reference"):
        forward({**config, "use_sliding_window": True}, tensors, TOKENS)


# --- transformers -------------------------------------------------------------------------------------------------

VARIANTS = {
    "qwen3-not-renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen2-without-biases": ("qwen2_moe", {"qkv_bias": False}),
    "qwen2-every-second": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "olmoe-renormalised": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 2}),
    "granite-with-biases": ("granitemoe", {"attention_bias": True, "tie_word_embeddings": False}),
    "deepseek-renormalised": ("deepseek_v2-lite", {"norm_topk_prob": True}),  # it is not
    "deepseek-eps": ("deepseek_v2", {"rms_norm_eps": 1e-1}),  # not that of the latents' norms
    "deepseek-not-stretched": ("deepseek_v2-lite", {"rope_scaling": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("case", {name: (name, {}) for name in MIXTURES} | VARIANTS)
def test_transformers_agrees(tmp_path, case, merged):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, overrides = VARIANTS.get(case, (case, {}))
    folder = make_moe(tmp_path, family, seed=3, merged=merged, **overrides)
    load = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **load)
    assert not any(info.values())
    with torch.no_grad():
        found = model.eval()(torch.tensor(TOKENS[None, :])).logits[0].numpy()
    expected = family_logits(folder, TOKENS)
    assert_near = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
    assert_near(found, expected)
    with pytest.raises(AssertionError):
        assert_near(found, np.roll(expected, 1, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_what_transformers_saves_is_read(tmp_path, family, published):
    """As published, and as it holds the experts in memory, with its own spelling of config.json."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = make_moe(tmp_path / "made", family, seed=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", save_original_format=published)
    made, saved = Checkpoint.open(folder), Checkpoint.open(tmp_path / "saved")
    assert made.spec == saved.spec
    assert any(part == "experts_down" for part, _ in saved.tensors) == (not published or family == "granitemoe")
    assert_same(family_logits(tmp_path / "saved", TOKENS), family_logits(folder, TOKENS))
