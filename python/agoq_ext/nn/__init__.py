"""Neural network building blocks that keep less for backward."""

from __future__ import annotations

from . import functional

__all__ = ["functional"]
