"""Safetensors files of a HuggingFace directory, read by the slice."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.errors import CheckpointError

Shape = tuple[int, ...]


class SafetensorsDirectory:
    """The tensors of model.safetensors or of the shards that model.safetensors.index.json lists.

    Every file is opened, and with that its header checked against its size, when the directory is.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = sorted(set(self._files()))
        self._handles = {file: _open(file) for file in files}
        self._file_of = {key: file for file, handle in self._handles.items() for key in handle.keys()}

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return [self.path / "model.safetensors"]
        try:
            return [self.path / name for name in json.loads(index.read_text())["weight_map"].values()]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: is no index of safetensors files: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: Shape, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (dim 0) or columns (dim 1) start:stop of tensor `name`, whose full shape must be `shape`."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: no tensor {name} in {', '.join(f.name for f in self._handles)}")
        tensor = self._handles[file].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise CheckpointError(f"{file}: {name} has shape {tuple(tensor.get_shape())}, config.json asks for {shape}")
        dtype = tensor.get_dtype()
        if dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{file}: {name} is {dtype}; float32, bfloat16 and float16 weights can be read")
        return tensor[start:stop] if dim == 0 else tensor[:, start:stop]


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file; weights are read from safetensors") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: is damaged or cut short: {error}") from error
