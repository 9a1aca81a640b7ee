"""Specs from a user's FILE.py and from a Hugging Face config.json."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.plans.errors import RequestError
from meshwright.specs import load_spec

GOOD = """\
from __future__ import annotations
from dataclasses import dataclass
import torch
from helper import WIDTH

@dataclass
class Config:
    width: int = WIDTH

DYNAMIC = ({0: "batch"},)

def build(batch=2, dtype=torch.float32):
    return torch.nn.Linear(Config().width, 3, dtype=dtype), (torch.zeros(batch, 4, dtype=dtype),), {}

def small():
    return torch.nn.Linear(4, 1), [torch.zeros(1, 4)], {}

def loss(output):
    return output.sum()
"""


def _write(folder: Path, text: str, name: str = "model.py") -> str:
    (folder / "helper.py").write_text("WIDTH = 4\n")
    (folder / name).write_text(text)
    return str(folder / name)


def _build(text: str, **options: Any) -> Any:
    """(module, args, kwargs) of a spec."""
    return load_spec(text, **options).build()


@pytest.fixture(autouse=True)
def _clean_modules() -> Any:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "helper" or name.startswith("meshwright_spec_"):
            del sys.modules[name]


def test_file_with_all_its_parts(tmp_path: Path) -> None:
    path_before = list(sys.path)
    spec = load_spec(_write(tmp_path, GOOD), batch=5, dtype="float64")
    model, args, kwargs = spec.build()
    assert spec.dynamic == ({0: "batch"},) and spec.name.endswith("model.py") and kwargs == {}
    assert args[0].shape == (5, 4) and args[0].dtype == torch.float64
    assert spec.loss is not None and spec.loss(model(*args)).shape == ()
    assert sys.path == path_before


def test_file_with_a_named_function(tmp_path: Path) -> None:
    model, args, _ = _build(_write(tmp_path, GOOD) + ":small")
    assert model.out_features == 1 and isinstance(args, tuple)


@pytest.mark.parametrize(
    ("text", "suffix", "options", "words"),
    [
        ("x = 1\ny = 1 / 0\n", "", {}, ["'model.py' must run without an error", "ZeroDivisionError", "model.py:2"]),
        ("def build(:\n", "", {}, ["SyntaxError", "model.py:1"]),
        ("import no_such_module\n", "", {}, ["ModuleNotFoundError", "no_such_module", "model.py:1"]),
        ("raise SystemExit(3)\n", "", {}, ["SystemExit", "model.py:1"]),
        ("def build():\n    import json\n    json.loads('{')\n", "", {}, ["JSONDecodeError", "model.py:3"]),
        ("def make(): pass\n", "", {}, ["must name a function", "'build'", "its functions are make", "add: def"]),
        ("def make(): pass\n", ":mak", {}, ["must name a function", "'mak'", "make"]),
        ("def make(): pass\n", ":", {}, ["must name a function", "got ''"]),
        ("def build(): return 1\n", "", {}, ["'build()' must return (module, args, kwargs)", "got int", "model.py:1"]),
        ("def build(): return 1, 2\n", "", {}, ["got tuple of 2"]),
        ("def build(): return 1, (), {}\n", "", {}, ["the module of 'build()' must be an nn.Module", "got int"]),
        ("import torch\ndef build(): return torch.nn.ReLU(), 1, {}\n", "", {}, ["the args", "a tuple", "model.py:2"]),
        ("def build(width): pass\n", "", {}, ["must need no arguments", "['width']", "model.py:1"]),
        ("def build(): pass\n", "", {"seq_len": 8}, ["'seq_len' must be left out", "got 8", "a parameter seq_len"]),
        ("loss = 3\ndef build(): pass\n", "", {}, ["'loss' must be a function", "got 3"]),
    ],
)
def test_wrong_file_is_refused(
    tmp_path: Path, text: str, suffix: str, options: dict[str, Any], words: list[str]
) -> None:
    path_before = list(sys.path)
    with pytest.raises(RequestError) as caught:
        _build(_write(tmp_path, text) + suffix, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert sys.path == path_before


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="existing Python file"):
        load_spec(str(tmp_path / "none.py"))


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 48},
    "bert": {**SMALL, "vocab_size": 128, "max_position_embeddings": 64, "architectures": ["BertForMaskedLM"]},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
           "decoder_start_token_id": 0},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4},
    "clip": {"vision_config": {**SMALL, "image_size": 32, "patch_size": 8}, "projection_dim": 16},
    "vit": {**SMALL, "image_size": 32, "patch_size": 8, "architectures": ["ViTModel"], "num_labels": 5},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
              "layer_types": ["full_attention", "full_attention"]},
}  # fmt: skip
CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "clip": "CLIPForImageClassification",
    "vit": "ViTForImageClassification",
    "qwen3": "Qwen3ForCausalLM",
}
IMAGES = {"clip", "vit"}


def _config(folder: Path, model_type: str, **changes: object) -> str:
    pytest.importorskip("transformers")
    values = {"model_type": model_type, **CONFIGS.get(model_type, {}), **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_hugging_face_config_trains(tmp_path: Path, model_type: str) -> None:
    spec = load_spec(_config(tmp_path, model_type), batch=2, seq_len=None if model_type in IMAGES else 16)
    built: Any = spec.build()
    model, args, kwargs = built
    assert type(model).__name__ == CLASSES[model_type] and model.training and args == ()
    if model_type not in IMAGES:
        assert {name: tuple(value.shape) for name, value in kwargs.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
        assert not model.config.use_cache
    assert spec.loss is not None
    loss = spec.loss(model(*args, **kwargs))
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_hugging_face_config_exports(tmp_path: Path, model_type: str) -> None:
    model, args, kwargs = _build(_config(tmp_path, model_type), batch=2)
    assert "loss" in model(**kwargs)
    torch.export.export(model, args, kwargs, strict=False)


@pytest.mark.parametrize("model_type", sorted(set(CONFIGS) - IMAGES))
def test_hugging_face_overrides(tmp_path: Path, model_type: str) -> None:
    _config(tmp_path, model_type)
    model, _, kwargs = _build(str(tmp_path), batch=3, seq_len=8, layers=1, dtype="bfloat16")
    assert kwargs["input_ids"].shape == (3, 8) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.num_hidden_layers == 1 and getattr(model.config, "num_decoder_layers", 1) == 1
    assert not [name for name, _ in model.named_parameters() if ".1.attention" in name or ".1.self_attn" in name]


def test_hugging_face_defaults_fit_the_positions(tmp_path: Path) -> None:
    assert _build(_config(tmp_path, "gpt2"))[2]["input_ids"].shape == (8, 32)
    assert _build(_config(tmp_path, "bert", max_position_embeddings=514))[2]["labels"].shape == (8, 512)


def test_large_hugging_face_config_has_no_storage(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 4, "vocab_size": 128256}
    path = _config(tmp_path, "llama", **sizes, num_attention_heads=64, num_key_value_heads=8, dtype="bfloat16")
    model, _, kwargs = _build(path)
    tensors = [*model.parameters(), *kwargs.values()]
    assert {t.device.type for t in tensors} == {"meta"} and model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) > 5e9


def test_hugging_face_values_are_the_same_in_every_process(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    (first, _, inputs), (second, _, again) = (_build(_config(tmp_path, "llama")) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(inputs["input_ids"], again["input_ids"])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["must be JSON"]),
        ("[]", ["with a 'model_type'", "got list"]),
        ('{"hidden_size": 8}', ["with a 'model_type'", "hidden_size"]),
        ('{"model_type": "no-such"}', ["'model_type'", "'no-such'", "update transformers"]),
        ('{"model_type": "no-such", "auto_map": {"AutoConfig": "evil.Config"}}', ["'no-such'"]),
        ('{"model_type": "llama", "hidden_size": "wide"}', ["must be a config that the installed", "hidden_size"]),
        ('{"model_type": "clap"}', ["must name a model with a loss on labels", "got clap", "FILE.py"]),
        ('{"model_type": "whisper"}', ["must name a model with a loss on labels", "FILE.py"]),
        (
            '{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}',
            ["of text alone", "FILE.py"],
        ),
        ('{"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}', ["of text alone", "FILE.py"]),
    ],
)
def test_wrong_config_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RequestError) as caught:
        _build(str(tmp_path))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_overrides_of_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'seq_len' must be at most 48, the learned positions"):
        _build(_config(tmp_path, "gpt2"), seq_len=64)
    with pytest.raises(RequestError, match="'seq_len' must be left out"):
        _build(_config(tmp_path, "vit"), seq_len=64)
    with pytest.raises(RequestError, match="no such file"):
        load_spec(str(tmp_path / "other.json"))


def test_missing_transformers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _config(tmp_path, "llama")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install meshwright\[hf\]"):
        load_spec(path)
