"""Small modules of bare PyTorch: layers, ops and ways of writing a model that no architecture of the tables uses.

`OPERATIONS` maps names to functions that give (model, args, kwargs); seed before calling one. Sizes are uneven on
purpose.
"""

from __future__ import annotations

from .base import Build
from .functions import FUNCTIONS
from .layers import LAYERS
from .programs import PROGRAMS

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, Build] = {**LAYERS, **FUNCTIONS, **PROGRAMS}
