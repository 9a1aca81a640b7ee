"""What is known of the state of a job's devices, and what a detector says of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import RequestError

__all__ = ["Alarm", "Health", "Report"]

_FORM = re.compile(r"(\d{1,7})=(\d{0,3}\.?\d{0,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The speed of each device: 0 dead, 1 as fast as it should be. `speeds` has those below 1, by device, ascending."""

    speeds: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, speeds: Mapping[int, float] | Health, devices: int | None = None) -> Health:
        """From {device: speed}; RequestError for a speed outside 0 to 1 or a device that is not below `devices`."""
        if isinstance(speeds, Health):
            speeds = dict(speeds.speeds)
        for device, speed in speeds.items():
            if isinstance(device, bool) or not isinstance(device, int) or device < 0:
                raise RequestError(f"'health' must name devices by their number, got {device!r}; count from 0")
            if devices is not None and device >= devices:
                raise RequestError(f"'health' must name one of {devices} devices, got {device}; count from 0")
            if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 <= speed <= 1:
                raise RequestError(f"'health' must be 0 (dead) to 1 (healthy), got {speed!r} of device {device}")
        return cls(speeds=tuple((device, float(speed)) for device, speed in sorted(speeds.items()) if speed < 1))

    @classmethod
    def parse(cls, words: tuple[str, ...] | list[str], devices: int | None = None) -> Health:
        """From words such as '17=0' and '23=0.6'."""
        speeds: dict[int, float] = {}
        for word in words:
            match = _FORM.fullmatch(word)
            if match is None or not match.group(2).strip("."):
                raise RequestError(f"'--health' must be DEVICE=SPEED, e.g. 17=0 or 23=0.6, got {word[:60]!r}")
            if int(match.group(1)) in speeds:
                raise RequestError(f"'--health' must name each device once, got {match.group(1)} again")
            speeds[int(match.group(1))] = float(match.group(2))
        return cls.of(speeds, devices)

    def speed(self, device: int) -> float:
        """The speed of one device."""
        return dict(self.speeds).get(device, 1.0)

    @property
    def dead(self) -> tuple[int, ...]:
        """Devices that are gone."""
        return tuple(device for device, speed in self.speeds if speed == 0)

    @property
    def slow(self) -> tuple[int, ...]:
        """Devices that work, but too slowly."""
        return tuple(device for device, speed in self.speeds if speed > 0)

    def with_(self, speeds: Mapping[int, float]) -> Health:
        """The same with these devices changed."""
        return Health.of({**dict(self.speeds), **speeds})

    def __str__(self) -> str:
        return ", ".join(f"{device}={speed:g}" for device, speed in self.speeds) or "all healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong. `what`: compute of a rank, the link behind a stage, or the whole step without a rank.

    `slowdown` is the time taken against the time it should take (inf for a device that is gone); `since` the step at
    which it began.
    """

    step: int
    what: Literal["compute", "link", "step", "lost"]
    replica: int | None = None
    stage: int | None = None
    device: int | None = None
    slowdown: float = math.inf
    since: int = 0

    def __str__(self) -> str:
        where = "the step" if self.replica is None else f"{self.what} of stage {self.stage} in replica {self.replica}"
        where = f"device {self.device}" if self.what == "lost" else where
        how = "is gone" if math.isinf(self.slowdown) else f"takes {self.slowdown:.2f} times as long"
        return f"step {self.step}: {where} {how} since step {self.since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a detector says of one step: the healthy time that it expected, what was seen, and new alarms."""

    step: int
    predicted_s: float
    observed_s: float
    alarms: tuple[Alarm, ...]

    @property
    def ratio(self) -> float:
        """Seen against expected."""
        return self.observed_s / self.predicted_s
