"""The systems that are compared, each as what the engine's planner is told: policy, placement, predictors, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from dynajax.config import Activation, NeuronPolicy, PolicyConfig
from dynajax.plan import Placement
from dynajax.policy.placement import place_equal, place_static
from dynajax.sim.activity import F32, Activity
from dynajax.sim.hardware import Hardware
from dynajax.sim.models import Weights
from dynajax.sim.records import Load, System

# Deja Vu's kind, by the bytes that PowerInfer's own logs leave for them (its issues 120 and 159): share of all weights.
MLP_SHARE: Mapping[int, float] = {80: 0.087}  # by layers
MLP_USUAL = 0.075
GROUP_BITS = 0.5  # a weight's share of a scale, low-bit gates
POWERINFER = System(
    policy="static",
    config=PolicyConfig(lead=0),
    device_reads="rows",
    rows_s=95e-6,  # sparse_gpu_operator: 35-43 us and 51-61 us are left at no rows at all
    gate_first=False,
    waits=True,
    merges=3,
    bucketed=False,
    one_pool=False,
)
# lam, lead, what of a pool is kept and what counts as live are not published: these are ours.
DYNAMICINFER = replace(
    POWERINFER,
    policy="dynamic",
    config=PolicyConfig(lam=1.0, lead=1, ranking="flag", swap_rule="paper"),
    copies="units",
)
# The engine's decisions on kernels and hand-overs like the others': what is compared is what is decided.
OURS = replace(POWERINFER, policy="dynamic", config=PolicyConfig(), gate_first=True, waits=False, merges=1)


def engine_system(
    policy: NeuronPolicy, config: PolicyConfig, activation: Activation, *, skips: bool, dense: bool = False
) -> System:
    """This engine as it is: the device reads its whole pool; the host computes gates first where some are zero."""
    return System(policy=policy, config=config, skips=skips, gate_first=activation.has_zeros and not dense)


def mlp_bytes(weights: Weights) -> float:
    """The paper's predictors of all layers, at the model's precision."""
    return MLP_SHARE.get(weights.spec.layers, MLP_USUAL) * weights.parameters * weights.bytes_of_one


def gate_bytes(weights: Weights, bits: int) -> float:
    """Low-bit copies of the gates of all layers."""
    spec = weights.spec
    return spec.layers * spec.ffn * spec.hidden * (bits + GROUP_BITS) / 8


def pool_bytes(weights: Weights, hardware: Hardware, context: int, predictors: float) -> float:
    """What is left of the device for neurons, with a cache for `context` tokens."""
    room = hardware.device_bytes - hardware.reserved_bytes
    return max(0.0, room - weights.dense - weights.cache(context) - predictors)


def shipped_frequency(frequency: F32) -> F32:
    """What PowerInfer's released placement believes: of every layer the frequencies of another (its issue 247).

    Files are taken in the order of their names, so that activation_10 comes before activation_2.
    """
    return frequency[sorted(range(len(frequency)), key=str)]


def shipped_share(weights: Weights) -> float:
    """Of the memory for neurons, what PowerInfer's released placement fills: it takes n_ff x 4.5 / 4 for a neuron."""
    spec = weights.spec
    return min(1.0, 3 * spec.hidden / (spec.ffn * 4.5 / 4))


def place(weights: Weights, activity: Activity, pool: float, how: Literal["static", "equal", "shipped"]) -> Placement:
    """The neurons that start on the device, of `pool` bytes."""
    unit = int(weights.unit * activity.stride)
    if how == "shipped":
        return place_static(shipped_frequency(activity.frequency), unit, int(pool * shipped_share(weights)))
    return (place_equal if how == "equal" else place_static)(activity.frequency, unit, int(pool))


def bound_s(load: Load, hardware: Hardware, activity: Activity, slots: tuple[int, ...]) -> float:
    """Seconds of a token if all were known beforehand and moving were free: live neurons alone, split at best.

    Reading bytes at the machine's rates is all that takes time; both sides work at once, layers one after the other.
    """
    stride, rate = activity.stride, hardware.host_rate(load.dtype)
    device_s, host_s = load.unit * stride / hardware.device_bps, load.host_unit * stride / rate
    fixed = (load.layers * load.attention + load.head) / hardware.device_bps
    total, tokens = 0.0, 0
    for run in activity.runs:
        live = run.live.sum(axis=2, dtype=np.int64)  # [T, L]
        split = live * host_s / (device_s + host_s)  # both sides end together
        hot = np.minimum(split, slots)
        total += float(np.maximum(hot * device_s, (live - hot) * host_s).sum())
        context = run.prompt_tokens + np.arange(run.tokens) + 1
        total += float(context.sum()) * load.layers * load.kv_token / hardware.device_bps
        tokens += run.tokens
    return fixed + total / tokens
