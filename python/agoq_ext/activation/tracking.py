"""ModuleStack: which of a model's modules is running its forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleStack:
    """The modules of `model` whose forward is running, outermost first, while `tracking` is entered.

    Global hooks, because hooks on the modules themselves would tell converted modules to stay apart.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[nn.Module] = []

    @property
    def module(self) -> nn.Module | None:
        """The innermost one that is running."""
        return self.running[-1] if self.running else None

    @property
    def name(self) -> str:
        """Its name; "" for the model itself and outside of it."""
        return self.names[self.running[-1]] if self.running else ""

    @contextmanager
    def tracking(self) -> Iterator[None]:
        def enter(module: nn.Module, args: Any) -> None:
            if module in self.names:
                self.running.append(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.running and self.running[-1] is module:
                self.running.pop()

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
