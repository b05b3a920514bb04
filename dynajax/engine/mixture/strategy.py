"""What the engine does about the placement of experts: every `auto` resolved. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynajax.config import EngineConfig, ModelSpec, PolicyConfig
from dynajax.errors import UsageError
from dynajax.policy.experts.config import expert_config
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy, expert_policy
from hostcompute.dense import unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureStrategy:
    """How experts are placed and assigned. Shares what others ask of it with `engine.strategy.Strategy`."""

    sparsity: str  # exact where an activation has zeros, which the host skips; else dense
    policy: str  # a preset's name
    parts: ExpertPolicy
    knobs: PolicyConfig
    guarded: bool = False

    skips = False  # routing is never altered

    @property
    def moves(self) -> bool:
        """Whether experts move while decoding."""
        parts = self.parts
        return parts.assign != "resident" or parts.cache != "static" or parts.prefetch != "none"

    @property
    def planned(self) -> bool:
        """Whether a layer needs a plan, and so threads mode: not where residents are computed there, the rest here."""
        return self.moves

    def resident(self, spec: ModelSpec) -> MixtureStrategy:
        """The same where every expert is on the device: nothing to move, nothing to assign."""
        return replace(self, policy="static", parts=PRESETS["static"], guarded=False)


def resolve_mixture(config: EngineConfig, spec: ModelSpec, platform: str) -> MixtureStrategy:
    """Fill every `auto`. UsageError for what only neurons have.

    Policy: workload-aware on a GPU, with the guard; static on the CPU backend, where pool and host share one memory and
    a move can never pay.
    """
    if config.host_dense != "own":
        if (reason := unavailable(config.host_dense)) is not None:
            raise UsageError(f"--host-dense {config.host_dense} cannot be used here: {reason}; use own")
        if config.host_mode == "ffi":
            raise UsageError(f"--host-dense {config.host_dense} needs --host-mode threads (or auto), got ffi")
    plain = "exact" if spec.activation.has_zeros else "dense"
    if config.sparsity == "predicted":
        raise UsageError(f"--sparsity predicted skips neurons, and routing is never altered: use {plain} or auto")
    if config.sparsity == "exact" and plain == "dense":
        raise UsageError(f"--sparsity exact needs true zeros, which {spec.activation.kind} has not: use dense")
    expert_config(config.knobs)  # refuses what places neurons only
    name = config.policy
    if name == "auto" and platform == "cpu":
        name = "static"
    if name not in PRESETS:
        raise UsageError(f"--policy {name} places neurons; for experts there are {', '.join(PRESETS)}")
    wanted = {part: None if value == "auto" else value for part, value in _parts_of(config).items()}
    parts = expert_policy(name, **wanted)
    changed = [f"{part}={value}" for part, value in wanted.items() if value is not None]
    strategy = MixtureStrategy(
        sparsity=plain if config.sparsity == "auto" else config.sparsity,
        policy="+".join([name, *changed]),
        parts=parts,
        knobs=config.knobs,
        guarded=config.policy == "auto" and not config.deterministic,
    )
    if strategy.planned and config.host_mode in ("callback", "ffi"):
        raise UsageError(f"--policy {name} needs --host-mode threads (or auto), got {config.host_mode}")
    return strategy


def _parts_of(config: EngineConfig) -> dict[str, str]:
    return {"assign": config.assign, "cache": config.cache, "prefetch": config.prefetch}
