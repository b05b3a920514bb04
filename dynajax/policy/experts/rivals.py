"""Assignments of other systems, each as its sources describe it, on the same record of work and costs. NumPy only.

All keep to `room`; what finds no room is computed by the host.
"""

from __future__ import annotations

import math

import numpy as np

from dynajax.policy.experts.records import F64, Assignment, Bools, ExpertCosts, Work, assigned


def resident(work: Work, costs: ExpertCosts) -> Assignment:
    """Residents on the device, absent experts on the host: KTransformers' and llama.cpp's static split."""
    return assigned(work, work.resident.copy())


def fetch_all(work: Work, costs: ExpertCosts) -> Assignment:
    """Everything on the device, on demand (mixtral-offloading, MoE-Infinity); the heaviest ones if room is short."""
    return assigned(work, work.resident | _best(~work.resident, work.tokens, work.room))


def per_expert(work: Work, costs: ExpertCosts) -> Assignment:
    """Each absent expert goes where it takes less time by itself (Fiddler, arXiv 2402.07033, Algorithm 1).

    Fiddler's code (commit 227715b) tries all splits and keeps the smallest sum of times, which is the same, though a
    comment there promises the smaller maximum. If room is short, those that gain most are fetched.
    """
    gain_s = costs.cpu(work.tokens) - costs.gpu(work.tokens) - costs.copy_s
    return assigned(work, work.resident | _best(~work.resident & (gain_s > 0), gain_s, work.room))


def dali(work: Work, costs: ExpertCosts) -> Assignment:
    """Greedy: by falling difference of host and device time, each expert on the side that then ends lower.

    DALI (arXiv 2602.03495) as third-party notes describe it; its own pseudo-code was not available. Device time is a
    plain sum, with the transfer for absent experts; no pipeline, no earlier transfers, no t_sync_s. Ties: the device.
    """
    device = costs.gpu(work.tokens) + np.where(work.resident, 0.0, costs.copy_s)
    host = costs.cpu(work.tokens)
    order = np.argsort(device - host, kind="stable")
    on_gpu = np.zeros(len(order), np.bool_)
    room, device_s, host_s = work.room, 0.0, 0.0
    rows = zip(order.tolist(), device[order].tolist(), host[order].tolist(), work.resident[order].tolist(), strict=True)
    for place, more_device_s, more_host_s, is_resident in rows:
        if (is_resident or room) and device_s + more_device_s <= host_s + more_host_s:
            on_gpu[place] = True
            device_s += more_device_s
            room -= not is_resident
        else:
            host_s += more_host_s
    return assigned(work, on_gpu)


def two_ended(work: Work, costs: ExpertCosts) -> Assignment:
    """A queue of residents and then absent experts, heaviest first: the device takes from its head, the host from its
    tail, whichever would be done with its next one first (HybriMoE, arXiv 2504.05897, section 4.2).

    Transfers run ahead of the device. Ties: the device. Without room for its next one the device takes no more.
    """
    order = np.lexsort((-work.tokens, ~work.resident))
    device, host = costs.gpu(work.tokens)[order].tolist(), costs.cpu(work.tokens)[order].tolist()
    residents = int(np.count_nonzero(work.resident))
    head, tail = 0, len(order) - 1
    device_s, link_s, host_s = 0.0, work.copy_busy_s, work.host_busy_s + costs.t_sync_s
    while head <= tail:
        begin_s = device_s
        if head >= residents:
            begin_s = max(device_s, link_s + costs.copy_s) if head - residents < work.room else math.inf
        if begin_s + device[head] <= host_s + host[tail]:
            device_s = begin_s + device[head]
            link_s += costs.copy_s if head >= residents else 0.0
            head += 1
        else:
            host_s += host[tail]
            tail -= 1
    on_gpu = np.zeros(len(order), np.bool_)
    on_gpu[order[:head]] = True
    return assigned(work, on_gpu)


def two_ended_as_shipped(work: Work, costs: ExpertCosts) -> Assignment:
    """What HybriMoE's code does (commit 508a85b): it schedules steps of one token and sends all else to the device.

    A step of one token is taken to be one where no expert has two.
    """
    one_token = len(work.tokens) == 0 or work.tokens.max() == 1
    return two_ended(work, costs) if one_token else fetch_all(work, costs)


def bandwidth_split(work: Work, costs: ExpertCosts) -> Assignment:
    """Of the absent experts the fraction pcie / (pcie + cpu) is fetched, most recently used first (FreeToken, arXiv
    2608.16157, hybrid decode): the whole number beside it for which the slower side ends sooner.

    FreeToken measures gigabytes per second with both sides running; here an expert's bytes over the time that moving,
    or computing the mean of the absent ones, takes. It does not look at tokens otherwise.
    """
    absent = np.flatnonzero(~work.resident)
    fetches = 0
    if len(absent):
        cpu_s = float(costs.cpu(work.tokens[absent].mean()))
        fraction = cpu_s / (cpu_s + costs.copy_s)
        low = int(len(absent) * fraction)
        sides = [max(n * (1 - fraction), (len(absent) - n) * fraction) for n in (low, low + 1)]
        fetches = min(low if sides[0] <= sides[1] else low + 1, len(absent), work.room)
    last_used = np.zeros(len(work.tokens)) if work.last_used is None else work.last_used
    return assigned(work, work.resident | _best(~work.resident, last_used, fetches))


def _best(allowed: Bools, value: F64, count: int) -> Bools:
    """[A] the `count` allowed ones of the highest value; of equal ones those that stand first."""
    places = np.flatnonzero(allowed)
    chosen = np.zeros(len(allowed), np.bool_)
    chosen[places[np.argsort(-value[places], kind="stable")[:count]]] = True
    return chosen
