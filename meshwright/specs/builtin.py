"""The built-in specs: sizes from models.toml, models from the family files."""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..plans.errors import RequestError
from .spec import Overrides, Spec, materialisation_seed

if TYPE_CHECKING:
    from torch import nn

__all__ = ["builtin_spec", "spec_names", "spec_rows"]


def spec_names() -> tuple[str, ...]:
    """Names of the built-in specs."""
    return tuple(_entries())


def spec_rows() -> list[dict[str, Any]]:
    """Size and defaults of each built-in spec; `global_batch` in samples, `seq_len` in tokens, None for images."""
    return [
        {
            "name": name,
            "family": entry["family"],
            "layers": entry["config"]["n_layers"],
            "width": entry["config"]["dim"],
            "dtype": entry["config"]["dtype"],
            "global_batch": entry["batch"],
            "seq_len": entry["config"].get("seq_len"),
        }
        for name, entry in _entries().items()
    ]


def builtin_spec(name: str, overrides: Overrides) -> Spec:
    """The built-in spec `name`; its module takes (inputs, labels) and returns the scalar loss."""
    entry = _entries()[name]
    if overrides.seq_len is not None and "seq_len" not in entry["config"]:
        rule = f"'seq_len' must be left out for {name}, whose inputs are images, got {overrides.seq_len}"
        raise RequestError(f"{rule}; the number of patches follows from the image size")
    longest = entry["config"].get("max_positions")
    if longest is not None and overrides.seq_len is not None and overrides.seq_len > longest:
        rule = f"'seq_len' must be at most {longest} for {name}, its number of learned positions"
        raise RequestError(f"{rule}, got {overrides.seq_len}; shorten it, or take a model with rotary positions")
    return Spec(name=name, build=functools.partial(_build, entry, overrides))


def _entries() -> dict[str, Any]:
    return tomllib.loads(resources.files(str(__package__)).joinpath("models.toml").read_text("utf-8"))


def _build(entry: Mapping[str, Any], overrides: Overrides) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import torch

    family = importlib.import_module(f".{entry['family']}", __package__)
    values = {**entry["config"], **overrides.given()}
    batch = values.pop("batch", entry["batch"])
    if "layers" in values:
        values["n_layers"] = values.pop("layers")
    values["dtype"] = getattr(torch, values["dtype"])
    model_type, config_type = family.MODEL, family.CONFIG
    config = config_type(**values)
    if not entry["real"]:
        with torch.device("meta"):
            model = model_type(config)
            return model, model.example_inputs(batch), {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(materialisation_seed())
        model = model_type(config)
        model.init_weights()
        return model, model.example_inputs(batch), {}
