"""The detector: is a step slow because of its sequences, or because a device or a link is?

Every step is held against the time that it should take on healthy devices: each action's from its workload
(`StagePredictor`), the step's as the critical path of the schedule plus a constant (optimizer, data-parallel
collectives). Changes are told from the spread of the healthy residuals. Where the ranks' own action times are at hand,
every rank is watched by itself, which also finds what a step hides in its bubbles, and names the rank.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

import numpy as np

from ...cost_models.pipeline.critical_path import CriticalPath
from ...plans import Alarm, Report, RequestError
from .change import Change
from .predictor import StagePredictor

__all__ = ["Detector"]

# ResiHP's published rule: validate when a step takes over 1.25 times its healthy time.
_PAPER_RATIO = 1.25
# Steps after which the fit is taken for the truth; until then ranks are compared with each other.
_SETTLED = 5
_RESTS = 200
_STEP_LEAST, _RANK_LEAST, _LINK_LEAST = 0.012, 0.05, 0.15


class Detector:
    """Watches one job: `replicas` pipelines of one schedule (`path`).

    prior: coefficients of the cost model, see `StagePredictor`; constant_s: what a step takes beside the pipeline, None
    where the first healthy steps shall say it. mode 'paper': a step is slow when it takes over 1.25 times what was
    predicted; 'own': by the residuals' own spread.
    """

    def __init__(
        self,
        path: CriticalPath,
        replicas: int,
        *,
        prior: np.ndarray | None = None,
        prior_error: float = 0.1,
        constant_s: float | None = None,
        mode: Literal["own", "paper"] = "own",
    ) -> None:
        if mode not in ("own", "paper"):
            raise RequestError(f"'mode' must be own or paper, got {mode!r}")
        self.path, self.replicas, self.mode = path, replicas, mode
        self.predictor = StagePredictor(len(path.kinds), path.stages, prior=prior, prior_error=prior_error)
        self.constant_s = constant_s or 0.0
        # What healthy steps left over beside the pipeline; a given constant counts as a few of them.
        self._rests: deque[float] = deque([] if constant_s is None else [constant_s] * _SETTLED, maxlen=_RESTS)
        self._prior_error = prior_error
        self._absolute = prior_error if prior is not None and constant_s is not None else math.inf
        self.steps = Change((1,), guess=0.02, least=_STEP_LEAST, slack=1.25, threshold=10.0)
        self.ranks = Change((replicas, path.stages), guess=0.01, least=_RANK_LEAST)
        self.links = Change((replicas, max(1, path.stages - 1)), guess=0.03, least=_LINK_LEAST)
        self._link_s: np.ndarray | None = None
        self._healthy = 0
        self._paper_alarmed = False

    def predict(self, work: np.ndarray | None = None, actions_s: np.ndarray | None = None) -> float:
        """Healthy seconds of a step with this work; of given action times where the work is not known."""
        if work is not None and self.predictor.known:
            times = self.predictor.times(work)
        elif actions_s is not None:
            times = actions_s
        else:
            raise RequestError("'work' must be given once there is a prior, or 'actions_s', got neither")
        return float(self.path.lengths(times).max()) + self.constant_s

    def observe(
        self,
        step: int,
        step_s: float,
        *,
        work: np.ndarray | None = None,
        actions_s: np.ndarray | None = None,
        transfers_s: np.ndarray | None = None,
    ) -> Report:
        """One step, in the order of steps; new alarms are in the report, each once while its cause lasts.

        step_s: its seconds. work: (replicas, micro-batches, 2), tokens and sums of squares. actions_s: (replicas,
        kinds, stages, micro-batches). transfers_s: (replicas, stages - 1), mean seconds of a transfer.
        """
        if work is None and actions_s is None:
            raise RequestError("'work' or 'actions_s' must be given, got neither; a bare time says nothing")
        for name, given in (("work", work), ("actions_s", actions_s), ("transfers_s", transfers_s)):
            if given is not None and given.shape[0] != self.replicas:
                raise RequestError(f"'{name}' must have {self.replicas} replicas first, got the shape {given.shape}")
        alarms: list[Alarm] = []
        if transfers_s is not None:
            alarms += self._watch_links(step, transfers_s)
        if actions_s is not None:
            alarms += self._watch_ranks(step, work, actions_s)
        predicted = self._predicted(work, actions_s, step_s)
        alarms += self._watch_step(step, step_s, predicted, bool(alarms))
        if not (self.ranks.suspicious.any() or self.links.suspicious.any() or self.steps.suspicious.any()):
            self._healthy += 1
        if work is not None and actions_s is not None:
            self.predictor.learn(work, actions_s, ~self.ranks.suspicious)
        return Report(step=step, predicted_s=predicted, observed_s=step_s, alarms=tuple(alarms))

    def slowdowns(self, step: int) -> dict[tuple[int, int], float]:
        """Of each (replica, stage) known to be slow by its compute, the time taken against the healthy time."""
        excess = np.exp(self.ranks.excess(step))
        return {(int(d), int(s)): float(excess[d, s]) for d, s in np.argwhere(self.ranks.alarmed)}

    def _predicted(self, work: np.ndarray | None, actions_s: np.ndarray | None, step_s: float) -> float:
        if work is not None and not self.predictor.known and actions_s is None:
            raise RequestError("'actions_s' must be given until there is something to predict from, got only 'work'")
        predicted = self.predict(work, actions_s)
        if not self._rests:
            # Nothing is known of the constant before the first step: it is what that step leaves over.
            self.constant_s = max(0.0, step_s - predicted)
            predicted += self.constant_s
        return predicted

    def _watch_step(self, step: int, step_s: float, predicted: float, explained: bool) -> list[Alarm]:
        figure = math.log(step_s / predicted)
        doubt = self._absolute if self._healthy < _SETTLED and self._absolute < math.inf else 0.0
        new = self.steps.add(step, np.array([figure]), doubt)
        if not self.steps.suspicious.any() and not self.ranks.suspicious.any():
            # The median, since first steps and hiccups are far off.
            self._rests.append(step_s - predicted + self.constant_s)
            self.constant_s = max(0.0, float(np.median(self._rests)))
        if self.mode == "paper":
            slow = step_s > _PAPER_RATIO * predicted
            fresh, self._paper_alarmed = slow and not self._paper_alarmed, slow
            return [self._of_step(step, step_s / predicted, step)] if fresh else []
        if not new[0] or explained or self.ranks.alarmed.any() or self.links.alarmed.any():
            return []
        return [self._of_step(step, math.exp(float(self.steps.excess(step)[0])), int(self.steps.since[0]))]

    def _of_step(self, step: int, slowdown: float, since: int) -> Alarm:
        """An alarm of the whole step; it names the slowest rank where ranks are watched and one stands out."""
        excess = self.ranks.total / np.maximum(1, step - self.ranks.since + 1)
        if self.ranks.suspicious.any():
            replica, stage = np.unravel_index(int(np.argmax(excess)), excess.shape)
            return Alarm(
                step=step, what="compute", replica=int(replica), stage=int(stage), slowdown=slowdown, since=since
            )
        return Alarm(step=step, what="step", slowdown=slowdown, since=since)

    def _watch_ranks(self, step: int, work: np.ndarray | None, actions_s: np.ndarray) -> list[Alarm]:
        figures = self._rank_figures(work, actions_s)
        new = self.ranks.add(step, figures)
        excess = np.exp(self.ranks.excess(step))
        return [] if self.mode == "paper" else [
            Alarm(
                step=step, what="compute", replica=int(d), stage=int(s),
                slowdown=float(excess[d, s]), since=int(self.ranks.since[d, s]),
            )
            for d, s in np.argwhere(new)
        ]  # fmt: skip

    def _rank_figures(self, work: np.ndarray | None, actions_s: np.ndarray) -> np.ndarray:
        """How much longer, as a logarithm, each rank takes than it should; shape (replicas, stages)."""
        seen = actions_s.sum(axis=(1, 3))
        if work is None or not self.predictor.known:
            return _polished(np.log(np.maximum(seen, 1e-12)))
        figures = np.log(seen / self.predictor.times(work).sum(axis=(1, 3)))
        if self._healthy < _SETTLED:
            # What the prior has wrong of a stage, it has wrong in all replicas: up to its error, the lower median.
            common = np.sort(figures, axis=0)[(self.replicas - 1) // 2]
            figures = figures - np.clip(common, -self._prior_error, self._prior_error)
        return figures - np.median(figures) if figures.size >= 4 else figures

    def _watch_links(self, step: int, transfers_s: np.ndarray) -> list[Alarm]:
        if self.path.stages == 1:
            return []
        if self._link_s is None:
            self._link_s = np.broadcast_to(np.median(transfers_s, axis=0), transfers_s.shape).copy()
        figures = np.log(np.maximum(transfers_s, 1e-12) / self._link_s)
        new = self.links.add(step, figures)
        quiet = ~self.links.suspicious
        self._link_s[quiet] *= np.exp(0.1 * figures[quiet])
        excess = np.exp(self.links.excess(step))
        return [
            Alarm(
                step=step, what="link", replica=int(d), stage=int(s),
                slowdown=float(excess[d, s]), since=int(self.links.since[d, s]),
            )
            for d, s in np.argwhere(new)
        ]  # fmt: skip


def _polished(logs: np.ndarray) -> np.ndarray:
    """Logarithms of times without what their replica (its sequences) and their stage (its layers) have in common."""
    for _ in range(3):
        logs = logs - np.median(logs, axis=1, keepdims=True)
        logs = logs - np.median(logs, axis=0, keepdims=True)
    return logs
