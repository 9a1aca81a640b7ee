"""Encoders of text."""

from __future__ import annotations

from typing import Any

import torch

from .base import VOCAB, Build, Made, ids, made

__all__ = ["ENCODERS"]

USUAL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    pad_token_id=0,
)


def masked(stem: str, head: str = "MaskedLM", **options: Any) -> Build:
    """`stem`For`head` on a padded batch; two in three tokens carry no label."""

    def build() -> Made:
        tokens = ids()
        labels = tokens.clone()
        labels[:, 4:] = -100
        mask = torch.ones_like(tokens)
        mask[-1, 9:] = 0
        model = made(f"{stem}For{head}", f"{stem}Config", **{**USUAL, **options})
        return model, (), {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return build


def classifier(stem: str, **options: Any) -> Build:
    """`stem`ForSequenceClassification."""

    def build() -> Made:
        model = made(f"{stem}ForSequenceClassification", f"{stem}Config", **{**USUAL, "num_labels": 3, **options})
        return model, (), {"input_ids": ids(), "labels": torch.tensor([0, 2, 1, 1])}

    return build


def after_one_step(build: Build) -> Build:
    """A model that has run once: its first step sets ranges that all others only change, by a branch on them."""

    def run_once() -> Made:
        model, args, kwargs = build()
        with torch.no_grad():
            model(*args, **kwargs)
        return model, args, kwargs

    return run_once


SMALL = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64)
APART = dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=False)

ENCODERS: dict[str, Build] = {
    "bert": masked("Bert"),
    "bert-classifier": classifier("Bert"),
    "roberta": masked("Roberta", pad_token_id=1),
    "xlm-roberta": masked("XLMRoberta", pad_token_id=1),
    "camembert": masked("Camembert", pad_token_id=1),
    "deberta": masked("Deberta", **APART),
    "deberta-v2": masked("DebertaV2", **APART, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    "electra": masked("Electra", embedding_size=16),
    "albert": masked("Albert", embedding_size=16, hidden_dropout_prob=0.1),
    "distilbert": masked("DistilBert", **SMALL),
    "modernbert": masked("ModernBert", global_attn_every_n_layers=2, local_attention=4),
    "mpnet": masked("MPNet", pad_token_id=1),
    "roformer": masked("RoFormer", embedding_size=32),
    "convbert": masked("ConvBert", embedding_size=32, conv_kernel_size=3),
    "fnet": masked("FNet"),
    "nystromformer": masked("Nystromformer", num_landmarks=12, segment_means_seq_len=12),
    "big-bird": masked("BigBird", attention_type="original_full"),
    "mobilebert": masked("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "squeezebert": masked("SqueezeBert", embedding_size=32),
    "layoutlm": masked("LayoutLM"),
    "ibert": after_one_step(masked("IBert", pad_token_id=1)),
    "megatron-bert": masked("MegatronBert"),
    "rembert": masked("RemBert", input_embedding_size=16, output_embedding_size=16),
    "esm": masked("Esm", pad_token_id=1, mask_token_id=3, position_embedding_type="rotary"),
    "eurobert": masked("EuroBert", num_key_value_heads=2),
    "nomic-bert": masked("NomicBert"),
    "longformer": masked("Longformer", attention_window=4, pad_token_id=1),
}
