"""The output of a function without its memory, from the end of the forward pass to the backward pass of its readers.

    dropped = DroppedOutput()
    y = dropped.checkpoint(function, x)
    z = read(y)                                                y is an input of what makes z, and kept for the gradient
    dropped.discard_output_and_register_recompute(z)           y's memory is free; z's gradient brings it back

It takes the place, and has the methods, of megatron-core's `CheckpointWithoutOutput`. That class asks Transformer
Engine for fp8 that nobody has turned on (0.16.1, 0.19.2), and compiles C++ when it is first used (0.19.2).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]


class DroppedOutput:
    """Of one call. The function draws no random numbers, and its inputs stay as they are."""

    def __init__(self) -> None:
        self._function: Function | None = None
        self._output: Tensor | None = None
        self._node: Any = None  # of the graph: has the inputs

    def checkpoint(self, function: Function, *inputs: Tensor) -> Tensor:
        """function(*inputs). Without gradients there is nothing to drop."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        self._function = function
        output: Tensor = _MadeAgain.apply(self, *inputs)
        self._output = output if output.requires_grad else None
        return output

    def discard_output_and_register_recompute(self, reader: Tensor) -> None:
        """Free the output's memory until the gradient of `reader` is there, which has to be before others read it."""
        if self._output is None:
            return
        assert reader.requires_grad, "nobody would bring the output back"
        self._output.untyped_storage().resize_(0)
        reader.register_hook(self._bring_back)

    def run(self, node: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        self._node = node
        assert self._function is not None, "called by `checkpoint`"
        return self._function(*inputs)

    def _bring_back(self, gradient: Tensor) -> None:
        if self._node is None or self._output is None or self._function is None:
            return  # it is back
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in self._node.saved_tensors]
        with torch.enable_grad():
            again = self._function(*inputs)
        storage, source = self._output.untyped_storage(), again.untyped_storage()
        storage.resize_(source.nbytes())  # the storage itself: whatever was kept are views of it
        storage.copy_(source)
        self._node.made = again, inputs
        self._function = self._output = self._node = None


class _MadeAgain(torch.autograd.Function):
    """The function's output; the gradient is that of the second time."""

    @staticmethod
    def forward(ctx: Any, dropped: DroppedOutput, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return dropped.run(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (output, inputs), ctx.made = ctx.made, None
        torch.autograd.backward(output, gradient)
        return None, *(x.grad for x in inputs)
