"""The oracle of every model family: against transformers (slow), and against what defines each family."""

import json
from functools import partial

import numpy as np
import pytest

from dynajax.reference import forward
from dynajax.testing.families import FAMILIES, write
from dynajax.testing.oracle import family_logits

TOKENS = np.random.default_rng(7).integers(0, 96, 210)
LATE = 200


def made(family, **overrides):
    config = FAMILIES[family].config(**overrides)
    return config, FAMILIES[family].tensors(config, seed=3)


def change(found, expected):
    """The largest difference at LATE, as a share of the largest logit there."""
    return np.abs(found[LATE] - expected[LATE]).max() / np.abs(expected[LATE]).max()


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


# --- every part of every family matters ---------------------------------------------------------------------------


def counts(name, family):
    """Whether a tensor has a say in the logits: a predictor only skips work, and without positions in the keys a
    key bias adds the same to every score of a query."""
    return "predictor" not in name and not (family.startswith("opt") and name.endswith("k_proj.bias"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_matters(family):
    config, tensors = made(family)
    expected = forward(config, tensors, TOKENS)
    assert np.isfinite(expected).all()
    rng = np.random.default_rng(1)
    for name, value in tensors.items():
        disturbed = value * (1 + 0.3 * rng.standard_normal(value.shape))
        found = forward(config, {**tensors, name: disturbed}, TOKENS)
        if counts(name, family):
            assert change(found, expected) > 3e-3, name
        else:
            assert_same(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_order_of_tokens_matters(family):
    config, tensors = made(family)
    swapped = TOKENS.copy()
    swapped[[180, 190]] = swapped[[190, 180]]
    assert swapped[180] != swapped[190]
    assert change(forward(config, tensors, swapped), forward(config, tensors, TOKENS)) > 1e-3


LLAMA3 = FAMILIES["llama-llama3"].base["rope_scaling"]
YARN = FAMILIES["llama-yarn"].base["rope_scaling"]
SETTINGS = [
    ("llama", {"rope_theta": 500.0}),
    ("llama", {"hidden_act": "silu"}),
    ("llama", {"rms_norm_eps": 1e-1}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama-linear", {"rope_scaling": None}),
    ("llama-linear", {"rope_scaling": {"factor": 2.0, "type": "linear"}}),
    *(("llama-llama3", {"rope_scaling": {**LLAMA3, key: 2 * LLAMA3[key]}}) for key in LLAMA3 if key != "rope_type"),
    ("llama-yarn", {"rope_scaling": None}),
    ("llama-yarn", {"rope_scaling": {**YARN, "factor": 2.0}}),
    ("llama-yarn", {"rope_scaling": {**YARN, "original_max_position_embeddings": 512}}),
    ("llama-yarn", {"rope_scaling": {**YARN, "attention_factor": 1.0}}),
    ("llama-yarn", {"rope_scaling": {**YARN, "beta_slow": 4.0}}),
    ("llama-yarn", {"rope_scaling": {**YARN, "beta_fast": 2.0}}),
    ("sparsellama", {"hidden_act_param": 0.02}),
    ("sparsellama", {"hidden_act": "relu"}),
    ("sparselm", {"model_type": "llama"}),
    ("sparselm", {"rope_theta": 10000.0}),
    *((family, {"sliding_window": size}) for family in ("mistral", "bamboo") for size in (None, 63, 65)),
    ("bamboo", {"model_type": "mistral"}),
    ("minicpm", {"scale_emb": 6}),
    ("minicpm", {"scale_depth": 2.0}),
    ("minicpm", {"dim_model_base": 16}),
    ("minicpm", {"hidden_act_param": 0.01}),
    ("minicpm-llama", {"hidden_act_param": 0.01}),
    ("qwen2", {"use_sliding_window": True}),
    ("qwen2", {"rope_theta": 10000.0}),
    ("qwen3", {"model_type": "qwen2"}),  # without the norms of q and k
    ("opt", {"activation_function": "silu"}),
    ("falcon-40b", {"activation": "silu"}),
    ("falcon-40b", {"layer_norm_epsilon": 1e-1}),
    ("falcon-7b", {"rope_theta": 500.0}),
]
UNREAD = [
    ("sparselm", {"hidden_act": "relu"}),  # whatever the file says
    ("qwen2", {"sliding_window": 8}),
    ("falcon-7b", {"num_kv_heads": 1}),
]


def named(value):
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("family", "changed"), SETTINGS, ids=named)
def test_every_special_setting_matters(family, changed):
    config, tensors = made(family)
    assert change(forward({**config, **changed}, tensors, TOKENS), forward(config, tensors, TOKENS)) > 1e-3


@pytest.mark.parametrize(("family", "changed"), UNREAD, ids=named)
def test_settings_that_must_not_matter(family, changed):
    config, tensors = made(family)
    assert_same(forward({**config, **changed}, tensors, TOKENS), forward(config, tensors, TOKENS))


# --- what defines a family ----------------------------------------------------------------------------------------


def as_llama(config, **changed):
    return {**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **changed}


def test_minicpm_with_neutral_scales_is_a_tied_llama():
    config, tensors = made("minicpm", scale_emb=1, scale_depth=3**0.5, dim_model_base=32)
    assert_same(forward(config, tensors, TOKENS), forward(as_llama(config, tie_word_embeddings=True), tensors, TOKENS))


def test_minicpm_scales_fold_into_the_llama_form():
    config, tensors = made("minicpm")
    folded = {name: value.astype(np.float64) for name, value in tensors.items()}
    folded["lm_head.weight"] = folded["model.embed_tokens.weight"] * config["dim_model_base"] / config["hidden_size"]
    folded["model.embed_tokens.weight"] = folded["model.embed_tokens.weight"] * config["scale_emb"]
    for name in folded:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            folded[name] = folded[name] * config["scale_depth"] / 3**0.5
    llama = FAMILIES["minicpm-llama"].config()
    assert_same(forward(llama, folded, TOKENS), forward(config, tensors, TOKENS))


def test_minicpm_is_known_by_its_architecture_too():
    typed, untyped = made("minicpm"), made("minicpm-untyped")
    assert "model_type" not in untyped[0]
    assert_same(forward(*untyped, TOKENS), forward(*typed, TOKENS))


@pytest.mark.parametrize("sign", [1, -1])
def test_bamboo_cuts_off_both_factors(sign):
    """With every up factor positive it is Mistral with a ReLU gate; with every one negative it has no ffn."""
    config, tensors = made("bamboo")
    ups = {f"model.layers.{i}.mlp.up_proj.bias": np.full(80, sign * 100.0) for i in range(3)}
    expected = {**tensors, **ups}
    if sign < 0:
        expected |= {name: 0 * value for name, value in tensors.items() if "down_proj" in name}
    assert_same(
        forward(config, {**tensors, **ups}, TOKENS), forward({**config, "model_type": "mistral"}, expected, TOKENS)
    )


def test_turbosparse_is_bamboo_with_predictors_beside_it():
    config, tensors = made("turbosparse")
    dense = {name: value for name, value in tensors.items() if "predictor" not in name}
    assert tensors["model.layers.2.mlp.predictor.fc1.weight"].shape == (6, 32)
    assert tensors["model.layers.2.mlp.predictor.fc2.weight"].shape == (80, 6)
    assert_same(forward(config, tensors, TOKENS), forward(config, dense, TOKENS))


def test_sparselm_has_a_relu_gate():
    config, tensors = made("sparselm")
    assert config["hidden_act"] == "silu"
    assert_same(forward(config, tensors, TOKENS), forward(as_llama(config, hidden_act="relu"), tensors, TOKENS))


@pytest.mark.parametrize("family", ["sparsellama", "minicpm-llama"])
def test_fatrelu_without_a_threshold_is_relu(family):
    config, tensors = made(family, hidden_act_param=0.0)
    assert_same(forward(config, tensors, TOKENS), forward(as_llama(config, hidden_act="relu"), tensors, TOKENS))


@pytest.mark.parametrize("family", ["mistral", "bamboo"])
def test_the_window_holds_the_query_itself(family):
    config, tensors = made(family, num_hidden_layers=1)
    expected = forward(config, tensors, TOKENS)
    for distance, seen in ((0, True), (63, True), (64, False), (100, False)):
        tokens = TOKENS.copy()
        tokens[LATE - distance] = (tokens[LATE - distance] + 1) % 96
        assert (np.abs(forward(config, tensors, tokens)[LATE] - expected[LATE]).max() > 0) == seen


@pytest.mark.parametrize("family", ["llama-linear", "llama-llama3", "llama-yarn"])
def test_rope_scaling_by_one_is_none(family):
    config, tensors = made(family)
    by_one = {**config, "rope_scaling": {**config["rope_scaling"], "factor": 1.0}}
    expected = forward({**config, "rope_scaling": None}, tensors, TOKENS)
    assert_same(forward(by_one, tensors, TOKENS), expected)
    spelled_anew = {**config["rope_scaling"], "factor": 1.0, "rope_theta": config.get("rope_theta", 10000.0)}
    bare = {**config, "rope_theta": None, "rope_scaling": None}
    assert_same(forward({**bare, "rope_parameters": spelled_anew}, tensors, TOKENS), expected)


def test_qwen3_norms_take_the_size_out_of_queries_and_keys():
    config, tensors = made("qwen3", rms_norm_eps=0.0)
    louder = {name: 5 * value if "q_proj" in name or "k_proj" in name else value for name, value in tensors.items()}
    np.testing.assert_allclose(forward(config, louder, TOKENS), forward(config, tensors, TOKENS), atol=1e-5)


def test_opt_positions_start_in_the_third_row():
    config, tensors = made("opt")
    expected = forward(config, tensors, TOKENS)
    name = "model.decoder.embed_positions.weight"
    for row, first in ((0, 210), (1, 210), (2, 0), (100, 98), (212, 210)):
        moved = tensors[name].copy()
        moved[row] += np.arange(32) % 3
        found = forward(config, {**tensors, name: moved}, TOKENS)
        differs = np.abs(found - expected).max(axis=1) > 1e-9
        assert not differs[:first].any() and differs[first:].any() == (first < 210)


def test_opt_names_without_the_model_prefix():
    config, tensors = made("opt")
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    assert bare.keys() == made("opt-bare")[1].keys()
    assert_same(forward(config, bare, TOKENS), forward(config, tensors, TOKENS))


def test_falcon_40b_with_one_group_and_equal_norms_is_falcon_7b():
    config, tensors = made("falcon-7b")
    new = {**config, "new_decoder_architecture": True, "num_kv_heads": 1}
    doubled = {}
    for name, value in tensors.items():
        for norm in ("ln_attn", "ln_mlp") if "input_layernorm" in name else ("",):
            doubled[name.replace("input_layernorm", norm)] = value
    assert doubled.keys() == FAMILIES["falcon-40b"].tensors(FAMILIES["falcon-40b"].config()).keys()
    assert_same(forward(new, doubled, TOKENS), forward(config, tensors, TOKENS))


# --- the files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_files_hold_what_was_asked_for_in_the_published_spelling(tmp_path, family):
    folder = write(tmp_path / family, family, dtype="bfloat16", seed=3, vocab_size=100)
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert not {"dtype", "rope_parameters"} & config.keys()
    expected = forward(*made(family, vocab_size=100), TOKENS)
    assert expected.shape == (210, 100)
    rounded = change(family_logits(folder, TOKENS), expected)
    assert 0 < rounded < 0.3


def test_what_has_no_reference_is_refused():
    for family, changed in (
        ("llama", {"model_type": "gemma"}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_scaling": {"factor": 2.0, "type": "dynamic"}}),
        ("opt", {"do_layer_norm_before": False}),
        ("falcon-7b", {"alibi": True}),
    ):
        config, tensors = made(family)
        with pytest.raises(ValueError, match="reference"):
            forward({**config, **changed}, tensors, TOKENS)


# --- transformers -------------------------------------------------------------------------------------------------


def transformers_model(folder, transformers, torch):
    """transformers' model of what lies in `folder`. Families it lacks borrow a class that has the same tensor names
    and, for MiniCPM, the same scales; what is left of the difference is put into its layers here."""
    config = json.loads((folder / "config.json").read_text())
    kind = config.pop("model_type", "minicpm")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    act, threshold = config.get("hidden_act"), config.get("hidden_act_param", 0.0)
    load = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    if kind in ("sparsellama", "llama_sparse_relu", "bamboo", "minicpm") or act == "fatrelu":
        name = {"bamboo": "Mistral", "minicpm": "Granite"}.get(kind, "Llama")
        config |= {"hidden_act": "relu"}
        if kind == "minicpm":
            config |= {
                "tie_word_embeddings": True,
                "embedding_multiplier": config["scale_emb"],
                "residual_multiplier": config["scale_depth"] / layers**0.5,
                "attention_multiplier": (hidden // config["num_attention_heads"]) ** -0.5,
                "logits_scaling": hidden / config["dim_model_base"],
            }
        load["config"] = getattr(transformers, f"{name}Config")(**config)
        model, info = getattr(transformers, f"{name}ForCausalLM").from_pretrained(folder, **load)
    else:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **load)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all("predictor" in key for key in info["unexpected_keys"])
    for mlp in (layer.mlp for layer in model.model.layers) if act == "fatrelu" or kind == "bamboo" else ():
        if kind == "bamboo":
            mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.ReLU())
        else:
            mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
    return model.eval()


AS_PUBLISHED = {family: (family, {}) for family in FAMILIES}
VARIANTS = {
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-silu": ("llama", {"hidden_act": "silu"}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "opt-without-biases": ("opt", {"enable_bias": False}),
    "falcon-with-biases": ("falcon-40b", {"bias": True, "num_kv_heads": 1, "ffn_hidden_size": 80}),
    "yarn-amplitude": ("llama-yarn", {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_slow": 2.0}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AS_PUBLISHED | VARIANTS)
def test_transformers_agrees(tmp_path, case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, overrides = (AS_PUBLISHED | VARIANTS)[case]
    folder = write(tmp_path, family, seed=3, **overrides)
    expected = family_logits(folder, TOKENS)
    model = transformers_model(folder, transformers, torch)
    with torch.no_grad():
        found = model(torch.tensor(TOKENS[None, :])).logits[0].numpy()
    assert_near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert_near(found, expected)
    with pytest.raises(AssertionError):
        assert_near(found, np.roll(expected, 1, axis=1))
