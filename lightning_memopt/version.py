"""The version of this package. Nothing else needs to be imported to know it; ``pyproject.toml`` has the same."""

from __future__ import annotations

__version__ = "0.1.0"
