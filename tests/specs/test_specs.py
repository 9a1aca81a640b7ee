"""The built-in specs: sizes, gradients, export, overrides, refusals."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from meshwright.plans.errors import RequestError
from meshwright.specs import load_spec, spec_names

TINY = [name for name in spec_names() if name.endswith("-tiny")]

# Published parameter counts.
PUBLISHED = {
    "llama3-1b": 1.2358e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9,
    "gpt2": 124.44e6,
    "gpt2-medium": 354.82e6,
    "gpt2-xl": 1.5576e9,
    "qwen3-8b": 8.19e9,
    "qwen3-32b": 32.76e9,
    "mixtral-8x7b": 46.70e9,
    "deepseek-v3": 671.03e9,
    "vit-b": 86.57e6,
    "vit-l": 304.33e6,
    "vit-h": 632.05e6,
}


def _build(text: str, **options: Any) -> Any:
    """(module, args, kwargs) of a spec."""
    return load_spec(text, **options).build()


def test_every_real_size_has_a_published_count() -> None:
    assert set(PUBLISHED) | set(TINY) == set(spec_names())


@pytest.mark.parametrize("name", TINY)
def test_tiny_gives_finite_loss_and_all_gradients(name: str) -> None:
    spec = load_spec(name)
    model, args, kwargs = spec.build()
    assert spec.loss is None and spec.dynamic is None and kwargs == {}
    loss = model(*args)
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not [n for n, g in gradients.items() if g is None or not torch.isfinite(g).all() or not g.any()]


@pytest.mark.parametrize("name", TINY)
def test_tiny_is_the_same_in_every_process_and_leaves_the_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    (first, args, _), (second, again, _) = _build(name), _build(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(args, again, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_tiny_exports(name: str) -> None:
    model, args, _ = _build(name, layers=2, batch=2)
    exported = torch.export.export(model, args, strict=False)
    torch.testing.assert_close(exported.module()(*args), model(*args))


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_real_size_has_the_published_parameters_and_no_storage(name: str) -> None:
    model, args, _ = _build(name)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED[name], rel=1e-3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {t.device.type for t in (*model.parameters(), *model.buffers(), *args)} == {"meta"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_405b_builds_fast_and_small() -> None:
    code = (
        "import re, time; from meshwright.specs import load_spec\n"
        "load_spec('llama3-405b').build()\n"
        "print(time.process_time(), re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kib = run.stdout.split()
    assert float(seconds) < 5.0 and int(kib) < 500_000


def test_names_and_loading_import_no_torch() -> None:
    code = (
        "import sys; from meshwright.specs import load_spec, spec_names\n"
        "[load_spec(name) for name in spec_names()]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_overrides_reach_model_and_inputs() -> None:
    model, args, _ = _build("llama3-8b", batch=4, seq_len=1024, layers=2, dtype="fp32")
    assert len(model.layers) == 2 and args[0].shape == (4, 1024) and model.cos.shape == (1024, 128)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model, args, _ = _build("vit-tiny", batch=3, dtype=torch.float64)
    assert args[0].shape == (3, 3, 32, 32) and args[0].dtype == torch.float64 and model(*args).dtype == torch.float64


@pytest.mark.parametrize("name", TINY)
def test_weights_can_be_initialised_after_to_empty(name: str) -> None:
    real, args, _ = _build(name)
    with torch.device("meta"):
        model = type(real)(real.config)
    model.to_empty(device="cpu")
    model.init_weights()
    assert model(*args).item() == pytest.approx(math.log(getattr(real.config, "vocab_size", 16)), rel=0.1)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), real.buffers(), strict=True))


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny"])
def test_bfloat16_stays_near_float64(name: str) -> None:
    wide, args, _ = _build(name, dtype="float64")
    narrow, _, _ = _build(name, dtype="bfloat16")
    narrow.load_state_dict(wide.state_dict())
    assert narrow(*args).item() == pytest.approx(wide(*args).item(), rel=2e-3)
    assert {t.dtype for t in narrow.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("llama3-8", {}, ["'spec' must be", "'llama3-8'", "llama3-8b", "the built-in specs are"]),
        ("", {}, ["'spec' must be", "llama-tiny"]),
        ("llama3-8b", {"batch": 0}, ["'batch' must be", "got 0"]),
        ("llama3-8b", {"layers": True}, ["'layers' must be", "got True"]),
        ("llama3-8b", {"dtype": "int8"}, ["'dtype' must be one of", "'int8'"]),
        ("vit-b", {"seq_len": 128}, ["'seq_len' must be left out", "images"]),
        ("gpt2", {"seq_len": 2048}, ["'seq_len' must be at most 1024", "got 2048"]),
    ],
)
def test_wrong_requests_are_refused(text: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        load_spec(text, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_mixtral_refuses_a_ragged_routing_group() -> None:
    with pytest.raises(RequestError, match="'seq_len' must be at most 1024 or a multiple of it"):
        _build("mixtral-8x7b", seq_len=1500)
