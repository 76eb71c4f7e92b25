"""What a model is: families, sizes, weights, how ranks split them, and the files that hold them. No megatron."""
