"""What `meshwright validate` asks for: published rows priced by the same models that plans are priced with."""

from __future__ import annotations

from ..cost_models.repricing import Statistics
from ..cost_models.validation import Report, validate

__all__ = ["Report", "Statistics", "validate"]
