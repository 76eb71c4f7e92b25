"""What our own mixers of tokens have in common, which stand where megatron has attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.models.recomputation import runs_again

LinearClass = Callable[..., Any]  # megatron's column- or row-parallel layer, or Transformer Engine's


@dataclass
class LinearClasses:
    """Of a layer's linear layers."""

    column: LinearClass
    row: LinearClass

    def column_parallel(
        self, config: TransformerConfig, inputs: int, outputs: int, groups: ProcessGroupCollection
    ) -> Any:
        """megatron's column-parallel layer: reads all tokens, and gives the outputs of this rank's rows of W."""
        return self.column(inputs, outputs, gather_output=False, **_options(config, groups, skip_bias_add=False))

    def row_parallel(self, config: TransformerConfig, inputs: int, outputs: int, groups: ProcessGroupCollection) -> Any:
        """megatron's row-parallel layer: reads this rank's columns of inputs, and gives the sum over the ranks."""
        return self.row(inputs, outputs, input_is_parallel=True, **_options(config, groups, skip_bias_add=True))


def _options(config: TransformerConfig, groups: ProcessGroupCollection, *, skip_bias_add: bool) -> dict[str, Any]:
    return {
        "config": config,
        "init_method": config.init_method,  # never called: every weight is loaded
        "bias": False,
        "skip_bias_add": skip_bias_add,
        "is_expert": False,
        "tp_group": groups.tp,
    }


class Mixer(MegatronModule):
    """megatron's `self_attention` of a layer. What lies between its linear layers may be computed again."""

    def __init__(self, config: TransformerConfig, layer_number: int) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self._again = runs_again(config, "core_attn")

    def computed(self, core: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """core(*inputs), again in the backward pass where the config says so of core attention."""
        again = self._again and self.training
        found: Tensor = checkpoint(core, False, *inputs) if again else core(*inputs)
        return found
