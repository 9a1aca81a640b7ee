"""Which device gets which part of which layer from whom, compiled: what `state_moves` counts.

A row says that `device` holds (or will hold) the part `low` to `high` of each layer from `first` to before `end`."""

from __future__ import annotations

import numpy as np

from ...cost_models.pipeline.kernel import compiled

__all__ = ["ROW", "fetched", "holding", "listed"]

# device, first layer, end layer, number of the part.
ROW = 4
# Shares of a layer below this are rounding.
_LEAST = 1e-9


@compiled
def holding(rows: np.ndarray, node_of: np.ndarray, own: np.ndarray, counts: np.ndarray, nearest: np.ndarray) -> None:
    """Fill what is known of holders: own[device, layer] is its part's number, counts[layer, part] how many hold it,
    nearest[layer, part, node] the first of that node."""
    for at in range(rows.shape[0]):
        device, part = rows[at, 0], rows[at, 3]
        node = node_of[device]
        for layer in range(rows[at, 1], rows[at, 2]):
            own[device, layer] = part
            counts[layer, part] += 1
            if nearest[layer, part, node] < 0:
                nearest[layer, part, node] = device


@compiled
def listed(rows: np.ndarray, firsts: np.ndarray, filled: np.ndarray, donors: np.ndarray) -> None:
    """The holders of each layer's part in the order of rows: donors[firsts[layer, part]:]."""
    for at in range(rows.shape[0]):
        part = rows[at, 3]
        for layer in range(rows[at, 1], rows[at, 2]):
            donors[firsts[layer, part] + filled[layer, part]] = rows[at, 0]
            filled[layer, part] += 1


@compiled
def fetched(
    rows: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    parts: np.ndarray,
    sizes: np.ndarray,
    node_of: np.ndarray,
    own: np.ndarray,
    counts: np.ndarray,
    nearest: np.ndarray,
    firsts: np.ndarray,
    donors: np.ndarray,
    turns: np.ndarray,
    near: np.ndarray,
    far: np.ndarray,
    given: np.ndarray,
    missing: np.ndarray,
) -> None:
    """Add up what devices take in from their node (near) and from others (far), give to other nodes, and find nowhere.

    `low` and `high` are the ends of the rows' parts, `parts` those of the parts that are held, ascending."""
    for at in range(rows.shape[0]):
        device = rows[at, 0]
        node = node_of[device]
        for layer in range(rows[at, 1], rows[at, 2]):
            mine = own[device, layer]
            mine_low = parts[mine, 0] if mine >= 0 else 0.0
            mine_high = parts[mine, 1] if mine >= 0 else 0.0
            for side in range(2):
                begin = low[at] if side == 0 else max(low[at], mine_high)
                end = min(high[at], mine_low) if side == 0 else high[at]
                while begin < end - _LEAST:
                    held, after = -1, end
                    for part in range(parts.shape[0]):
                        if counts[layer, part] == 0:
                            continue
                        if parts[part, 0] <= begin + _LEAST and parts[part, 1] > begin + _LEAST:
                            held = part
                            break
                        if parts[part, 0] > begin and parts[part, 0] < after:
                            after = parts[part, 0]
                    if held < 0:
                        missing[device] += (after - begin) * sizes[layer]
                        begin = after
                        continue
                    stop = min(end, parts[held, 1])
                    donor = nearest[layer, held, node]
                    if donor < 0:
                        turn = turns[layer, held]
                        turns[layer, held] = turn + 1
                        donor = donors[firsts[layer, held] + turn % counts[layer, held]]
                    size = (stop - begin) * sizes[layer]
                    if node_of[donor] == node:
                        near[device] += size
                    else:
                        far[device] += size
                        given[donor] += size
                    begin = stop
