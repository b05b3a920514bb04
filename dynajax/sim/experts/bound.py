"""What no policy can exceed on a machine, with as many slots and all of the future known. NumPy only.

A layer-step takes at least the longer of its two sides. Relaxed, in favour of speed: in every step the G experts that
are worth most to the device are in a layer's slots for nothing; the link may bring any others at any time, even long
before, so that only all copies of a run together must fit into its time; nothing has fixed costs; experts may be split.
With c a copy's seconds and t(n) a layer-step's least time if n experts were copied for it, T >= sum t(n) and
T >= c sum n, so that for every price m >= 0 of a second of the link T (1 + m) >= sum of min over n of t(n) + m c n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynajax.policy.experts.records import F64, Ints
from dynajax.sim.experts.activity import MixtureActivity, MixtureRun
from dynajax.sim.experts.shapes import MixtureLoad
from dynajax.sim.experts.sides import Sides
from dynajax.sim.hardware import Hardware

PRICES = (0.0, *np.geomspace(0.02, 50, 18).tolist())


@dataclass(frozen=True, slots=True)
class MixtureBound:
    """Tokens a second; prefill None: there was no prompt."""

    decode_tok_s: float
    prefill_tok_s: float | None


def bound_of(load: MixtureLoad, hardware: Hardware, activity: MixtureActivity, slots: tuple[int, ...]) -> MixtureBound:
    """Of all runs together; slots [M]: of the pool."""
    sides = Sides.of(load, hardware)
    seconds = tokens = prompt_s = prompt_tokens = 0.0
    for run in activity.runs:
        dense_s = sum(_dense_s(load, hardware, int(rows), _cached(run, step)) for step, rows in enumerate(run.rows))
        seconds += least_s(run.steps, slots, sides, dense_s)
        tokens += float(run.rows.sum())
        for prompt in run.prompts:
            dense_s = _dense_s(load, hardware, prompt.tokens, prompt.tokens, last_only=True)
            prompt_s += least_s(prompt.counts[None], slots, sides, dense_s)
            prompt_tokens += prompt.tokens
    return MixtureBound(tokens / seconds, prompt_tokens / prompt_s if prompt_s else None)


def _cached(run: MixtureRun, step: int) -> int:
    """Tokens of context of all rows."""
    return int(run.rows[step]) * (run.context + step + 1)


def _dense_s(load: MixtureLoad, hardware: Hardware, tokens: int, cached: int, *, last_only: bool = False) -> float:
    """All that is not an expert: the longer of reading and computing, program by program; last_only: one logit row."""
    programs = [(load.attend + cached * load.kv_token, tokens * load.attend_flops)] * load.layers
    programs += [(size, tokens * flops) for size, flops in zip(load.always, load.always_flops, strict=True)]
    programs.append((load.head, (1 if last_only else tokens) * load.head_flops))
    return sum(max(size / hardware.device_bps, flops / hardware.device_flops) for size, flops in programs)


def least_s(steps: Ints, slots: tuple[int, ...], sides: Sides, dense_s: float) -> float:
    """Seconds that these layer-steps [S, M, E] and `dense_s` take at least."""
    tokens = -np.sort(-np.asarray(steps, np.int64), axis=2)  # heaviest first
    live = tokens > 0
    device, host = np.where(live, sides.device_s(tokens), 0.0), np.where(live, sides.host_s(tokens), 0.0)
    split = _split_s(device, host)
    rest = np.cumsum(host[..., ::-1], axis=2)[..., ::-1]  # of this one and all lighter ones
    rest = np.concatenate((rest, np.zeros_like(rest[..., :1])), axis=2)
    copy_s, best = sides.copy_fixed_s + sides.copy_busy_s, 0.0
    units = steps.shape[2]
    extra = np.maximum(np.arange(units + 1) - np.asarray(slots)[:, None], 0)  # [M, E + 1] copies for that many there
    least = np.maximum(rest, split[..., None])
    for price in PRICES:
        total = float((least + price * copy_s * extra).min(axis=2).sum())
        best = max(best, (total + dense_s) / (1 + price))
    return best


def _split_s(device: F64, host: F64) -> F64:
    """[...] least time of both sides for experts [..., E] that may be split between them, those first on the device to
    which it is worth most."""
    order = np.argsort(-host / np.maximum(device, 1e-300), axis=-1, kind="stable")
    device, host = np.take_along_axis(device, order, -1), np.take_along_axis(host, order, -1)
    there = np.cumsum(device, axis=-1)
    here = host.sum(axis=-1, keepdims=True) - np.cumsum(host, axis=-1)
    at = np.argmax(there >= here, axis=-1)[..., None]  # the expert that is split
    d, h = np.take_along_axis(device, at, -1), np.take_along_axis(host, at, -1)
    before = np.take_along_axis(there, at, -1) - d
    left = np.take_along_axis(here, at, -1) + h
    share = np.clip((left - before) / np.maximum(d + h, 1e-300), 0.0, 1.0)
    return (before + share * d)[..., 0]
