"""How a system that places experts decides, and in which order it works; the rivals by name. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynajax.config import ModelSpec
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy

OFFLOAD_FROM = 32  # tokens of a step from which llama.cpp copies the host's experts to the device (its op offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order a layer's work is done; what a planner takes for granted is the default."""

    early: bool = True  # looks ahead as soon as the link is idle; False: when the layer is done
    pipelined: bool = (
        True  # a fetched expert is computed once it is there; False: all, after the last and after the host
    )
    overlaps: bool = True  # in a prompt the host works beside what is streamed; False: after it
    whole: bool = (
        True  # a prompt's last layer is computed; False: it ends with its keys and values, which nobody misses
    )


ENGINE_ORDER = Order(early=False, pipelined=False, overlaps=False, whole=False)  # as engine/mixture/runner.py has it


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSystem:
    """What is simulated: the parts of a policy with their constants, and how its decisions are carried out."""

    policy: ExpertPolicy
    config: ExpertConfig = field(default_factory=ExpertConfig)
    order: Order = field(default_factory=Order)
    lead: int = 1  # layers between a prediction and its use
    transit: int | None = None  # fetched experts of a step that may pass through buffers; None: as many as there are
    offload_from: int | None = None  # tokens of a step from which all that is absent is streamed; None: never

    @property
    def moves(self) -> bool:
        """Whether experts come and go while decoding."""
        return self.policy.assign != "resident" or self.policy.cache != "static" or self.policy.prefetch != "none"


def as_engine(system: MixtureSystem, spec: ModelSpec) -> MixtureSystem:
    """The same as the engine carries it out today; buffers: those of engine/mixture/planning.py."""
    buffers = max(2, min(8, len(spec.unit_layers) * spec.units // 100))
    return replace(system, order=ENGINE_ORDER, transit=buffers)


_ALWAYS = replace(ExpertConfig(), prefetch_price=0.0)  # of systems that are not said to ask whether a prefetch pays
# The rivals as policies of one engine, on the same kernels, with the same pool. `llama.cpp` keeps whole layers on the
# device; `ktransformers` a static set of hot experts; MoE-Lightning is not modelled. Fiddler's experts pass through a
# buffer, its set of popular ones stays.
RIVALS: Mapping[str, MixtureSystem] = MappingProxyType(
    {
        "llama.cpp": MixtureSystem(policy=PRESETS["layer-split"]),
        "llama.cpp-offload": MixtureSystem(policy=PRESETS["layer-split"], offload_from=OFFLOAD_FROM),
        "ktransformers": MixtureSystem(policy=PRESETS["static"]),
        "fiddler": MixtureSystem(policy=replace(PRESETS["fiddler"], cache="static")),
        "lru": MixtureSystem(policy=PRESETS["lru"]),
        "hybrimoe": MixtureSystem(policy=PRESETS["hybrimoe"], config=_ALWAYS),
        "hybrimoe-shipped": MixtureSystem(policy=PRESETS["hybrimoe-shipped"], config=_ALWAYS),
        "freetoken": MixtureSystem(policy=PRESETS["bandwidth-split"]),
        "dali": MixtureSystem(policy=PRESETS["dali"], config=_ALWAYS),
        "ours": MixtureSystem(policy=PRESETS["auto"]),
    }
)
