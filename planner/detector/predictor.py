"""The healthy time of an action from its workload: alpha * tokens + beta * sum of squared sequence lengths.

One pair (alpha, beta) for each stage and kind of action (the form is that of ResiHP, arXiv 2605.06374: matrix products
grow with the tokens of a packed micro-batch, attention with the squares of its sequences). The pairs start from the
cost model and are refined by recursive least squares on relative errors, so that short and long micro-batches count
alike; how far the start is to be trusted is its `prior_error`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cost_models.workload import Workload
from ...plans import RequestError

__all__ = ["StagePredictor", "workload", "workload_prior"]

# A measured action is off by about this much for reasons of its own; it sets how fast the start is forgotten.
_ACTION_NOISE = 0.02
# A flat start: so much, relatively, per coefficient.
_UNKNOWN = 1e3


def workload(lengths: Sequence[int]) -> tuple[float, float]:
    """Tokens and sum of squares of the sequences packed into one micro-batch."""
    return float(sum(lengths)), float(sum(length * length for length in lengths))


def workload_prior(step: Workload, shares: np.ndarray, *, tokens: int, **sizes: float) -> np.ndarray:
    """Coefficients of (kinds, stages, 2) from a priced step (`workload_of`), for `StagePredictor` and `Detector`.

    step      a planned step whose `sequence` symbol is the length of one sequence
    shares    of the step's time, what each kind of action on each stage takes, shape (kinds, stages)
    tokens    tokens of one micro-batch; it is priced as one sequence and as several of equal length
    sizes     the other symbols of the step, such as batch=1

    Raises RequestError for shares that are no shares, and as `Workload.packed_s`.
    """
    split = np.asarray(shares, np.float64)
    if split.ndim != 2 or not (split >= 0).all() or not 0 < split.sum() <= 1 + 1e-9:
        raise RequestError(f"'shares' must be shares of (kinds, stages) that sum to at most 1, got {split.tolist()}")
    packs = [[tokens // parts] * parts for parts in (1, 2, 4, 8) if tokens >= 8 * parts]
    if not packs:
        raise RequestError(f"'tokens' must be at least 8, got {tokens}; give those of a micro-batch")
    work = np.array([workload(pack) for pack in packs])
    seconds = np.array([step.packed_s(pack, **sizes) for pack in packs])
    # Time per token is alpha + beta * mean length: two equations whose unknowns are never below 0.
    lengths = work[:, 1] / work[:, 0]
    beta = max(0.0, float(np.polyfit(lengths, seconds / work[:, 0], 1)[0])) if len(packs) > 1 else 0.0
    alpha = max(0.0, float((seconds / work[:, 0] - beta * lengths).mean()))
    return split[..., None] * np.array([alpha, beta])


class StagePredictor:
    """Coefficients of every kind of action and stage, fitted online. All replicas share them."""

    def __init__(self, kinds: int, stages: int, *, prior: np.ndarray | None = None, prior_error: float = 0.1) -> None:
        """prior: seconds per token and per squared token, shape (kinds, stages, 2), e.g. from a cost model.

        prior_error: how far, relatively, the prior may be off.
        """
        if prior is not None and prior.shape != (kinds, stages, 2):
            raise RequestError(f"'prior' must have the shape ({kinds}, {stages}, 2), got {prior.shape}")
        if prior is not None and not (np.isfinite(prior).all() and (prior >= 0).all()):
            raise RequestError("'prior' must hold seconds of at least 0, got others")
        self.known = prior is not None
        self.coefficients = np.zeros((kinds, stages, 2)) if prior is None else np.array(prior, float)
        self._prior, self._error = self.coefficients.copy(), prior_error
        self._normal = np.zeros(0)
        self._moment = np.zeros((kinds, stages, 2))
        self._scale = np.ones(2)

    def times(self, work: np.ndarray) -> np.ndarray:
        """Healthy seconds of every action; work (replicas, micro-batches, 2) gives (replicas, kinds, stages, ...)."""
        return np.einsum("ksc,dmc->dksm", self.coefficients, work)

    def learn(self, work: np.ndarray, seconds: np.ndarray, healthy: np.ndarray) -> None:
        """Refine by one step. seconds: (replicas, kinds, stages, micro-batches); healthy: (replicas, stages) to use."""
        if not self._normal.size:
            self._begin(work)
        expected = self.times(work)
        # Relative errors, against what was expected, or where nothing is known yet against what was seen.
        base = np.where(expected > 0, expected, seconds) if self.known else seconds
        weight = healthy[:, None, :, None] / np.maximum(base, 1e-12) ** 2 / _ACTION_NOISE**2
        scaled = work / self._scale
        self._normal += np.einsum("dksm,dmc,dme->ksce", weight, scaled, scaled)
        self._moment += np.einsum("dksm,dmc,dksm->ksc", weight, scaled, seconds)
        solved: np.ndarray = np.linalg.solve(self._normal, self._moment[..., None])
        self.coefficients = np.maximum(solved[..., 0] / self._scale, 0)
        self.known = True

    def _begin(self, work: np.ndarray) -> None:
        """Least squares start as if the prior had been measured, to within its error, at the first workload."""
        self._scale = np.maximum(work.reshape(-1, 2).mean(axis=0), 1e-12)
        prior = self._prior * self._scale
        # An entry of the prior may be 0 (no attention): what it is unsure by is then a share of the whole.
        spread = np.maximum(prior, 0.1 * prior.sum(axis=2, keepdims=True)) * self._error
        if not self.known:
            spread = np.full_like(prior, _UNKNOWN)
        precision = 1.0 / np.maximum(spread, 1e-12) ** 2
        self._normal = precision[..., None] * np.eye(2)
        self._moment = precision * prior
