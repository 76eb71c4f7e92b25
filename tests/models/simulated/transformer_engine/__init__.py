"""What megatron-core 0.16.1 and 0.19.2 ask of Transformer Engine for dense layers, with torch's arithmetic.

The real one needs CUDA to be imported. This one has its names: which class holds which parameter under which name, and
whether a norm is in front of a linear layer. It stands on Python's path of a worker alone.
"""

from transformer_engine import common, pytorch

__version__ = "2.16.1"
__all__ = ["common", "pytorch"]
