"""A spec from a Hugging Face config.json: sizes only. No network, no weights, no code from the file's repository.

Models of up to `REAL_PARAMETERS` parameters get seeded values on the CPU, larger ones are built on the meta device.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plans.errors import RequestError
from .spec import Overrides, Spec, materialisation_seed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["REAL_PARAMETERS", "huggingface_spec"]

REAL_PARAMETERS = 16_000_000
DEFAULT_BATCH = 8
DEFAULT_SEQ_LEN = 512

# The task whose model is taken where the config's `architectures` names none with a loss, first fit first.
_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
_LAYER_FIELDS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
_DECODER_LAYER_FIELDS = ("num_decoder_layers", "decoder_layers")
_PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification")
_PER_TOKEN = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification", "LMHeadModel")
_OTHER_INPUTS = frozenset({"pixel_values", "pixel_values_videos", "input_features", "input_values"})
_INSTALL = "run: pip install meshwright[hf]"


def huggingface_spec(path: Path, overrides: Overrides, *, name: str) -> Spec:
    """The spec of a config.json or of the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    values = _read(file)
    if importlib.util.find_spec("transformers") is None:
        raise RequestError(f"'spec' must be readable by transformers, which is not installed, got {name!r}; {_INSTALL}")
    return Spec(name=name, build=functools.partial(_build, values, file, overrides), loss=_loss)


def _loss(output: Any) -> Tensor:
    """The loss in a model's output."""
    return output["loss"]


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise RequestError(f"'spec' must name a config.json or a folder with one, got {str(file)!r}; no such file")
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"'{file}' must be JSON in UTF-8, got {error}; take the config.json of a model") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        got = sorted(values)[:8] if isinstance(values, dict) else type(values).__name__
        raise RequestError(f"'{file}' must be a Hugging Face config with a 'model_type', got {got}; add model_type")
    return values


def _build(
    values: Mapping[str, Any], file: Path, overrides: Overrides
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise RequestError(f"'{file}' must be readable by transformers, got {error}; {_INSTALL}") from error
    import torch

    with _reported(file):
        config = _config(_with_layers(values, overrides.layers, file), file)
        model_class = _model_class(config, file)
        dtype = _dtype(config, overrides)
        with torch.device("meta"):
            model = _instantiate(model_class, config, dtype)
        real = sum(p.numel() for p in model.parameters()) <= REAL_PARAMETERS
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if real else "meta"):
            torch.manual_seed(materialisation_seed())
            model = _instantiate(model_class, config, dtype) if real else model
            inputs = _inputs(model, overrides, dtype, file)
    return model, (), inputs


def _config(values: Mapping[str, Any], file: Path) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        rule = f"the 'model_type' of '{file}' must be one that the installed transformers knows, got {model_type!r}"
        raise RequestError(f"{rule}; update transformers, or write a FILE.py with build()")
    config = CONFIG_MAPPING[model_type].from_dict(dict(values))
    for part in (config, config.get_text_config()):
        part.use_cache = False
    return config


def _with_layers(values: Mapping[str, Any], layers: int | None, file: Path) -> dict[str, Any]:
    """The config with `layers` layers (in encoder and decoder); lists with an entry per layer are cut."""
    if layers is None:
        return dict(values)
    if isinstance(values.get("text_config"), dict):
        return {**values, "text_config": _with_layers(values["text_config"], layers, file)}
    fields = [f for f in (*_LAYER_FIELDS, *_DECODER_LAYER_FIELDS) if isinstance(values.get(f), int)]
    if not fields:
        rule = f"'layers' must be left out for '{file}', which gives no number of layers, got {layers}"
        raise RequestError(f"{rule}; it needs one of {', '.join(_LAYER_FIELDS)}")
    out: dict[str, Any] = {**values, **dict.fromkeys(fields, layers)}
    for field, value in values.items():
        if isinstance(value, list) and "layer" in field and len(value) == values[fields[0]] > layers:
            out[field] = value[:layers]
    return out


def _model_class(config: PreTrainedConfig, file: Path) -> type[PreTrainedModel]:
    """The class in `architectures` if it computes a loss we can feed, else the one of the model type's usual task."""
    import transformers
    from transformers import PreTrainedModel

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if inspect.isclass(found) and issubclass(found, PreTrainedModel) and _has_loss(found):
            return found
    for task in _TASKS:
        if config.is_encoder_decoder and task in ("MASKED_LM", "CAUSAL_LM"):
            continue  # half of the model
        mapping = getattr(transformers, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, tuple) else found
            if _has_loss(found):
                return found
    rule = f"'{file}' must name a model with a loss on labels (language model or classifier)"
    got = config.architectures or config.model_type
    raise RequestError(f"{rule}, got {got}; write a FILE.py with build() and loss() for others")


def _has_loss(model_class: type[PreTrainedModel]) -> bool:
    fits = model_class.__name__.endswith((*_PER_SAMPLE, *_PER_TOKEN))
    return fits and "labels" in inspect.signature(model_class.forward).parameters


def _dtype(config: PreTrainedConfig, overrides: Overrides) -> torch.dtype:
    import torch

    stated = overrides.dtype or getattr(config, "dtype", None) or "float32"
    return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated).removeprefix("torch."))


def _instantiate(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    return model_class._from_config(config, dtype=dtype).train()


def _inputs(model: Any, overrides: Overrides, dtype: torch.dtype, file: Path) -> dict[str, Tensor]:
    import torch

    batch = overrides.batch or DEFAULT_BATCH
    name = type(model).__name__
    if name.endswith("ForImageClassification"):
        if overrides.seq_len is not None:
            rule = f"'seq_len' must be left out for '{file}', whose inputs are images, got {overrides.seq_len}"
            raise RequestError(f"{rule}; the number of patches follows from image_size")
        vision = getattr(model.config, "vision_config", model.config)
        pixels = torch.randn(batch, vision.num_channels, *_image_size(vision.image_size), dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, model.config.num_labels, (batch,))}
    takes = inspect.signature(model.forward).parameters
    if model.main_input_name != "input_ids" or not _OTHER_INPUTS.isdisjoint(takes):
        rule = f"'{file}' must be a model of text alone or an image classifier, got {name}({', '.join(takes)})"
        raise RequestError(f"{rule}; write a FILE.py with build() for others")
    shape = (batch, _seq_len(model.config.get_text_config(), overrides.seq_len, file))
    vocab = model.config.get_text_config().vocab_size
    kinds = model.config.num_labels if name.endswith("Classification") else vocab
    labels = torch.randint(0, kinds, shape[:1] if name.endswith(_PER_SAMPLE) else shape)
    return {"input_ids": torch.randint(0, vocab, shape), "labels": labels}


def _image_size(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _seq_len(config: PreTrainedConfig, wanted: int | None, file: Path) -> int:
    """The override, or 512 or less where the model has fewer positions (a power of two then)."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return wanted or DEFAULT_SEQ_LEN
    rotary = any(getattr(config, field, None) for field in ("rope_parameters", "rope_theta", "rope_scaling"))
    if wanted is not None and wanted > longest and not rotary:
        rule = f"'seq_len' must be at most {longest}, the learned positions of '{file}', got {wanted}"
        raise RequestError(f"{rule}; shorten it, or raise the positions in the config")
    return wanted or min(DEFAULT_SEQ_LEN, 1 << (longest.bit_length() - 1))


@contextmanager
def _reported(file: Path) -> Iterator[None]:
    """Turns what transformers makes of a bad config into a RequestError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        rule = f"'{file}' must be a config that the installed transformers can build, got {what}"
        raise RequestError(f"{rule}; check the config, or write a FILE.py with build()") from error
