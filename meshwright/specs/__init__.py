"""Model specs: what to plan, by built-in name, user file, or Hugging Face config.json.

A spec says how to build (module, args, kwargs). Sizes that would not fit in memory are built on the meta device: shapes
and dtypes are real, values are not. Importing this package, listing the names and loading a built-in or Hugging Face
spec import no torch; building one does. A FILE.py is run when it is loaded.
"""

from __future__ import annotations

from .load import load_spec, spec_names
from .spec import Spec

__all__ = ["Spec", "load_spec", "spec_names"]
