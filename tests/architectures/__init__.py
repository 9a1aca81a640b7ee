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

__all__ = ["ARCHITECTURES", "Build"]

ARCHITECTURES: dict[str, Build] = {
    **LANGUAGE, **EXPERTS, **RECURRENT, **ENCODERS, **SEQUENCES, **VISION, **AUDIO, **MULTIMODAL,
}  # fmt: skip
