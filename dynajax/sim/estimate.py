"""How fast an engine would be on a described machine, from its plan alone. NumPy only.

Decoding is simulated on activity that is drawn: of the model's own frequencies if they are known, else by a recipe for
its kind of activation. Of each layer about WIDTH neurons stand for all, and SEQUENCES x TOKENS tokens for all texts.
Prompts, and models that are wholly on the device, are a closed form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from dynajax.config import DTYPE_BYTES, ActivationKind, ModelSpec, NeuronPolicy, PolicyConfig
from dynajax.errors import UsageError
from dynajax.plan import Placement
from dynajax.policy.guard import LOSS
from dynajax.sim.activity import F32, Activity
from dynajax.sim.compare import GATE_QUALITY
from dynajax.sim.decode import decode
from dynajax.sim.hardware import Hardware
from dynajax.sim.models import Weights
from dynajax.sim.records import Load, System, Tally
from dynajax.sim.synthetic import RECIPES, Recipe, Sample, Scoring, draw, mlp_quality
from dynajax.sim.systems import bound_s, engine_system

Bound = Literal["device memory bandwidth", "link", "host memory bandwidth", "compute", "latency"]
WIDTH, SEQUENCES, PROMPT, TOKENS = 1200, 2, 128, 24  # of what is drawn
SIDE_TOKENS = 12  # of the first sequence, for what only bounds or explains the figure
PREFILL = 512  # tokens
NOTHING_S = 1e-12  # of what is taken to cost nothing
MOST_DENSE = 0.999  # share of neurons that a layer may be drawn with
MEMORY_SHARE = 0.5  # of the memory's rate, from which on host kernels are bound by it
# Whose activity a model is taken to have, by its activation; of SiLU's, which is ranked, only the spread matters.
ALIKE: Mapping[ActivationKind, str] = {
    "relu": "relullama-7b",
    "fatrelu": "prosparse-7b",
    "drelu": "prosparse-7b",
    "silu": "relullama-7b",
}
QUALITY = {**GATE_QUALITY, 8: 0.9999}  # by bits
FIXED = tuple(entry.name for entry in fields(Hardware) if entry.name.endswith("_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The predictors: bytes of a layer's that a token reads, programs of a layer, and for each predictor of what is
    skipped and of what is placed the bits of its low-bit gate, 0 for a trained MLP; () where there is none."""

    read: float = 0.0
    programs: int = 0
    skip_bits: tuple[int, ...] = ()
    place_bits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What would run, as the engine's plan has it: every `auto` resolved."""

    spec: ModelSpec
    dtype: str
    host_dtype: str
    ctx: int
    chunk: int  # tokens of a prompt that are computed together
    slots: tuple[int, ...]
    resident: bool  # a token is one program, and no host computes
    sparsity: str
    density: float | None = None  # share of neurons that counts as live where scores only rank
    policy: NeuronPolicy
    guarded: bool = False
    knobs: PolicyConfig = field(default_factory=PolicyConfig)
    asked: Asked = field(default_factory=Asked)

    @property
    def weights(self) -> Weights:
        return Weights(
            spec=self.spec,
            dtype=self.dtype,
            host_dtype=self.host_dtype,
            kv_dtype=self.dtype if self.dtype in DTYPE_BYTES else "float16",
        )

    @property
    def load(self) -> Load:
        load = self.weights.load(self.asked.read, self.asked.programs)
        return replace(load, ranks=self.density is not None)

    @property
    def prompt(self) -> int:
        """Tokens before those that are decoded."""
        return max(1, min(PROMPT, self.ctx - TOKENS))

    @property
    def system(self) -> System:
        return engine_system(
            self.policy,
            self.knobs,
            self.spec.activation,
            skips=self.sparsity == "predicted",
            dense=self.sparsity == "dense",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Simulated figures."""

    decode_tok_s: float
    decode_range: tuple[float, float]  # at worst; what no engine can exceed
    prefill_tok_s: float
    bound_by: Bound

    def to_json(self) -> dict[str, Any]:
        """The object `expected` of `plan.py --json`."""
        return {
            "decode_tok_s": self.decode_tok_s,
            "decode_range": list(self.decode_range),
            "prefill_tok_s": self.prefill_tok_s,
            "bound_by": self.bound_by,
            "simulated": True,
        }


def expected(running: Running, hardware: Hardware, frequency: F32 | None = None) -> Estimate:
    """One sequence's speed; frequency [L, F]: of the model's own statistics.

    The range: at worst the slowest of what runs, of neurons that stay where they are and have nothing to do with the
    text, and of skipping nothing; at best `bound_s` with the same pool. Without statistics policies that move are
    taken to have found the frequent neurons, others to have placed them by their number, as the engine does.
    UsageError: the machine was not measured with the host's type.
    """
    if running.resident:
        return _resident(running, hardware)
    if running.host_dtype not in hardware.cpu_bps:
        known = ", ".join(hardware.cpu_bps)
        raise UsageError(
            f"{hardware.name} has host rates for {known}, not for {running.host_dtype}: choose with --dtype and "
            "--host-dtype"
        )
    activity, load, system = drawn(running, frequency), running.load, running.system
    moves = system.policy not in ("static", "none")
    anywhere = _placed(running, activity, by_use=False)
    placement = _placed(running, activity, by_use=moves or frequency is not None)
    usual = decode(load, hardware, system, activity, placement)
    still = replace(system, policy="static")
    if running.guarded and moves:
        alone = decode(load, hardware, still, activity, placement)
        if np.median(usual.token_s) > LOSS * np.median(alone.token_s):
            usual, system = alone, still
    start = first_tokens(activity)
    worst = [usual, decode(load, hardware, still, start, anywhere)]
    if system.skips:
        worst.append(decode(load, hardware, replace(system, skips=False), start, placement))
    free = decode(load, without_fixed(hardware), system, start, placement)
    speed, bound = _tok_s(usual), 1 / bound_s(load, hardware, activity, placement.slots)
    return Estimate(
        decode_tok_s=speed,
        decode_range=(min(map(_tok_s, worst)), max(bound, speed)),  # a high theta computes less than what is live
        prefill_tok_s=_prefill_tok_s(running, hardware),
        bound_by=bound_of(usual, free, hardware, running.host_dtype),
    )


def bound_of(usual: Tally, free: Tally, hardware: Hardware, host_dtype: str) -> Bound:
    """What holds a token up. `free` is the same decoding on a machine without fixed costs (`without_fixed`).

    Lanes run beside each other, so how long each was busy does not say what of it others waited for: launches that hide
    behind the host's work cost nothing. Taking the fixed costs away says it: if a token then takes less than half as
    long, they were more than half of its critical path, and no faster memory would halve it: "latency". Otherwise what
    is left is reading and sending bytes, and the lane that is busiest with it is the one that the others wait for.
    The host's is bound by the memory if its kernels reach at least MEMORY_SHARE of what the memory gives; else more or
    faster cores would help, and faster memory would not: "compute".
    """
    if free.seconds / free.tokens < 0.5 * usual.seconds / usual.tokens:
        return "latency"
    names: dict[str, Bound] = {"device": "device memory bandwidth", "link": "link", "host": "host memory bandwidth"}
    lane = max(names, key=lambda name: free.busy_s.get(name, 0.0))
    if lane == "host" and hardware.host_rate(host_dtype) < MEMORY_SHARE * hardware.host_bps:
        return "compute"
    return names[lane]


def without_fixed(hardware: Hardware) -> Hardware:
    """The machine on which only bytes take time."""
    programs = {
        kind: replace(program, seconds=tuple(seconds - program.fixed_s + NOTHING_S for seconds in program.seconds))
        for kind, program in hardware.programs.items()
    }
    return replace(hardware, programs=programs, **dict.fromkeys(FIXED, NOTHING_S))


def drawn(running: Running, frequency: F32 | None) -> Activity:
    """What the model does: see `ALIKE`. Where every neuron is computed all count as live."""
    spec, asked, knobs = running.spec, running.asked, running.knobs
    recipe = recipe_of(spec, running.density)
    stride = max(1, round(spec.ffn / WIDTH))
    sample = Sample(stride=stride, sequences=SEQUENCES, prompt=running.prompt, tokens=TOKENS)
    lead = min(knobs.lead, spec.layers - 1)
    skip_rho = _quality(recipe, asked.skip_bits) * recipe.cosine ** min(knobs.skip_lead, lead)
    scoring = Scoring(
        place_rho=_quality(recipe, asked.place_bits) * recipe.cosine**lead,
        skip_rho=skip_rho if running.sparsity == "predicted" else None,
    )
    own = None if frequency is None else frequency[:, ::stride][:, : spec.ffn // stride]
    found = draw(recipe, scoring, sample, own)
    runs = found.runs
    if not asked.place_bits:
        runs = tuple(replace(run, place=None, placed=np.zeros_like(run.placed)) for run in runs)
    if running.sparsity == "dense":
        runs = tuple(replace(run, live=np.ones_like(run.live)) for run in runs)
    return replace(found, runs=runs)


def first_tokens(activity: Activity) -> Activity:
    """The first SIDE_TOKENS tokens of the first run."""
    run = activity.runs[0]
    cut = {name: getattr(run, name)[:SIDE_TOKENS] for name in ("live", "placed")}
    cut |= {name: array[:SIDE_TOKENS] for name in ("place", "skip") if (array := getattr(run, name)) is not None}
    return replace(activity, runs=(replace(run, **cut),))


def recipe_of(spec: ModelSpec, density: float | None) -> Recipe:
    """A model of that shape whose activity is that of the nearest published kind.

    Density and coverage of a layer are those of the same relative depth. With `density` so many are live everywhere.
    """
    alike = RECIPES[ALIKE[spec.activation.kind]]
    recipe = replace(alike, name=f"like {alike.name}", layers=spec.layers, ffn=spec.ffn)
    if density is None:
        return recipe
    return replace(recipe, density=min(density, MOST_DENSE), rise=(1.0, 1.0))


def _quality(recipe: Recipe, bits: tuple[int, ...]) -> float:
    """The mean over predictors; 1 where there are none."""
    mlp = mlp_quality(recipe)[0] if 0 in bits else 1.0
    return float(np.mean([QUALITY[count] if count else mlp for count in bits])) if bits else 1.0


def _placed(running: Running, activity: Activity, *, by_use: bool) -> Placement:
    """As many of the drawn neurons on the device as of the model's; the most frequent ones, or whichever."""
    units, ffn = activity.shape[1], running.spec.ffn
    order = np.argsort(-activity.frequency * by_use, axis=1, kind="stable")
    counts = [round(slots * units / ffn) for slots in running.slots]
    return Placement(tuple(np.sort(order[i, :n]).astype(np.int32) for i, n in enumerate(counts)), units)


def _tok_s(tally: Tally) -> float:
    return tally.tokens / tally.seconds


def _resident(running: Running, hardware: Hardware) -> Estimate:
    """Every weight is read for every token, whatever the text. The programs of a layer are parts of one, and are
    launched all the same; beyond the bytes there is nothing to gain but their launches."""
    load, layers = running.load, running.spec.layers
    cache = load.prefix(running.prompt + TOKENS // 2, bucketed=True) * load.kv_token
    sizes = {"attend": load.attention + cache, "hot": load.neurons * load.unit, "head": load.head}
    read_s, fixed_s = 0.0, hardware.token_s + hardware.dispatch_s
    for kind, size in sizes.items():
        program, count = hardware.program(kind), 1 if kind == "head" else layers
        read_s += count * (program.at(size) - program.fixed_s)
        fixed_s += count * program.fixed_s
    speed = 1 / (read_s + fixed_s)
    return Estimate(
        decode_tok_s=speed,
        decode_range=(speed, 1 / read_s),
        prefill_tok_s=_prefill_tok_s(running, hardware),
        bound_by="latency" if fixed_s > read_s else "device memory bandwidth",
    )


def _prefill_tok_s(running: Running, hardware: Hardware) -> float:
    """Of a prompt of PREFILL tokens, or as many as the cache holds: layers one after the other, both sides at once.

    The cold part is computed on the host: nothing is sent for a prompt.
    """
    spec, load, tokens = running.spec, running.load, min(PREFILL, running.ctx)
    chunks = math.ceil(tokens / running.chunk)
    of_unit = spec.ffn_parts * spec.unit_width

    def device_s(units: int) -> float:
        size, weights = load.attention + units * load.unit, spec.block_parameters + units * of_unit
        return max(chunks * size / hardware.device_bps, 2 * weights * tokens / hardware.device_flops)

    total = hardware.token_s
    for slots, layers in Counter(running.slots).items():
        cold, seconds = spec.ffn - slots, device_s(slots)
        fixed = hardware.layer_s + 2 * chunks * (hardware.dispatch_s + hardware.launch_s)
        if cold:
            size = cold * load.host_unit
            host_s = max(size / hardware.host_rate(load.dtype), 2 * cold * of_unit * tokens / hardware.cpu_flops)
            seconds = max(seconds, host_s + hardware.call_s + hardware.sync_s)
        total += layers * (fixed + seconds)
    return tokens / total
