"""Whether a model that config.json calls tied has a separate output layer all the same.

Some tools write both: an untied model under a config that ties (tie_word_embeddings), or a copy of the embedding.
transformers 5 and vLLM 0.32 compare the two tensors and tie where they are equal, so this does too: in pieces, and only
where both are there.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.formats.distributed_directory import DistributedDirectory, is_distributed
from hybridflow.formats.file_bytes import opened, read_box
from hybridflow.formats.safetensors_files import INDEX, SINGLE, HeaderEntry, TensorInfo, read_header, read_index

HEAD = "lm_head.weight"  # of HuggingFace
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"  # megatron's names
PIECE_BYTES = 64 << 20

Read = Callable[[int, int], Tensor]  # rows from .. to


def has_own_head(path: Path, heads: Sequence[str], embeddings: Sequence[str], vocab_size: int) -> bool:
    """Whether the weights in `path` have an output layer that differs from the embedding.

    heads, embeddings: HuggingFace names that each may have. A directory without weights has none. Errors:
    CheckpointError for damaged files.
    """
    found = _in_distributed(path) if is_distributed(path) else _in_safetensors(path, heads, embeddings)
    if found is None:
        return False
    (head, read_head), (tokens, read_tokens) = found
    rows = [min(info.shape[0], vocab_size) for info in (head, tokens)]  # what pads a vocabulary does not count
    if rows[0] != rows[1] or head.shape[1:] != tokens.shape[1:]:
        return True
    row_bytes = max(torch.Size(info.shape[1:]).numel() * info.dtype.itemsize for info in (head, tokens))
    step = max(PIECE_BYTES // max(row_bytes, 1), 1)
    pieces = ((start, min(start + step, rows[0])) for start in range(0, rows[0], step))
    return not all(_equal(read_head(*piece), read_tokens(*piece)) for piece in pieces)


def _equal(one: Tensor, other: Tensor) -> bool:
    """By their values, whatever the dtypes; a NaN equals a NaN, or a copy of a damaged tensor would be none."""
    a, b = one.float(), other.float()
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


Found = tuple[tuple[TensorInfo, Read], tuple[TensorInfo, Read]] | None  # head and embedding, where there are both


def _in_safetensors(path: Path, *named: Sequence[str]) -> Found:
    if (path / INDEX).exists():
        listed = read_index(path / INDEX)
        files = {name: path / file for name, file in listed.items()}
    elif (path / SINGLE).exists():
        files = dict.fromkeys(read_header(path / SINGLE), path / SINGLE)
    else:
        return None
    names = [next((name for name in of_one if name in files), None) for of_one in named]
    entries = [None if name is None or None in names else read_header(files[name]).get(name) for name in names]
    head, tokens = entries
    if head is None or tokens is None:
        return None
    return (head.info, _reading(head)), (tokens.info, _reading(tokens))


def _reading(entry: HeaderEntry) -> Read:
    def read(start: int, stop: int) -> Tensor:
        shape = entry.info.shape
        out = torch.empty((stop - start, *shape[1:]), dtype=entry.info.dtype)
        with opened(entry.file) as fd:
            read_box(fd, entry.file, entry.start, shape, (start, *(0 for _ in shape[1:])), out=out)
        return out

    return read


def _in_distributed(path: Path) -> Found:
    files = DistributedDirectory(path)
    if OUTPUT not in files or EMBEDDING not in files:
        return None

    def reading(key: str) -> Read:
        columns = files.tensors[key].shape[1:]
        return lambda start, stop: files.read(key, (start, *(0 for _ in columns)), (stop - start, *columns))

    return (files.tensors[OUTPUT], reading(OUTPUT)), (files.tensors[EMBEDDING], reading(EMBEDDING))
