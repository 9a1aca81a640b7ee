"""Jobs to live through failures with: transformers from their published sizes, or a JSON file of a job's fields."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec

from ...cost_models.devices import load_device
from ...plans import RequestError
from ..resilience import Job

__all__ = ["load_job", "transformer_job"]

# Layers, hidden size, MLP size, vocabulary; from the models' published configurations.
_MODELS = {
    "llama2-7b": (32, 4096, 11008, 32000),
    "llama2-13b": (40, 5120, 13824, 32000),
    "llama2-70b": (80, 8192, 28672, 32000),
    "llama3-405b": (126, 16384, 53248, 128256),
}
_FORM = re.compile(r"([a-z0-9.-]+):(\d{1,3})x(\d{1,3})x(\d{1,4})")
# Share of the peak that a training step's products reach, and of the wire that its collectives reach; assumed for all.
_EFFICIENCY = 0.5
_WIRE = 0.8
# Parameters and gradients of 2 bytes each, Adam's two moments and a main copy of 4 bytes each.
_STATE_BYTES, _GRADIENT_BYTES = 16, 2
# Bytes per token and hidden unit that a layer keeps for its backward with attention recomputed (2205.05198).
_KEPT_BYTES = 34


def transformer_job(
    model: str,
    *,
    tensor: int,
    replicas: int,
    stages: int,
    tokens: int = 8192,
    microbatches: int | None = None,
    device: str = "a100-sxm",
    spares: int = 0,
    degrees: tuple[int, ...] = (1, 2, 4, 8),
) -> Job:
    """A published transformer at these degrees with micro-batches of one sequence of `tokens`; 4 per stage by default.

    Backward is twice the forward, thrice where layers are recomputed, which they are if the job does not fit else. The
    head counts as work of the last layer. spares: devices more than it takes.
    """
    if model not in _MODELS:
        raise RequestError(f"'model' must be one of {', '.join(_MODELS)}, got {model[:60]!r}")
    layers, hidden, wide, vocabulary = _MODELS[model]
    sheet = load_device(device)
    weights = 4 * hidden * hidden + 3 * hidden * wide
    flops = 2 * weights * tokens + 2 * tokens * tokens * hidden
    rate = sheet.peak_flops_per_s("bfloat16") * _EFFICIENCY * tensor
    head = 2 * hidden * vocabulary * tokens / rate
    forward = [flops / rate] * layers
    forward[-1] += head
    states = [float(weights)] * layers
    states[0] += hidden * vocabulary
    states[-1] += hidden * vocabulary
    used = tensor * replicas * stages
    room = 0.9 * sheet.memory_bytes - _STATE_BYTES * sum(states) / (tensor * stages)
    again = layers * _KEPT_BYTES * tokens * hidden / tensor > room
    kept = (2 if again else _KEPT_BYTES) * tokens * hidden
    return Job(
        forward_s=tuple(forward),
        backward_s=tuple((3 if again else 2) * seconds for seconds in forward),
        tensor=tensor,
        stages=stages,
        replicas=replicas,
        microbatches=microbatches or 4 * stages * replicas,
        devices=used + spares,
        devices_per_node=8,
        degrees=tuple(sorted({*degrees, tensor})),
        state_bytes=tuple(_STATE_BYTES * count for count in states),
        gradient_bytes=tuple(_GRADIENT_BYTES * count for count in states),
        activation_bytes=(float(kept),) * layers,
        collective_bytes=(2.0 * 2 * tokens * hidden,) * layers,
        memory_bytes=0.9 * sheet.memory_bytes,
        intra_bytes_per_s=sheet.intra_link.bandwidth_bytes_per_s * _WIRE,
        inter_bytes_per_s=sheet.nic.bandwidth_bytes_per_s * _WIRE / sheet.nic.devices_per_link,
        delay_s=2.0 * tokens * hidden / (sheet.nic.bandwidth_bytes_per_s * _WIRE) / tensor,
    )


def load_job(text: str, *, spares: int = 0) -> Job:
    """'MODEL:TPxDPxPP', e.g. llama2-13b:4x2x4, or a JSON file with the fields of a `Job`."""
    match = _FORM.fullmatch(text)
    if match:
        tensor, replicas, stages = (int(part) for part in match.groups()[1:])
        if min(tensor, replicas, stages) < 1:
            raise RequestError(f"'--failures' must have degrees of at least 1, got {text[:100]!r}")
        return transformer_job(match.group(1), tensor=tensor, replicas=replicas, stages=stages, spares=spares)
    if not text.endswith(".json"):
        raise RequestError(
            f"'--failures' must be MODEL:TPxDPxPP with at most 999, 999 and 9999, e.g. llama2-13b:4x2x4, or a "
            f".json file, got {text[:100]!r}"
        )
    try:
        given = msgspec.json.decode(Path(text).read_bytes(), type=dict[str, Any])
        unknown = sorted(set(given) - {field.name for field in dataclasses.fields(Job)})
        if unknown:
            raise RequestError(f"'--failures' must have the fields of a job, got {unknown[0][:60]!r} in {text[:100]}")
        # JSON has no infinity: null is a limit that is not there.
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, Job)
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise RequestError(
            f"'--failures' must be a JSON file with the fields of a job, got {text[:100]} ({error})"
        ) from None
