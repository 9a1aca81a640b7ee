"""Which devices are gone: every node says now and then that its devices live; a closed connection says it at once.

One beat per node carries all its devices (ResiHP's local monitors and coordinator): the cost grows with nodes. Time is
handed in, so the rule can be tested and simulated; who sends and receives is the runtime's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plans import Alarm, RequestError

__all__ = ["Heartbeats"]


class Heartbeats:
    """What is known of each node's last beat. A node that is silent for `patience` periods is gone."""

    def __init__(self, nodes: Mapping[str, Sequence[int]], *, period_s: float, patience: int = 3) -> None:
        if not period_s > 0 or patience < 1:
            raise RequestError(f"'period_s' must be positive and 'patience' 1 or more, got {period_s} and {patience}")
        self.devices = {node: tuple(devices) for node, devices in nodes.items()}
        self.period_s, self.patience = period_s, patience
        self._last: dict[str, float] = {}
        self._began: float | None = None
        self._gone: set[int] = set()
        self.progress: dict[int, int] = {}

    def beat(self, node: str, now_s: float, progress: Mapping[int, int]) -> None:
        """A node's beat: the step that each of its living devices is at. Devices left out are dead."""
        if node not in self.devices:
            raise RequestError(f"'node' must be one of {', '.join(self.devices)}, got {node!r}")
        self._last[node] = now_s
        self.progress.update(progress)
        for device in self.devices[node]:
            if device not in progress:
                self.progress.pop(device, None)

    def disconnected(self, node: str) -> None:
        """The connection to a node closed: it is gone, whatever its last beat."""
        self._last[node] = float("-inf")

    def lost(self, now_s: float, step: int = 0) -> tuple[Alarm, ...]:
        """An alarm for each device that is found gone now and was not before."""
        self._began = now_s if self._began is None else self._began
        silent = self.period_s * self.patience
        gone = {
            device
            for node, devices in self.devices.items()
            for device in devices
            if now_s - self._last.get(node, self._began) > silent
            or (node in self._last and device not in self.progress)
        }
        fresh = sorted(gone - self._gone)
        self._gone = gone
        return tuple(Alarm(step=step, what="lost", device=device, since=step) for device in fresh)
