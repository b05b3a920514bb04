"""What a model is and what a user asked for: frozen records, no behaviour beyond checking themselves."""

from dynajax.config.checks import (
    check_number,
    check_share,
)
from dynajax.config.dtypes import (
    DTYPE_BYTES,
    GROUP,
    PACKED_BITS,
    DTypeName,
    WeightDType,
    group_bytes,
    head_dtype,
    is_packed,
    stored_bytes,
    unpacked_dtype,
)
from dynajax.config.engine import (
    EngineConfig,
    HostMode,
    NeuronPolicy,
    PolicyName,
    Sparsity,
    StagingName,
    parse_budget,
)
from dynajax.config.experts import (
    EncoderSpec,
    ExpertSpec,
    LatentSpec,
    RouterSpec,
)
from dynajax.config.model import (
    Activation,
    ActivationKind,
    Layout,
    ModelSpec,
    NormKind,
    Rope,
    RopeKind,
)
from dynajax.config.policy import (
    PolicyConfig,
    policy_from_settings,
    policy_from_values,
)

__all__ = [
    "DTYPE_BYTES",
    "GROUP",
    "PACKED_BITS",
    "Activation",
    "ActivationKind",
    "DTypeName",
    "EncoderSpec",
    "EngineConfig",
    "ExpertSpec",
    "HostMode",
    "LatentSpec",
    "Layout",
    "ModelSpec",
    "NeuronPolicy",
    "NormKind",
    "PolicyConfig",
    "PolicyName",
    "Rope",
    "RopeKind",
    "RouterSpec",
    "Sparsity",
    "StagingName",
    "WeightDType",
    "check_number",
    "check_share",
    "group_bytes",
    "head_dtype",
    "is_packed",
    "parse_budget",
    "policy_from_settings",
    "policy_from_values",
    "stored_bytes",
    "unpacked_dtype",
]
