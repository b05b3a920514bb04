"""What the host kernels must compute: float64 NumPy, obvious, slow."""

import numpy as np
import numpy.typing as npt

from hostcompute.packed import widened


def activate(g: np.ndarray, activation: str, threshold: float) -> np.ndarray:
    """The activation of the gate, in the dtype of `g`. fatrelu keeps values from the threshold on, unshifted.

    dReLU takes the relu of up as well, see `ffn_reference`.
    """
    if activation in ("relu", "drelu"):
        return np.where(g <= 0, 0, g)
    if activation == "fatrelu":
        return np.where(g < threshold, 0, g)
    if activation == "silu":
        with np.errstate(over="ignore"):
            return g / (1 + np.exp(-g))
    raise ValueError(f"activation must be relu, fatrelu, silu or drelu, got {activation!r}")


def ffn_reference(
    x: npt.NDArray[np.float32],  # [B,D]
    bundle: np.ndarray,  # [n,P,W,D], or packed [n,P,W,groups,bytes]
    units: npt.NDArray[np.int32],  # [C]
    activation: str,
    threshold: float = 0.0,
    admit: npt.NDArray[np.uint8] | None = None,  # [B,C]
    weights: npt.NDArray[np.float32] | None = None,  # [B,C]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The FFN over the chosen units: y [B,D], and live [B,C]: a row of the unit has a non-zero activation.

    With drelu that is relu(gate) * relu(up). A unit named twice counts twice. Where `admit` is 0 the unit is zero for
    that row of x. With `weights` a unit's share of a row is multiplied with its weight; one of weight 0 has no part in
    the row, whatever it holds.
    """
    h, live = values_reference(x, bundle, units, activation, threshold, admit, weights)
    down = widened(bundle[units, -1]).astype(np.float64)  # [C,W,D]
    if weights is None:
        return np.einsum("BCW,CWD->BD", h, down), live
    y = np.zeros(x.shape)
    for c, wanted in enumerate(wanted_pairs(weights, admit).T):
        y[wanted] += h[wanted, c] @ down[c]
    return y, live


def wanted_pairs(
    weights: npt.NDArray[np.float32],  # [B,C]
    admit: npt.NDArray[np.uint8] | None,  # [B,C]
) -> npt.NDArray[np.bool_]:
    """[B,C]: the unit has a part in the row."""
    return (weights != 0) if admit is None else (weights != 0) & (admit != 0)


def values_reference(
    x: npt.NDArray[np.float32],  # [B,D]
    bundle: np.ndarray,  # [n,P,W,D]
    units: npt.NDArray[np.int32],  # [C]
    activation: str,
    threshold: float = 0.0,
    admit: npt.NDArray[np.uint8] | None = None,  # [B,C]
    weights: npt.NDArray[np.float32] | None = None,  # [B,C]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """What the down rows are multiplied with, [B,C,W]; and live as `ffn_reference` has it."""
    if activation == "drelu" and bundle.shape[1] != 3:
        raise ValueError(f"bundle must have 3 parts (gate, up, down) with drelu, got {bundle.shape[1]}")
    chosen = widened(bundle[units]).astype(np.float64)  # [C,P,W,D]
    x64 = x.astype(np.float64)
    h = activate(np.einsum("BD,CWD->BCW", x64, chosen[:, 0]), activation, threshold)
    if weights is not None:
        h = np.where(wanted_pairs(weights, admit)[:, :, None], h, 0)
    elif admit is not None:
        h = np.where(admit[:, :, None] != 0, h, 0)
    live = h != 0
    if bundle.shape[1] == 3:
        up = np.einsum("BD,CWD->BCW", x64, chosen[:, 1])
        h = np.where(h == 0, 0, h * (activate(up, "relu", 0.0) if activation == "drelu" else up))
    if activation == "drelu":
        live = h != 0
    if weights is not None:
        h = np.where(h == 0, 0, h * weights[:, :, None].astype(np.float64))
    return h, live.any(axis=2)


def gather_reference(bundle: np.ndarray, units: npt.NDArray[np.int32]) -> np.ndarray:
    """The chosen units, copied one after another: [C,P,W,D]."""
    return bundle[units]
