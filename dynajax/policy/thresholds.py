"""From which score a neuron is computed, on the device and on the host. NumPy only.

Err, the paper's error constraint, as we define it: the activation mass that is expected to be skipped,

    Err(theta_g, theta_c) = sum of p_i * m_i over units on the device with score < theta_g,
                          + sum of p_i * m_i over units on the host with score < theta_c,

p_i = score / 255 the calibrated probability that unit i is live, m_i = E |act_i| * |down row i| where it is live, from
statistics, 1 where those are unknown. Masses are whole multiples of 1/256 of their mean, so every sum is
exact and the bound holds exactly, whatever the order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynajax.policy.costs import Costs

SCORES = 256
MASS_ONE = 256
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

_SCORE = np.arange(SCORES, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Side:
    """One side's units by score: how many reach a threshold, and what is skipped below it."""

    reaching: F64  # [256] threshold -> units that are computed
    skipped: F64  # [256] threshold -> sum of score * mass of those that are not; whole numbers


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Scores from which units are computed, and how many are."""

    theta_g: int
    theta_c: int
    n_gpu: int
    n_cpu: int


def whole_masses(mass: npt.NDArray | None, units: int) -> F64:
    """m [F] in units of 1/256 of its mean, rounded; ones where it is unknown or all zero."""
    if mass is None or not mass.any():
        return np.full(units, MASS_ONE, np.float64)
    return np.rint(mass.astype(np.float64) * (MASS_ONE / mass.mean(dtype=np.float64)))


def sides(scores: U8, on_host: npt.NDArray[np.bool_], mass: F64) -> tuple[Side, Side]:
    """(device, host) of units with scores [F] and whole masses [F]."""
    bins = (scores | (on_host.astype(np.uint16) << 8)).astype(np.intp)  # a histogram for each side, by score
    count = np.bincount(bins, minlength=2 * SCORES).reshape(2, SCORES)
    masses = np.bincount(bins, weights=mass, minlength=2 * SCORES).reshape(2, SCORES) * _SCORE
    reaching = np.cumsum(count[:, ::-1], axis=1)[:, ::-1].astype(np.float64)
    skipped = np.cumsum(masses, axis=1) - masses
    return Side(reaching[0], skipped[0]), Side(reaching[1], skipped[1])


def theta_of_density(scores: U8, density: float) -> int:
    """The lowest threshold that no more than this share of the units reaches."""
    reaching = np.cumsum(np.bincount(scores, minlength=SCORES)[::-1])[::-1]
    fits = np.flatnonzero(reaching <= density * len(scores))
    return int(fits[0]) if len(fits) else SCORES - 1


def balance(device: Side, host: Side, theta: int, costs: Costs, err_scale: float) -> Thresholds:
    """The theta_g <= theta and theta_c >= theta with the least max(t_gpu * N_g, t_cpu * N_c + t_sync).

    Subject to Err(theta_g, theta_c) <= err_scale * Err(theta, theta). The paper walks greedily from theta; here all
    pairs are searched: for each theta_c the best theta_g is the largest that the bound allows. Of pairs with equal
    times the lowest theta_c. With err_scale < 1, theta itself is outside the bound and theta_c may be lower, too.
    """
    bound = np.floor(err_scale * (device.skipped[theta] + host.skipped[theta]))
    theta_c = np.arange(theta if err_scale >= 1 else 0, SCORES)
    theta_c = theta_c[host.skipped[theta_c] <= bound]
    room = bound - host.skipped[theta_c]
    theta_g = np.searchsorted(device.skipped[: theta + 1], room, side="right") - 1
    n_gpu, n_cpu = device.reaching[theta_g], host.reaching[theta_c]
    best = int(np.argmin(np.maximum(costs.t_gpu_s * n_gpu, costs.t_cpu_s * n_cpu + costs.t_sync_s)))
    return Thresholds(int(theta_g[best]), int(theta_c[best]), int(n_gpu[best]), int(n_cpu[best]))
