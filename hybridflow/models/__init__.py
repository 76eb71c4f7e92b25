"""How a model runs in megatron-core: built on a grid, over packed micro-batches, with an optimizer."""
