"""Tiny random-weight models of real architectures, in training mode, with a loss from labels.

`ARCHITECTURES` maps names to functions that give (model, args, kwargs); seed before calling one. Shapes are uneven on
purpose where an architecture allows it: a vocabulary of 101, odd numbers of tokens.
"""

from __future__ import annotations

from .audio import AUDIO
from .base import Build
from .encoders import ENCODERS
from .experts import EXPERTS
from .language import LANGUAGE
from .multimodal import MULTIMODAL
from .recurrent import RECURRENT
from .sequences import SEQUENCES
from .vision import VISION

__all__ = ["ARCHITECTURES", "REFUSED", "Build"]

_ALL: dict[str, Build] = {
    **LANGUAGE, **EXPERTS, **RECURRENT, **ENCODERS, **SEQUENCES, **VISION, **AUDIO, **MULTIMODAL,
}  # fmt: skip
# What their shapes or branches depend on is learnt or cannot be seen; the name is in the message.
_MESSAGES = {
    "mixtral-eager": "data-dependent",  # a loop over the experts that were hit
    "jetmoe": "data-dependent",  # tokens per expert as a list
    "switch": "data-dependent",
    "nllb-moe": "data-dependent",
    "m2m-layerdrop": "dropout_probability",  # a layer is skipped by a draw
    "wav2vec2-masked": r"numpy\.random",  # a mask drawn by numpy
}
ARCHITECTURES: dict[str, Build] = {name: build for name, build in _ALL.items() if name not in _MESSAGES}
REFUSED: dict[str, tuple[Build, str]] = {name: (_ALL[name], message) for name, message in _MESSAGES.items()}
