"""The built-in models compute what Hugging Face's models compute with the same weights, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.specs import load_spec
from meshwright.specs.mixtral import Mixtral, MixtureOfExperts

transformers = pytest.importorskip("transformers")

# Parts of our parameter names and Hugging Face's, replaced in order.
DECODER = {
    "attention.w": "self_attn.",
    "attention.": "self_attn.",
    "feed_forward.": "mlp.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q.": "self_attn.q_proj.",
    "self_attn.k.": "self_attn.k_proj.",
    "self_attn.v.": "self_attn.v_proj.",
    "self_attn.o.": "self_attn.o_proj.",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
DECODER_ROOTS = {
    "tok_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "output": "lm_head",
}
GPT2_ROOTS = {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f", "layers": "transformer.h"}


def _build(text: str, **options: Any) -> Any:
    """(module, args, kwargs) of a spec."""
    return load_spec(text, **options).build()


def _renamed(name: str, roots: dict[str, str], parts: dict[str, str]) -> str:
    root, rest = name.split(".", 1)
    for ours, theirs in parts.items():
        rest = rest.replace(ours, theirs)
    return f"{roots[root]}.{rest}"


def _by_head(tensor: Tensor, n_heads: int) -> Tensor:
    """Rows [(q, k, v), head, head_dim] in our order [head, (q, k, v), head_dim]."""
    return tensor.unflatten(0, (3, n_heads, -1)).transpose(0, 1).flatten(0, 2)


def _decoder_options(config: Any, **more: object) -> dict[str, Any]:
    """Our decoder's sizes as options of a Hugging Face config."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **more,
    }


def _assert_equal(ours: Any, theirs: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    logits = theirs(inputs).logits
    torch.testing.assert_close(ours.logits(inputs), logits, rtol=1e-6, atol=1e-6)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(ours(inputs, labels), loss, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def _stir(model: nn.Module) -> nn.Module:
    """`model` in float64, in eval mode, with norms and biases away from the identity."""
    torch.manual_seed(1)
    for parameter in model.double().parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("tied", [False, True])
def test_llama(factor: float, tied: bool) -> None:
    tiny, args, _ = _build("llama-tiny", dtype="float64")
    config = replace(tiny.config, rope_factor=factor, rope_original_seq_len=16, tie_embeddings=tied)
    options = _decoder_options(config)
    if factor != 1.0:
        options["rope_parameters"] |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
        options["rope_parameters"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    theirs = _stir(transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)))
    ours, weights = type(tiny)(config), theirs.state_dict()
    ours.load_state_dict({name: weights[_renamed(name, DECODER_ROOTS, DECODER)] for name in ours.state_dict()})
    _assert_equal(ours, theirs, *args)


def test_qwen3() -> None:
    ours, args, _ = _build("qwen3-tiny", dtype="float64")
    config = transformers.Qwen3Config(**_decoder_options(ours.config))
    theirs = _stir(transformers.Qwen3ForCausalLM(config))
    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[_renamed(name, DECODER_ROOTS, DECODER)] for name in ours.state_dict()})
    _assert_equal(ours, theirs, *args)


def test_gpt2() -> None:
    ours, args, _ = _build("gpt2-tiny", dtype="float64")
    config = ours.config
    sizes = {"n_embd": config.dim, "n_layer": config.n_layers, "n_head": config.n_heads}
    options = {"vocab_size": config.vocab_size, "n_positions": config.max_positions, **sizes}
    theirs = _stir(transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)))
    weights, state = theirs.state_dict(), {}
    for name in ours.state_dict():
        value = weights[_renamed(name, GPT2_ROOTS, {})]
        value = value.T if "c_" in name and name.endswith("weight") else value  # Conv1D holds [in, out]
        state[name] = _by_head(value, config.n_heads) if "c_attn" in name else value
    ours.load_state_dict(state)
    _assert_equal(ours, theirs, *args)


def test_vit() -> None:
    ours, args, _ = _build("vit-tiny", dtype="float64")
    config = ours.config
    sizes = {"hidden_size": config.dim, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads}
    images = {"image_size": config.image_size, "patch_size": config.patch_size, "intermediate_size": config.mlp_dim}
    options = transformers.ViTConfig(**sizes, **images, num_labels=config.n_classes, layer_norm_eps=config.norm_eps)
    theirs = _stir(transformers.ViTForImageClassification(options))
    ours.load_state_dict(_vit_state(theirs, config.n_heads))
    _assert_equal(ours, theirs, *args)


def _vit_state(theirs: Any, n_heads: int) -> dict[str, Tensor]:
    """A Hugging Face ViT's weights in our names; its parameters come in the order of the model."""
    values = [p for name, p in theirs.named_parameters() if ".encoder." not in name and ".layers." not in name]
    cls, pos, patch_weight, patch_bias, norm_weight, norm_bias, head_weight, head_bias = values
    state = {"cls_token": cls, "pos_embed": pos, "patch_embed.weight": patch_weight, "patch_embed.bias": patch_bias}
    state |= {"norm.weight": norm_weight, "norm.bias": norm_bias, "head.weight": head_weight, "head.bias": head_bias}
    blocks = next(m for m in theirs.modules() if isinstance(m, nn.ModuleList))
    for index, block in enumerate(blocks):
        linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
        norms = [m for m in block.modules() if isinstance(m, nn.LayerNorm)]
        q, k, v, out, wide, narrow = linears
        fused = {kind: torch.cat([getattr(m, kind) for m in (q, k, v)]) for kind in ("weight", "bias")}
        parts = {"attn.c_proj": out, "mlp.c_fc": wide, "mlp.c_proj": narrow, "ln_1": norms[0], "ln_2": norms[1]}
        for kind in ("weight", "bias"):
            state[f"layers.{index}.attn.c_attn.{kind}"] = _by_head(fused[kind], n_heads)
            state |= {f"layers.{index}.{name}.{kind}": getattr(part, kind) for name, part in parts.items()}
    return state


def _no_drops(config: Any) -> Any:
    """The config with room for every choice of every token."""
    return replace(config, capacity_factor=float(config.n_experts))


def test_mixtral_with_room_for_all_tokens() -> None:
    tiny, args, _ = _build("mixtral-tiny", dtype="float64")
    config = _no_drops(tiny.config)
    experts = {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    experts |= {"experts_implementation": "eager"}  # the default, grouped_mm, has no float64
    theirs = _stir(transformers.MixtralForCausalLM(transformers.MixtralConfig(**_decoder_options(config, **experts))))
    ours, weights, state = Mixtral(config), theirs.state_dict(), {}
    for name in ours.state_dict():
        layer, _, leaf = name.partition(".feed_forward.")
        if leaf == "w2":
            state[name] = weights[f"model.{layer}.mlp.experts.down_proj"].transpose(1, 2)
        elif leaf in ("w1", "w3"):
            gate_up = weights[f"model.{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
            state[name] = gate_up[leaf == "w3"].transpose(1, 2)
        else:
            state[name] = weights[_renamed(name, DECODER_ROOTS, DECODER)]
    ours.load_state_dict(state)
    _assert_equal(ours, theirs, *args)


def _moe(**changes: object) -> tuple[MixtureOfExperts, Tensor]:
    tiny, _, _ = _build("mixtral-tiny", dtype="float64")
    torch.manual_seed(2)
    moe = MixtureOfExperts(replace(tiny.config, **changes))
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.2)
    return moe, torch.randn(2, 32, tiny.config.dim, dtype=torch.float64)


@torch.no_grad()
def _one_by_one(moe: MixtureOfExperts, x: Tensor) -> Tensor:
    """The mixture of one group, token by token, first choices before second ones."""
    weights, experts = torch.topk(moe.gate(x).softmax(-1), moe.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    free = [moe.capacity(len(x))] * moe.n_experts
    out = torch.zeros_like(x)
    for choice in range(moe.top_k):
        for token, expert in enumerate(experts[:, choice].tolist()):
            if free[expert] > 0:
                free[expert] -= 1
                hidden = nn.functional.silu(x[token] @ moe.w1[expert]) * (x[token] @ moe.w3[expert])
                out[token] += weights[token, choice] * (hidden @ moe.w2[expert])
    return out


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("group_size", [8, 32])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_experts_take_what_fits(factor: float, group_size: int, top_k: int) -> None:
    moe, x = _moe(capacity_factor=factor, group_size=group_size, top_k=top_k)
    want = torch.cat([_one_by_one(moe, group) for group in x.flatten(0, 1).split(group_size)])
    torch.testing.assert_close(moe(x).flatten(0, 1), want)
    slots = moe.route(x.view(-1, group_size, x.shape[-1])) > 0
    assert slots.sum(dim=1).max() <= 1  # no slot holds two tokens
    assert slots.sum(dim=2).max() <= top_k


@pytest.mark.parametrize("n_experts", [4, 8, 16])
def test_flops_follow_the_choices_and_not_the_number_of_experts(n_experts: int) -> None:
    moe, x = _moe(n_experts=n_experts, capacity_factor=1.0, group_size=32)
    with FlopCounterMode(display=False) as counter:
        moe(x)
    tokens, dim, ffn_dim = 64, 64, 96
    experts = 2 * tokens * 2 * 3 * dim * ffn_dim
    dispatch = 2 * 2 * tokens * 2 * 32 * dim
    assert counter.get_total_flops() == experts + dispatch + 2 * tokens * dim * n_experts
