"""From what a router chose to what `HostPool.ffn` takes as weights."""

import numpy as np
import numpy.typing as npt

from hostcompute.checks import check_array


def unit_weights(
    ids: npt.NDArray[np.int32],  # [B,K]
    weights: npt.NDArray[np.float32],  # [B,K]
    units: npt.NDArray[np.int32],  # [C]
    experts: int,  # E
) -> npt.NDArray[np.float32]:
    """What each row gives to each of the units, [B,C]: the sum of its weights for that expert, 0 for all others.

    Experts that are not among the units count for nothing here. ValueError for an id outside [0, E). Example: ids
    [[2, 0]], weights [[0.7, 0.3]], units [1, 2] give [[0, 0.7]].
    """
    check_array("units", units, np.dtype(np.int32), (None,))
    check_array("ids", ids, np.dtype(np.int32), (None, None))
    check_array("weights", weights, np.dtype(np.float32), ids.shape)
    for name, given in (("units", units), ("ids", ids)):
        outside = given[(given < 0) | (given >= experts)]
        if outside.size:
            raise ValueError(f"{name} must be in [0, {experts}), got {outside[0]}")
    position = np.full(experts, -1)
    position[units] = np.arange(len(units))
    columns = position[ids]
    rows, choices = np.nonzero(columns >= 0)
    result = np.zeros((len(ids), len(units)), np.float32)
    np.add.at(result, (rows, columns[rows, choices]), weights[rows, choices])
    return result
