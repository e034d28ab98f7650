"""The sink: how a kernel that makes a weight gradient writes it into the store, without a full-precision copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from .store import GradientStore


class GradientSink:
    """The place of one parameter's gradient in a `GradientStore`.

    A weight-gradient GEMM calls `add` with blocks of whole rows as it finishes them, in any order, each row once, and
    `done` after the last; the backward that does so returns None for the parameter's gradient. What has been added is
    what `.grad` would have been: it counts as one gradient of a micro-batch.

    Attributes:
        parameter: [rows, ..., cols], cols a multiple of the store's group size, so that no group crosses rows.
    """

    def __init__(self, store: GradientStore, parameter: nn.Parameter) -> None:
        self._store = store
        self.parameter = parameter

    def add(self, first_row: int, rows: Tensor) -> None:
        """Adds the gradient of some rows.

        Args:
            first_row: index of the first, in the parameter seen as [numel / cols, cols].
            rows: float32, float16 or bfloat16 [n, cols].

        Raises:
            ValueError: the rows are not within the parameter.
            RuntimeError: this step's gradient has been exchanged already.
        """
        cols = self.parameter.shape[-1]
        total = self.parameter.numel() // cols
        if rows.dim() != 2 or rows.shape[1] != cols:
            raise ValueError(f"GradientSink.add: rows must have shape [n, {cols}]; got {tuple(rows.shape)}")
        if not 0 <= first_row <= total - rows.shape[0]:
            raise ValueError(
                f"GradientSink.add: first_row must be in [0, {total - rows.shape[0]}] for {rows.shape[0]} rows; "
                f"got {first_row}"
            )
        self._store._add(self.parameter, rows, first_row * cols)

    def done(self) -> None:
        """Says that the parameter's gradient of this backward pass is complete."""
        self._store._arrived(self.parameter)
