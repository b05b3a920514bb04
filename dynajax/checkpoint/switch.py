"""Switch Transformers (Fedus et al. 2022): T5's encoder and decoder, with experts in every n-th layer of each."""

from __future__ import annotations

from dynajax.checkpoint.family import Family, Traits
from dynajax.checkpoint.fields import Fields, found
from dynajax.checkpoint.mixtures import MOST_EXPERTS, MOST_TENSORS
from dynajax.checkpoint.wording import quoted
from dynajax.config import EncoderSpec, ExpertSpec, RouterSpec

MOST_LAYERS = 2**10
TRAINED_CONTEXT = 512  # no file says it; relative positions would go on
RENAMED = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "n_positions",
    "hidden_act": "dense_act_fn",
    "rms_norm_eps": "layer_norm_epsilon",
}


def _switch(fields: Fields) -> Traits:
    """`layers` are the encoder's and then the decoder's. The head is tied to the embedding and scales its input."""
    _check(fields)
    before = fields.integer("num_hidden_layers", MOST_LAYERS)
    behind = fields.integer("num_decoder_layers", MOST_LAYERS, default=before)
    layers = [*_sparse(fields, "encoder", before, 0), *_sparse(fields, "decoder", behind, before)]
    hidden, vocab = fields.integer("hidden_size", 2**17), fields.integer("vocab_size", 2**22)
    count = fields.integer("num_experts", MOST_EXPERTS)
    width, capacity = fields.integer("intermediate_size", 2**20), fields.integer("expert_capacity", 2**24)
    encoder = _encoder(fields, before, vocab)
    if not fields.problems and not layers:
        fields.complain("no layer has experts")
    if len(layers) * count > MOST_TENSORS:
        fields.complain(f"{len(layers)} layers of {count} experts are more than {MOST_TENSORS} experts together")
    if fields.problems or encoder is None:
        return {}
    router = RouterSpec(experts=count, top_k=1, float32=True)
    return {
        "layers": before + behind,
        "gated": False,
        "rope": None,
        "attention_scale": 1.0,
        "logit_scale": hidden**-0.5,
        "experts": ExpertSpec(router=router, width=width, layers=tuple(layers), capacity=capacity),
        "encoder": encoder,
    }


def _check(fields: Fields) -> None:
    """What other models of this kind have, and this version does not compute."""
    if fields.get("is_encoder_decoder") not in (None, True):
        fields.complain(f"is_encoder_decoder {quoted(fields.get('is_encoder_decoder'))} is not implemented: true only")
    for name in ("is_gated_act", "router_bias", "is_decoder"):
        if fields.flag(name, False):
            fields.complain(f"{name} true is not implemented")
    if not fields.flag("tie_word_embeddings", True):
        fields.complain(
            "tie_word_embeddings false is not implemented: each stack may have an embedding of its own then"
        )
    if fields.get("router_dtype") not in (None, "float32"):
        fields.complain(f"router_dtype {quoted(fields.get('router_dtype'))} is not implemented: float32 only")
    if fields.get("num_selected_experts") not in (None, 1):
        fields.complain(f"num_selected_experts {quoted(fields.get('num_selected_experts'))} is not implemented: 1 only")


def _sparse(fields: Fields, stack: str, count: int, first: int) -> list[int]:
    """Which layers of a stack have experts: of every `step` the second, or all if the step is 1.

    A file that does not say the step says how many there are; none of them means a step of all layers, and there the
    second one of the stack has experts all the same: so the published class has it.
    """
    name, number = f"{stack}_sparse_step", fields.get(f"num_sparse_{stack}_layers")
    step = fields.get(name)
    if step is None:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= count:
            fields.complain(f"num_sparse_{stack}_layers must be an integer from 0 to {count}, got {found(number)}")
            return []
        step = count // number if number else count
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MOST_LAYERS:
        fields.complain(f"{name} must be an integer from 0 to {MOST_LAYERS}, got {found(step)}")
        return []
    return [first + i for i in range(count) if step == 1 or (step > 1 and i % step == 1)]


def _encoder(fields: Fields, layers: int, vocab: int) -> EncoderSpec | None:
    """The number of layers, relative positions, and what decoding starts with: T5's padding, if the file is silent."""
    start = fields.token_ids("decoder_start_token_id", vocab) or fields.token_ids("pad_token_id", vocab)
    if len(start) != 1:
        fields.complain("decoder_start_token_id must be a token id, got nothing")
    buckets = fields.integer("relative_attention_num_buckets", 2**16)
    most = fields.integer("relative_attention_max_distance", 2**24, default=128)
    if buckets < 4 or buckets % 2 or most <= buckets:
        fields.complain(
            f"relative_attention_num_buckets {buckets} must be even, >= 4 and less than the distance {most}"
        )
    if fields.problems:
        return None
    return EncoderSpec(layers=layers, start_id=start[0], buckets=buckets, max_distance=most)


SWITCH: dict[str, Family] = {
    "switch_transformers": Family(
        architectures=("SwitchTransformersForConditionalGeneration",),
        layout="switch",
        rename=RENAMED,
        defaults={"tie_word_embeddings": True, "max_position_embeddings": TRAINED_CONTEXT},
        reads=frozenset({"num_experts", "is_encoder_decoder"}),
        activations={"relu": "relu"},
        traits=_switch,
    )
}
