"""Imports what a rank needs; the server that forks local ranks loads this once for all of them."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # a rank reports what is missing, this only saves it time
    from transformers.models.llama import configuration_llama, modeling_llama  # noqa: F401

    from . import trainer  # noqa: F401
