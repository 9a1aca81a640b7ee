"""A calibration for a person: quantities, uncertainties, errors by family, residuals as a table and as SVG."""

from __future__ import annotations

import html
import math

from .calibration import Calibration, Sample
from .fitting import FAMILY_OF
from .uncertainty import FAMILIES

__all__ = ["report_text", "residuals_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 380, 60, 46, 46
_COLOURS = {"product": "#1f5fa8", "attention": "#7a3d9c", "memory": "#2c8a4b", "collective": "#c2571a",
            "update": "#a8862c", "host": "#666666"}  # fmt: skip
# The plot ends at a factor of so much either way; points beyond lie on its edge.
_MOST = math.log(2.5)


def report_text(calibration: Calibration, *, samples: bool = False) -> str:
    """The calibration as lines of text; with `samples`, every measurement beside what is predicted for it."""
    machine = calibration.machine
    lines = [
        f"calibration {calibration.name} {calibration.digest()[:12]} of {calibration.sheet}, "
        f"torch {calibration.torch_version}",
        f"measured on {machine.processor}, {machine.ranks} ranks with {machine.threads} threads each, "
        f"load before {machine.load:.1f}",
        "",
        f"{'quantity':<34} {'value':>11} {'unit':<7} {'+-':>6} {'samples':>7}",
    ]
    lines += [
        f"{q.name:<34} {q.value:>11.4g} {q.unit:<7} {_shares(q.uncertainty):>6} {q.samples:>7}"
        for q in calibration.quantities
    ]
    lines += ["", f"{'error by family':<34} {'rows':>5} {'mean':>7} {'9 of 10':>8} {'worst':>7}"]
    lines += [f"{f.name:<34} {f.rows:>5} {f.mean:>7.1%} {f.p90:>8.1%} {f.worst:>7.1%}" for f in calibration.families]
    lines += ["", f"from the data sheet {calibration.sheet}: {', '.join(calibration.remaining())}"]
    if samples:
        lines += ["", f"{'sample':<26} {'sizes':<34} {'measured':>11} {'predicted':>11} {'error':>7} {'spread':>7}"]
        lines += [_line(sample) for sample in calibration.samples]
    return "\n".join(lines)


def _shares(uncertainty: float) -> str:
    return f"{uncertainty:.0%}" if uncertainty < 1.0 else "open"


def _line(sample: Sample) -> str:
    sizes = " x ".join(map(str, sample.sizes))
    return (
        f"{sample.kind:<26} {sizes:<34} {sample.measured_s * 1e6:>8.1f} us {sample.predicted_s * 1e6:>8.1f} us "
        f"{sample.predicted_s / sample.measured_s - 1.0:>+7.1%} {sample.spread:>7.1%}"
    )


def residuals_svg(calibration: Calibration) -> str:
    """Predicted / measured of every sample over its measured time, both axes logarithmic."""
    times = [sample.measured_s for sample in calibration.samples] or [1e-6, 1e-3]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    wide, tall = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM

    def x(seconds: float) -> float:
        return _LEFT + wide * (math.log10(seconds) - low) / max(1, high - low)

    def y(ratio: float) -> float:
        return _TOP + tall * (0.5 - max(-_MOST, min(_MOST, math.log(ratio))) / (2 * _MOST))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f'<text x="{_LEFT}" y="20" font-size="14">{html.escape(calibration.name)}: predicted / measured</text>'
    ]
    for ratio in (0.5, 0.8, 1.0, 1.25, 2.0):
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" stroke="'
                     f'{"#000" if ratio == 1 else "#ddd"}"/><text x="{_LEFT - 8}" y="{y(ratio) + 4:.1f}" '
                     f'text-anchor="end">{ratio:g}</text>')  # fmt: skip
    for decade in range(low, high + 1):
        parts.append(f'<line y1="{_TOP}" y2="{_TOP + tall}" x1="{x(10.0**decade):.1f}" x2="{x(10.0**decade):.1f}" '
                     f'stroke="#eee"/><text x="{x(10.0**decade):.1f}" y="{_TOP + tall + 18}" text-anchor="middle">'
                     f"1e{decade} s</text>")  # fmt: skip
    for at, family in enumerate(FAMILIES):
        parts.append(f'<circle cx="{_LEFT + 10 + 110 * at}" cy="{_HEIGHT - 10}" r="4" fill="{_COLOURS[family]}"/>'
                     f'<text x="{_LEFT + 18 + 110 * at}" y="{_HEIGHT - 6}">{family}</text>')  # fmt: skip
    for sample in calibration.samples:
        colour = _COLOURS[FAMILY_OF[sample.kind.partition(".")[0]]]
        ratio = sample.predicted_s / sample.measured_s
        parts.append(f'<circle cx="{x(sample.measured_s):.1f}" cy="{y(ratio):.1f}" r="4" fill="{colour}" '
                     f'fill-opacity="0.7"><title>{html.escape(_line(sample))}</title></circle>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"
