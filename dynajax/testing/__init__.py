"""For tests: tiny models to write, and what each must compute, in plain float64.

`make_checkpoint` writes a llama of any ModelSpec, `families.write` a model of every dense family as it is published,
`make_moe` a mixture of experts, and `oracle.family_logits` computes any of them from its files. They share nothing with
`dynajax.checkpoint` or `dynajax.ops` but the ModelSpec record, so that they can catch mistakes made there.
"""

from dynajax.testing.mixtures import make_moe
from dynajax.testing.models import (
    TINY,
    TINY_FATRELU,
    TINY_GQA,
    TINY_SILU,
    TINY_TIED,
    TINY_WIDE_HEADS,
    RopeSpelling,
    hf_config,
    load_decoder,
    load_encoder_decoder,
    make_checkpoint,
    random_tensors,
)
from dynajax.testing.switch import make_switch

__all__ = [
    "TINY",
    "TINY_FATRELU",
    "TINY_GQA",
    "TINY_SILU",
    "TINY_TIED",
    "TINY_WIDE_HEADS",
    "RopeSpelling",
    "hf_config",
    "load_decoder",
    "load_encoder_decoder",
    "make_checkpoint",
    "make_moe",
    "make_switch",
    "random_tensors",
]
