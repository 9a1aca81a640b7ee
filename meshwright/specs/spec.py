"""What a spec is, and the overrides that every kind of spec takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plans.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DTYPES", "Overrides", "Spec", "materialisation_seed"]

DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float64": "float64",
    "fp64": "float64",
    "double": "float64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model to plan: `build()` gives (module, args, kwargs); without `loss(output)` the module returns its loss."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor] | None = None
    dynamic: object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user changes in a spec; None keeps the spec's own value. `batch` is the global batch in samples."""

    batch: int | None = None
    seq_len: int | None = None
    layers: int | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, *, batch: int | None, seq_len: int | None, layers: int | None, dtype: object | None) -> Overrides:
        """Overrides checked at the door; `dtype` is a torch.dtype or its name."""
        return cls(
            batch=_positive("batch", batch),
            seq_len=_positive("seq_len", seq_len),
            layers=_positive("layers", layers),
            dtype=_dtype_name(dtype),
        )

    def given(self) -> dict[str, int | str]:
        """The overrides that were given, by name."""
        fields = {"batch": self.batch, "seq_len": self.seq_len, "layers": self.layers, "dtype": self.dtype}
        return {name: value for name, value in fields.items() if value is not None}


def materialisation_seed() -> int:
    """Seed for specs with real values, so that every process that builds one holds the same weights and inputs."""
    return 0


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise RequestError(f"{name!r} must be a whole number from 1 up, got {value!r}; leave it out for the default")
    return value


def _dtype_name(value: object | None) -> str | None:
    if value is None:
        return None
    name = DTYPES.get(str(value).removeprefix("torch."))
    if name is None:
        known = ", ".join(sorted(set(DTYPES.values())))
        raise RequestError(f"'dtype' must be one of {known}, got {value!r}; leave it out for the default of the spec")
    return name
