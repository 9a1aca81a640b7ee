"""Tiny random-weight models of real architectures equal the single process on simulated and on real ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from meshwright.planner.verify import check

transformers = pytest.importorskip("transformers")
VOCAB, BATCH, TOKENS = 101, 4, 12


def language_model(name: str, config: str, **options: object) -> tuple[nn.Module, tuple, dict]:
    base = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, name)(getattr(transformers, config)(**{**base, **options}))
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS))
    return model, (), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def gpt2() -> tuple[nn.Module, tuple, dict]:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS))
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def bert() -> tuple[nn.Module, tuple, dict]:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS))
    labels = ids.clone()
    labels[:, 4:] = -100
    return (
        transformers.BertForMaskedLM(config),
        (),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels},
    )


def t5() -> tuple[nn.Module, tuple, dict]:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS))
    return (
        transformers.T5ForConditionalGeneration(config),
        (),
        {"input_ids": ids, "labels": ids[:, :7].clone(), "use_cache": False},
    )


def vit() -> tuple[nn.Module, tuple, dict]:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    inputs = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}
    return transformers.ViTForImageClassification(config), (), inputs


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        diffusers = pytest.importorskip("diffusers")
        self.net = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
            patch_size=2, num_embeds_ada_norm=1000,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, noise: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x, timestep=t, class_labels=y).sample, noise)}


def dit() -> tuple[nn.Module, tuple, dict]:
    return (
        Denoiser(),
        (torch.randn(2, 4, 8, 8), torch.tensor([5, 700]), torch.tensor([1, 2]), torch.randn(2, 4, 8, 8)),
        {},
    )


MODELS = {
    "llama": partial(language_model, "LlamaForCausalLM", "LlamaConfig"),
    "qwen3": partial(language_model, "Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "mixtral": partial(
        language_model,
        "MixtralForCausalLM",
        "MixtralConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    ),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "dit": dit,
}


def built(name: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    return MODELS[name]()


def on_a_rank(name: str) -> tuple:
    """What `check` builds in each process: the model, its inputs, and its own loss (None: that in its output)."""
    return *built(name), None


@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_plan_equals_one_process(name: str) -> None:
    report = check(*built(name), mesh="2")
    assert report.equal, report.differences
    assert report.compared > 50


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "3", "4", "2x2"])
@pytest.mark.parametrize("name", MODELS)
def test_chosen_and_random_plans_equal_one_process(name: str, mesh: str) -> None:
    reports = [check(*built(name), mesh=mesh), check(*built(name), mesh=mesh, random=2)]
    for report in reports:
        assert report.equal, report.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_random_plans_on_real_processes_equal_one_process(name: str) -> None:
    report = check(*built(name), mesh="2", random=1, seed=3, build=partial(on_a_rank, name))
    assert report.backend == "gloo"
    assert report.equal, report.differences
