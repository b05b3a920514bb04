"""`simulate --trace`: where a trace comes from, what is asked of it, and how the answers are shown."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, get_args

from dynajax.checkpoint import read_spec
from dynajax.checkpoint.drafts import draft_file, refuse_unwritable
from dynajax.cli.options import DEFAULT_MODEL, EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, write_json, write_out
from dynajax.cli.simulate_tables import setting_text, trace_report
from dynajax.config import EngineConfig, ModelSpec, NeuronPolicy, PolicyConfig, parse_budget, policy_from_values
from dynajax.errors import MismatchError, UsageError
from dynajax.model_folder import model_folder
from dynajax.sim.activity import Activity, from_trace
from dynajax.sim.hardware import Hardware, load_hardware
from dynajax.sim.models import SPECS
from dynajax.sim.synthetic import RECIPES, Recipe
from dynajax.sim.whatif import (
    UNSIMULATED,
    Answer,
    Setup,
    answers,
    budget_of,
    context_of,
    sweep_of,
    weights_of,
)
from dynajax.trace import read_trace

POLICIES = "none,static,lru,macro+micro,dynamic"
UNUSED = ("batch", "assign", "cache", "prefetch", "stats", "host_mode", "threads", "predictor", "staging",
          "deterministic")  # flags of the engine  # fmt: skip
SYNTHETIC, RECORDED = "synthetic:", "recorded:"
TRACES = Path(str(resources.files("dynajax") / "assets" / "traces"))  # NAME.npz, and NAME/config.json of its model
_PICTURE_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A trace, and whose it is."""

    name: str
    spec: ModelSpec
    source: Activity | Recipe
    constants: Mapping[str, Any] = field(default_factory=dict)  # of the policy that was recorded

    @property
    def skipped(self) -> bool:
        """Whether there are scores that skipping goes by."""
        return isinstance(self.source, Recipe) or all(run.skip is not None for run in self.source.runs)


def show_trace(
    engine: EngineFlags, output: OutputFlags, trace: str, machine: str, sweep: str | None, plot: Path | None
) -> None:
    """Every policy at every setting of the sweep, and the picture."""
    policies = policies_of(engine.policy)
    config = config_of(engine)
    draw = None if plot is None else drawing(plot)
    hardware = load_hardware(machine)
    traced = open_trace(trace, engine.model, offline=config.offline)
    settings = sweep_of(constants_of(engine.set or (), config.knobs, traced.constants), sweep)
    setup = setup_of(traced, hardware, engine, config)
    found: list[Answer] = []
    with closing(progress()) as report:
        for answer in answers(setup, policies, settings):
            found.append(answer)
            report("simulate", len(found), len(policies) * len(settings))
    _warn(traced, [setting.config for setting in settings])
    if draw is not None:
        draw(found)
    if not output.json:
        write_out(trace_report(setup, found))
        return
    head = {"trace": trace, "hardware": hardware.name, "simulated": True, "budget_bytes": setup.budget_bytes}
    rows = [answer.to_json() for answer in found]
    write_json(head | {"bound_tok_s": found[0].bound_tok_s, "rows": rows})


# --- what is asked ---


def policies_of(text: str) -> list[NeuronPolicy]:
    """The policies of --policy A,B,...; auto: those that are compared if none is named."""
    known: tuple[NeuronPolicy, ...] = get_args(NeuronPolicy)
    names = [name.strip() for name in (POLICIES if text == "auto" else text).split(",")]
    if wrong := [name for name in names if name not in known]:
        raise UsageError(f"--policy must be one or more of {', '.join(known)}, got {wrong[0]!r}")
    if len(set(names)) < len(names):
        raise UsageError(f"--policy must name each policy once, got {text!r}")
    return [policy for name in names for policy in known if policy == name]


def config_of(engine: EngineFlags, allowed: Sequence[str] = ()) -> EngineConfig:
    """The flags, checked; UsageError for those that change nothing that is simulated. allowed: of them, what does."""
    unused = [name for name in UNUSED if name not in allowed]
    if wrong := [f.name for f in fields(engine) if f.name in unused and getattr(engine, f.name) != f.default]:
        names = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise UsageError(f"{names} changes nothing that is simulated: leave it out")
    if wrong := [word for word in engine.set or () if _name(word) in UNSIMULATED]:
        raise UsageError(f"--set {wrong[0]} changes nothing that is simulated: leave it out")
    return replace(engine, policy="auto").config()


def _name(setting: str) -> str:
    return setting.partition("=")[0].strip()


def constants_of(given: Sequence[str], knobs: PolicyConfig, recorded: Mapping[str, Any]) -> PolicyConfig:
    """The policy's constants: those given by --set, else the recording's, else the usual ones."""
    named = {_name(setting) for setting in given}
    return policy_from_values({**recorded, **{name: getattr(knobs, name) for name in named}})


def setup_of(traced: Traced, hardware: Hardware, engine: EngineFlags, config: EngineConfig) -> Setup:
    """Every auto resolved."""
    activation = traced.spec.activation
    if config.sparsity == "exact" and not activation.has_zeros:
        raise UsageError(f"--sparsity exact needs true zeros, which {activation.kind} has not: use dense")
    if config.sparsity == "predicted" and not traced.skipped:
        raise UsageError(
            f"{traced.name} holds no scores to skip by: record with --sparsity predicted --set record_scores=true"
        )
    return Setup(
        name=traced.name,
        source=traced.source,
        weights=weights_of(traced.spec, engine.dtype, engine.host_dtype),
        hardware=hardware,
        budget_bytes=budget_of(parse_budget(config.vram_budget), hardware),
        context=context_of(traced.source, config.ctx),
        skips=traced.skipped and config.sparsity in ("auto", "predicted"),
        gate_first=activation.has_zeros and config.sparsity != "dense",
    )


# --- where traces come from ---


def open_trace(trace: str, model: str, *, offline: bool) -> Traced:
    """A published model to draw from, or a recording with its model's shape."""
    if trace.startswith(SYNTHETIC):
        return _published(trace, model)
    if not trace.startswith(RECORDED):
        return recording(trace, Path(trace), _config_folder(model, offline=offline))
    path = shipped(trace.removeprefix(RECORDED))
    model = path.stem if model == DEFAULT_MODEL else model
    own = path.with_suffix("")  # the folder of its model's config.json, if that is shipped, too
    folder = own if own.is_dir() and model == path.stem else _config_folder(model, offline=offline)
    return recording(trace, path, folder)


def _published(trace: str, model: str) -> Traced:
    if (name := trace.removeprefix(SYNTHETIC)) not in RECIPES:
        raise UsageError(f"--trace {SYNTHETIC}NAME must be of {', '.join(RECIPES)}, got {name!r}")
    if model not in (DEFAULT_MODEL, name):
        raise UsageError(f"--trace {trace} has a model of its own: leave out --model")
    return Traced(name=trace, spec=SPECS[name], source=RECIPES[name])


def _config_folder(model: str, *, offline: bool) -> Path:
    return model_folder(model, offline=offline, config_only=True)


def shipped(name: str) -> Path:
    """A recording of this package; UsageError lists what there is."""
    names = sorted(path.stem for path in TRACES.glob("*.npz"))
    if name not in names:
        known = ", ".join(names) or "none, for none is shipped"
        raise UsageError(f"--trace {RECORDED}NAME must be of {known}, got {name!r}")
    return TRACES / f"{name}.npz"


def recording(name: str, path: Path, folder: Path) -> Traced:
    """A file of `generate --record`; MismatchError if it is not of the model in `folder`."""
    trace, spec = read_trace(path), read_spec(folder)
    head = trace.head
    if (head.layers, head.width) != (spec.layers, spec.ffn):
        raise MismatchError(
            f"{name} has {head.layers} layers of {head.width} neurons, the model in {str(folder)!r} {spec.layers} of "
            f"{spec.ffn}: name with --model the one that was recorded"
        )
    constants = recorded_constants(head.settings, name)
    return Traced(name=name, spec=spec, source=from_trace(trace, name), constants=constants)


def recorded_constants(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The policy's constants when it was recorded, as far as they are simulated: what scores mean hangs on them."""
    knobs, lead = settings.get("knobs", {}), settings.get("lead")
    if not isinstance(knobs, dict):
        raise MismatchError(f"{name} does not tell its policy's constants: record it again")
    values = knobs | ({} if lead is None else {"lead": lead})
    values = {key: value for key, value in values.items() if key not in UNSIMULATED}
    try:
        policy_from_values(values)
    except UsageError as error:
        raise MismatchError(f"{name} was recorded with other constants than this version has: {error}") from error
    return values


def _warn(traced: Traced, configs: Sequence[PolicyConfig]) -> None:
    """What a recording cannot tell."""
    if isinstance(traced.source, Recipe):
        return
    if all(run.place is None for run in traced.source.runs):
        note("no scores were recorded: policies see frequencies alone (record with --set record_scores=true)")
        return
    for name in ("lead", "skip_bits", "place_bits"):
        known = traced.constants.get(name)
        if known is not None and any(getattr(config, name) != known for config in configs):
            note(f"scores were recorded with {name}={known}: what others would know is not simulated")


# --- the picture ---


class Drawn(Protocol):
    """An answer of a sweep."""

    @property
    def policy(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def figures(self) -> Mapping[str, float | None]: ...


def drawing(path: Path) -> Callable[[Sequence[Drawn]], None]:
    """What will draw the answers; refuses, before anything is simulated, what would fail then."""
    refuse_unwritable(path)
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError("matplotlib is not installed: pip install dynajax[plot]") from error
    return partial(_draw, path, figures.Figure)


def _draw(path: Path, make: Any, answers: Sequence[Drawn]) -> None:
    """Tokens a second over the first constant that was swept: a line a policy, and value of each other constant."""
    first, *others = answers[0].settings
    numbers = all(isinstance(answer.settings[first], int | float) for answer in answers)
    lines: dict[str, list[tuple[Any, float]]] = {}
    for answer in answers:
        label = ", ".join([answer.policy, *(f"{name}={setting_text(answer.settings[name])}" for name in others)])
        at = answer.settings[first] if numbers else setting_text(answer.settings[first])
        lines.setdefault(label, []).append((at, answer.figures["decode_tok_s"] or 0.0))
    drawn = make(figsize=(8, 5), layout="constrained")
    axes = drawn.subplots()
    for label, points in lines.items():
        axes.plot(*zip(*(sorted(points) if numbers else points), strict=True), marker="o", label=label)
    axes.set(xlabel=first, ylabel="simulated tok/s")
    axes.legend()
    with draft_file(path, _PICTURE_BYTES) as file:
        drawn.savefig(file, format=path.suffix[1:], dpi=110)
    note(f"simulated tok/s, drawn to {path}")
