"""Sound and speech."""

from __future__ import annotations

from typing import Any

import torch

from .base import SPECIAL, VOCAB, Build, Made, made

__all__ = ["AUDIO"]

WAVES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4, pad_token_id=0, mask_time_prob=0.0, layerdrop=0.0,
)  # fmt: skip


def waves(stem: str, head: str = "CTC", **options: Any) -> Build:
    """`stem`For`head` on waves of 160 samples."""

    def build() -> Made:
        model = made(
            f"{stem}For{head}",
            f"{stem}Config",
            **{**WAVES, "num_labels": 5, "classifier_proj_size": 16, "ctc_zero_infinity": True, **options},
        )
        labels = torch.randint(1, VOCAB, (2, 3)) if head == "CTC" else torch.randint(0, 5, (2,))
        return model, (), {"input_values": torch.randn(2, 160), "labels": labels}

    return build


def spoken(stem: str, width: int, frames: int, *, transposed: bool = False, **options: Any) -> Build:
    """From mel frames to text."""

    def build() -> Made:
        base = dict(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            decoder_start_token_id=1,
            max_target_positions=32,
            **SPECIAL,
        )
        model = made(f"{stem}ForConditionalGeneration", f"{stem}Config", **{**base, **options})
        shape = (2, width, frames) if transposed else (2, frames, width)
        return (
            model,
            (),
            {"input_features": torch.randn(shape), "labels": torch.randint(3, VOCAB, (2, 7)), "use_cache": False},
        )

    return build


def spectrogram() -> Made:
    model = made(
        "ASTForAudioClassification",
        "ASTConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        max_length=24,
        num_mel_bins=16,
        frequency_stride=4,
        time_stride=4,
        num_labels=5,
    )
    return model, (), {"input_values": torch.randn(2, 24, 16), "labels": torch.randint(0, 5, (2,))}


AUDIO: dict[str, Build] = {
    "whisper": spoken(
        "Whisper",
        8,
        32,
        transposed=True,
        num_mel_bins=8,
        max_source_positions=16,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "speech-to-text": spoken("Speech2Text", 8, 24, input_feat_per_channel=8, max_source_positions=64, conv_channels=16),
    "wav2vec2": waves("Wav2Vec2"),
    "wav2vec2-classifier": waves("Wav2Vec2", "SequenceClassification"),
    "wav2vec2-stable": waves(
        "Wav2Vec2", "SequenceClassification", do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    "wav2vec2-masked": waves("Wav2Vec2", "SequenceClassification", mask_time_prob=0.2, mask_time_length=2),
    "hubert": waves("Hubert"),
    "hubert-classifier": waves("Hubert", "SequenceClassification"),
    "sew": waves("SEW", "SequenceClassification", squeeze_factor=2),
    "sew-d": waves("SEWD", "SequenceClassification", squeeze_factor=2),
    "unispeech": waves("UniSpeech", "SequenceClassification"),
    "unispeech-sat": waves("UniSpeechSat", "SequenceClassification"),
    "wavlm": waves("WavLM", "SequenceClassification", num_buckets=8, max_bucket_distance=16),
    "wav2vec2-conformer": waves("Wav2Vec2Conformer", "SequenceClassification", conv_depthwise_kernel_size=3),
    "data2vec-audio": waves("Data2VecAudio", "SequenceClassification"),
    "ast": spectrogram,
}
