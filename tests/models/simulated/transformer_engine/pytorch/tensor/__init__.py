"""Tensors of 8 bits, of which there are none here."""


class QuantizedTensor: ...
