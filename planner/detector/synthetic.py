"""Packed workloads and the times of a job that runs them: what a detector is tried on. Seeded and deterministic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...cost_models.pipeline.critical_path import CriticalPath
from ...plans import RequestError

__all__ = ["DISTRIBUTIONS", "JobRun", "packed"]

# Median length and spread of the logarithm, shortest allowed; mixtures by their shares. Code files and web text are
# heavy-tailed; dialogues are short; documents nearly fill a sequence.
DISTRIBUTIONS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "code": ((1.0, 900.0, 1.5),),
    "web": ((0.85, 700.0, 1.0), (0.15, 6000.0, 1.0)),
    "chat": ((1.0, 400.0, 0.7),),
    "documents": ((0.5, 2000.0, 0.8), (0.5, 20000.0, 0.9)),
}


def packed(rng: np.random.Generator, distribution: str, tokens: int, shape: tuple[int, ...]) -> np.ndarray:
    """Workloads of packed micro-batches of `tokens` tokens, shape (*shape, 2): tokens and sum of squared lengths."""
    if distribution not in DISTRIBUTIONS:
        raise RequestError(f"'distribution' must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    shares, medians, spreads = (np.array(column) for column in zip(*DISTRIBUTIONS[distribution], strict=True))
    out = np.zeros((*shape, 2))
    # Lengths are drawn in blocks that mostly fill a micro-batch.
    block = max(8, int(2 * tokens / (shares @ medians)))
    for place in np.ndindex(*shape):
        lengths = np.zeros(0)
        while lengths.sum() < tokens:
            part = rng.choice(len(shares), size=block, p=shares)
            drawn = medians[part] * np.exp(spreads[part] * rng.standard_normal(block))
            lengths = np.concatenate([lengths, np.floor(np.clip(drawn, 16, tokens))])
        ends = np.minimum(np.cumsum(lengths), tokens)
        out[place] = tokens, np.square(np.diff(ends, prepend=0.0)).sum()
    return out


class JobRun:
    """A job whose true times are known: linear in the workload, with noise, and with devices made slow on demand."""

    def __init__(
        self,
        path: CriticalPath,
        replicas: int,
        *,
        tokens: int,
        distribution: str = "code",
        seed: int = 0,
        action_noise: float = 0.012,
        step_noise: float = 0.01,
        quadratic_at: float = 30_000.0,
        constant_s: float = 0.3,
    ) -> None:
        """quadratic_at: the sequence length at which attention takes as long as all the rest."""
        self.path, self.replicas, self.tokens, self.distribution = path, replicas, tokens, distribution
        self.rng = np.random.default_rng(seed)
        self.action_noise, self.step_noise, self.constant_s = action_noise, step_noise, constant_s
        shares = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        alpha = np.array([shares[kind] for kind in path.kinds])[:, None] * (0.1 / 8192)
        alpha = alpha * (1 + 0.05 * self.rng.standard_normal((1, path.stages)))
        self.coefficients = np.stack([alpha, alpha / quadratic_at], axis=2)

    def step(self, slow: Mapping[tuple[int, int], float] | None = None) -> tuple[np.ndarray, np.ndarray, float]:
        """Workloads, action times and step time of one step; slow: factors on the times of (replica, stage)."""
        path = self.path
        work = packed(self.rng, self.distribution, self.tokens, (self.replicas, path.microbatches))
        times = np.einsum("ksc,dmc->dksm", self.coefficients, work)
        for (replica, stage), factor in (slow or {}).items():
            times[replica, :, stage] *= factor
        times = times * np.exp(self.action_noise * self.rng.standard_normal(times.shape))
        step_s = float(path.lengths(times).max()) + self.constant_s
        return work, times, step_s * float(np.exp(self.step_noise * self.rng.standard_normal()))
