"""`simulate --trace` of a mixture of experts: whose routing it is, what is asked of it, how the answers are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from dynajax.checkpoint import read_spec
from dynajax.cli.options import DEFAULT_MODEL, EngineFlags, OutputFlags
from dynajax.cli.output import note, progress, size, write_json, write_out
from dynajax.cli.simulate_imports import columns_of, is_foreign, read_foreign
from dynajax.cli.simulate_tables import grid, setting_text
from dynajax.cli.simulate_trace import RECORDED, SYNTHETIC, config_of, drawing
from dynajax.config import DTYPE_BYTES, EngineConfig, ModelSpec, check_number, parse_budget
from dynajax.errors import DynajaxError, MismatchError, UsageError
from dynajax.model_folder import model_folder
from dynajax.policy.experts.presets import PRESETS, ExpertPolicy, expert_policy
from dynajax.policy.experts.synthetic import RECIPES
from dynajax.routing_trace import KIND, RoutingTrace, read_routing, trace_kind
from dynajax.sim.experts.activity import MixtureActivity, draw_mixture, from_routing, shipped_names, shipped_routing
from dynajax.sim.experts.bound import MixtureBound
from dynajax.sim.experts.foresight import said_of
from dynajax.sim.experts.shapes import MIXTURES, MixtureWeights
from dynajax.sim.experts.whatif import (
    BATCH,
    MixtureAnswer,
    MixtureSetup,
    fitted,
    mixture_answers,
    mixture_bound,
    mixture_sweep,
)
from dynajax.sim.hardware import Hardware, load_hardware
from dynajax.sim.whatif import budget_of
from dynajax.trace import DECODE

if TYPE_CHECKING:
    from dynajax.cli.simulate import TraceFlags

POLICIES = "layer-split,static,fiddler,lru,bandwidth-split,hybrimoe,dali,auto"
PROMPT, TOKENS = 64, 64  # of what is drawn
LEAST_CONTEXT = 256
ORDERS = ("planner", "engine")
SHOWN = (  # heading, figure, form
    ("simulated tok/s", "decode_tok_s", ".2f"),
    ("of bound", "share_of_bound", ".0%"),
    ("prefill tok/s", "prefill_tok_s", ".1f"),
    ("held", "pool_share", ".0%"),
    ("hits", "hits", ".1%"),
    ("weighted", "weighted_hits", ".1%"),
    ("loads", "loads_per_layer_step", ".2f"),
    ("GB moved", "moved_gb", ".2f"),
    ("device busy", "busy_device", ".0%"),
    ("host", "busy_host", ".0%"),
    ("link", "busy_link", ".0%"),
    ("over best", "over_best", ".3f"),
    ("foretold", "foretold_recall", ".0%"),
    ("prefetch useful", "prefetch_useful", ".0%"),
)


def is_mixture(trace: str) -> bool:
    """Whether the trace is of experts; what cannot be read is left to others to refuse."""
    if trace.startswith(SYNTHETIC):
        return trace.removeprefix(SYNTHETIC).partition("/")[0] in MIXTURES
    if trace.startswith(RECORDED):
        return trace.removeprefix(RECORDED) in shipped_names()
    path = Path(trace)
    if is_foreign(path):
        return True
    try:
        return trace_kind(path) == KIND
    except DynajaxError:
        return False


def show_mixture(engine: EngineFlags, output: OutputFlags, trace: str, machine: str, flags: TraceFlags) -> None:
    """Every policy at every setting of the sweep, and the picture."""
    config = config_of(engine, allowed=("batch", "assign", "cache", "prefetch"))
    policies = mixture_policies(engine.policy, config)
    if flags.order not in ORDERS:
        raise UsageError(f"--order must be {' or '.join(ORDERS)}, got {flags.order!r}")
    if flags.recall is not None:
        check_number("--recall", flags.recall, 0, 1)
    draw, hardware = None if flags.plot is None else drawing(flags.plot), load_hardware(machine)
    settings = mixture_sweep(config.knobs, flags.recall, flags.sweep)
    batch = None if engine.batch == 1 and not trace.startswith(SYNTHETIC) else engine.batch
    spec, activity = open_mixture(trace, engine.model, batch, columns_of(flags.columns), offline=config.offline)
    setup = setup_of(spec, activity, hardware, engine, config, order=flags.order)
    bound, found = mixture_bound(setup), []
    with closing(progress()) as report:
        for answer in mixture_answers(setup, policies, settings, bound):
            found.append(answer)
            report("simulate", len(found), len(policies) * len(settings))
    if draw is not None:
        draw(found)
    kinds = {policy.prefetch for policy in policies.values()} - {"none"}
    told = {kind: said_of(activity, kind, flags.recall) for kind in sorted(kinds)}
    if not output.json:
        write_out(mixture_report(setup, bound, found, list(told.values())))
        return
    head = {"trace": trace, "hardware": hardware.name, "simulated": True, "kind": KIND, "model_batch": activity.batch}
    tail = {"bound_tok_s": bound.decode_tok_s, "bound_prefill_tok_s": bound.prefill_tok_s, "predictions": told}
    rows = [answer.to_json() for answer in found]
    write_json(head | {"budget_bytes": setup.budget_bytes} | tail | {"rows": rows})


# --- what is asked ---


def mixture_policies(text: str, config: EngineConfig) -> dict[str, ExpertPolicy]:
    """The presets of --policy A,B,..., with the parts that --assign, --cache and --prefetch put in their place."""
    names = [name.strip() for name in (POLICIES if text == "auto" else text).split(",")]
    if len(set(names)) < len(names):
        raise UsageError(f"--policy must name each policy once, got {text!r}")
    if wrong := [name for name in names if name not in PRESETS]:
        raise UsageError(f"--policy must be one or more of {', '.join(PRESETS)} for experts, got {wrong[0]!r}")
    parts = {part: getattr(config, part) for part in ("assign", "cache", "prefetch")}
    own = {part: None if value == "auto" else value for part, value in parts.items()}
    return {name: expert_policy(name, **own) for name in names}


def setup_of(
    spec: ModelSpec,
    activity: MixtureActivity,
    hardware: Hardware,
    engine: EngineFlags,
    config: EngineConfig,
    *,
    order: str,
) -> MixtureSetup:
    """Every auto resolved."""
    if config.sparsity not in ("auto", "dense"):
        raise UsageError(f"--sparsity {config.sparsity} is of neurons: leave it out")
    needed = activity.context
    if config.ctx is not None and config.ctx < needed:
        raise UsageError(f"--ctx must be at least the {needed} tokens of the trace, got {config.ctx}")
    device = spec.dtype if engine.dtype == "auto" else engine.dtype
    host = device if engine.host_dtype == "auto" else engine.host_dtype
    cache = device if device in DTYPE_BYTES else "bfloat16"
    setup = MixtureSetup(
        name=activity.name,
        activity=activity,
        weights=MixtureWeights(spec=spec, dtype=device, host_dtype=host, kv_dtype=cache),
        hardware=hardware,
        budget_bytes=budget_of(parse_budget(config.vram_budget), hardware),
        context=max(LEAST_CONTEXT, needed) if config.ctx is None else config.ctx,
        engine=order == "engine",
    )
    hardware.host_rate(host)
    _ = setup.pool_bytes  # FitError before anything is simulated
    return setup


# --- where traces come from ---


def open_mixture(
    trace: str, model: str, batch: int | None, columns: Mapping[str, str], *, offline: bool
) -> tuple[ModelSpec, MixtureActivity]:
    """A mixture and what it does; batch None: as it was recorded."""
    if columns and not is_foreign(Path(trace)):
        raise UsageError("--columns is for traces of other programs: leave it out")
    if trace.startswith(SYNTHETIC):
        return _drawn(trace, model, batch or 1)
    named = None if model == DEFAULT_MODEL else _spec_of(model, offline=offline)
    if trace.startswith(RECORDED):
        found = shipped_routing(trace.removeprefix(RECORDED))
    elif is_foreign(Path(trace)):
        known = (None, None) if named is None or named.experts is None else (named.units, named.experts.router.top_k)
        found = read_foreign(Path(trace), columns, *known)
        if (found.phase == DECODE).all():
            note("nothing in the trace is told to be a prompt: all of its tokens count as decoded")
    else:
        found = read_routing(Path(trace))
    spec = named or _alike(found, trace)
    if spec.experts is None:
        raise MismatchError(f"the model {model!r} has no experts: name with --model the one that {trace} is of")
    activity = fitted(from_routing(found, trace, batch), spec)
    if found.head.layers != len(spec.unit_layers):
        note(f"the trace has {found.head.layers} layers with experts, the model {len(spec.unit_layers)}: each takes "
             "the routing of the one at its depth")  # fmt: skip
    return spec, activity


def _drawn(trace: str, model: str, batch: int) -> tuple[ModelSpec, MixtureActivity]:
    name, _, recipe = trace.removeprefix(SYNTHETIC).partition("/")
    if recipe and recipe not in RECIPES:
        raise UsageError(f"--trace {SYNTHETIC}{name}/RECIPE must be of {', '.join(RECIPES)}, got {recipe!r}")
    if model not in (DEFAULT_MODEL, name):
        raise UsageError(f"--trace {trace} has a model of its own: leave out --model")
    if batch > BATCH:
        raise UsageError(f"--batch must be at most {BATCH} for drawn traces, got {batch}")
    spec = MIXTURES[name]
    drawn = draw_mixture(spec, RECIPES[recipe or "repeating"], trace, batch=batch, prompt=PROMPT, steps=TOKENS)
    return spec, drawn


def _spec_of(model: str, *, offline: bool) -> ModelSpec:
    return MIXTURES[model] if model in MIXTURES else read_spec(model_folder(model, offline=offline, config_only=True))


def _alike(trace: RoutingTrace, name: str) -> ModelSpec:
    """The published mixture of that shape."""
    head = trace.head
    for spec in MIXTURES.values():
        assert spec.experts is not None
        shape = (len(spec.unit_layers), spec.units, spec.experts.router.top_k)
        if shape == (head.layers, head.width, head.top_k):
            return spec
    raise MismatchError(
        f"{name} has {head.layers} layers of {head.width} experts, {head.top_k} for a token: name its model with "
        f"--model ({', '.join(MIXTURES)}, or a folder)"
    )


# --- what is shown ---


def mixture_report(
    setup: MixtureSetup, bound: MixtureBound, answers: Sequence[MixtureAnswer], predictions: Sequence[str]
) -> str:
    """A row for every policy and setting."""
    weights, swept = setup.weights, list(answers[0].settings)
    head = ("policy", *swept, *(name for name, _, _ in SHOWN))
    told = f" Predictions: {'; '.join(predictions)}." if predictions else ""
    prompt = "" if bound.prefill_tok_s is None else f", of a prompt {bound.prefill_tok_s:.1f}"
    return (
        f"Simulated: {setup.name} on {setup.hardware.name}, {weights.dtype} on the device, {weights.host_dtype} on the "
        f"host, {size(setup.budget_bytes)} of device memory, up to {setup.activity.batch} rows, a cache for "
        f"{setup.context} tokens each.{told}\n\n{grid(head, map(_row, answers))}\n"
        f"Simulated bound, with all known beforehand: {bound.decode_tok_s:.2f} tok/s{prompt}. Loads: experts brought "
        "to the device, a layer and step.\n"
    )


def _row(answer: MixtureAnswer) -> list[str]:
    figures = answer.figures
    values = [(figures[name], form) for _, name, form in SHOWN]
    told = ["-" if value is None else format(value, form) for value, form in values]
    return [answer.policy, *(setting_text(value) for value in answer.settings.values()), *told]
