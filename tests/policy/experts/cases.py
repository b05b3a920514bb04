"""Random layer-steps, and two optima that share nothing with the policies: all choices, and an integer program."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from dynajax.policy.experts.records import ExpertCosts, Work, makespan

# An expert of Qwen3-30B-A3B in 16 bits: PCIe 25 GB/s, host 50 GB/s and 0.8 TFLOP/s, device 800 GB/s and 60 TFLOP/s.
COSTS = ExpertCosts(
    t0_s=1e-5, t_trans_s=3.8e-4, gpu_s=1.2e-5, gpu_token_s=1.6e-7, cpu_s=1.9e-4, cpu_token_s=1.2e-5, t_sync_s=5e-5
)


def work_of(tokens, resident, room=99, **more):
    tokens, resident = np.array(tokens), np.array(resident, np.bool_)
    return Work(experts=np.arange(len(tokens), dtype=np.int32), tokens=tokens, resident=resident, room=room, **more)


def draw_costs(rng):
    """Every cost over one to two and a half powers of ten, so that either side may be the slower one."""

    def between(low, high):
        return float(10 ** rng.uniform(low, high))

    return ExpertCosts(
        t0_s=between(-6, -4),
        t_trans_s=between(-4, -2),
        gpu_s=between(-5, -3),
        gpu_token_s=between(-7, -4.5),
        cpu_s=between(-4.5, -3),
        cpu_token_s=between(-6, -3.5),
        t_sync_s=between(-6, -4),
    )


def draw_work(rng, live):
    """Tokens all one, few, many or skewed; any share resident, any room; half a busy link, a quarter a busy host."""
    tokens = (
        np.ones(live, np.int64),
        rng.integers(1, 5, live),
        rng.integers(1, 200, live),
        np.maximum(1, rng.lognormal(1, 1.5, live).astype(np.int64)),
    )[rng.integers(4)]
    return work_of(
        tokens,
        rng.random(live) < rng.random(),
        room=int(rng.integers(0, live + 1)),
        copy_busy_s=float(10 ** rng.uniform(-4, -2)) if rng.random() < 0.5 else 0.0,
        host_busy_s=float(10 ** rng.uniform(-4, -2.5)) if rng.random() < 0.25 else 0.0,
    )


def all_choices(work):
    """[n, A] every assignment that keeps to the room."""
    live = len(work.tokens)
    on_gpu = ((np.arange(2**live)[:, None] >> np.arange(live)) & 1).astype(np.bool_)
    return on_gpu[np.count_nonzero(on_gpu & ~work.resident, axis=1) <= work.room]


def optimum(work, costs):
    """The least makespan of all choices."""
    return float(makespan(work, all_choices(work), costs).min())


def milp_bound(work, costs, gap=1e-3, seconds=5.0):
    """A proven lower bound of the least makespan, by HiGHS.

    Experts of a class with equal tokens are one whole variable; of the flow shop there is one row for each number of
    tokens w: busy + copy (fetched with >= w) + gpu(w) if one has w + gpu of the lighter ones <= makespan.
    """
    groups = {}
    for tokens, resident in zip(work.tokens.tolist(), work.resident.tolist(), strict=True):
        groups[resident, -tokens] = groups.get((resident, -tokens), 0) + 1
    keys = sorted(groups)  # absent ones first, heaviest first
    count = np.array([groups[key] for key in keys], np.float64)
    absent = np.array([not key[0] for key in keys])
    tokens = np.array([-key[1] for key in keys], np.float64)
    n, unit = len(keys), float(count @ costs.cpu(tokens)) + work.host_busy_s
    gpu, cpu = costs.gpu(tokens) / unit, costs.cpu(tokens) / unit
    copy, busy, host, sync = (s / unit for s in (costs.copy_s, work.copy_busy_s, work.host_busy_s, costs.t_sync_s))
    # variables: x [n] on the device, used [n], any fetch, any on the host, makespan
    rows, high = [], []

    def row(limit, x=0.0, used=0.0, fetch=0.0, on_host=0.0, span=0.0):
        rows.append(np.concatenate((np.zeros(n) + x, np.zeros(n) + used, [fetch, on_host, span])))
        high.append(limit)

    row(-(count @ cpu) - host, x=-cpu, on_host=sync, span=-1)
    row(0, x=gpu, span=-1)
    row(work.room, x=absent.astype(np.float64))
    row(0, x=absent * gpu, fetch=busy + copy, span=-1)
    for i in range(n):
        one = np.eye(n)[i]
        row(-1, x=-one / count[i], on_host=-1)  # on_host >= 1 - x / count
        if absent[i]:
            row(0, x=-one, used=one)
            row(0, x=one, used=-count[i] * one)
            row(0, used=one, fetch=-1)
            heavier = absent & (np.arange(n) <= i)
            lighter = absent & (np.arange(n) > i)
            row(0, x=heavier * copy + lighter * gpu, used=one * gpu[i], fetch=busy, span=-1)
    if work.host_busy_s:
        row(-1, on_host=-1)
    goal = np.zeros(2 * n + 3)
    goal[-1] = 1
    whole = np.append(np.ones(2 * n + 2), 0)
    limits = Bounds(0, np.concatenate((count, np.ones(n + 2), [np.inf])))
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), ub=np.array(high)),
        integrality=whole,
        bounds=limits,
        options={"mip_rel_gap": gap, "time_limit": seconds},
    )
    assert found.mip_dual_bound is not None, found.message
    return found.mip_dual_bound * unit
