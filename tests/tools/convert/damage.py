"""Damaged checkpoints of both kinds, from a seed. Every function changes one directory in place, in one way."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tools.convert.tiny import INDEX

Damage = Callable[[Path, random.Random], None]

ODD_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 100, 1 << 31, 1 << 70, 0.5, -2.5, 1e308, float("nan"), float("inf")),
    *("", "x", "2", "\ud800", [], [1], {}, {"factor": 2}, ["LlamaForCausalLM"], {"rope_type": "linear"}, [[[[]]]]),
)


def flip_bits(file: Path, rng: random.Random, *, first: int = 0, last: int | None = None) -> None:
    """One to eight bits among bytes first:last."""
    data = bytearray(file.read_bytes())
    end = min(len(data), len(data) if last is None else last)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice([0, 1, 7, 8, 9, len(data) - 1, rng.randrange(len(data))])])


def splice(file: Path, rng: random.Random) -> None:
    """Some bytes taken out, or put in, or written over by others of the file."""
    data = file.read_bytes()
    at, length = rng.randrange(len(data)), rng.randint(1, 64)
    piece = data[(start := rng.randrange(len(data))) : start + length]
    file.write_bytes(data[:at] + rng.choice([b"", piece]) + data[at + rng.choice([0, length]) :])


def replace(file: Path, rng: random.Random) -> None:
    """Something else by that name."""
    kind = rng.choice(["absent", "empty", "directory", "noise", "dangling", "itself"])
    file.unlink()
    if kind == "empty":
        file.touch()
    elif kind == "directory":
        file.mkdir()
    elif kind == "noise":
        file.write_bytes(rng.randbytes(rng.randint(1, 4096)))
    elif kind != "absent":
        file.symlink_to(file.name if kind == "itself" else "nowhere")


def any_file(change: Callable[[Path, random.Random], None], *patterns: str) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        change(rng.choice(sorted(file for pattern in patterns for file in directory.glob(pattern))), rng)

    return damage


# ------------------------------------------------------------------------------------------------------ config.json


def change_config(directory: Path, rng: random.Random) -> None:
    """A field gone, odd, or slightly off."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    key = rng.choice(sorted(config))
    if rng.random() < 0.2:
        del config[key]
    elif isinstance(config[key], int) and rng.random() < 0.5:
        config[key] = config[key] * rng.choice([2, -1, 1 << 20]) + rng.choice([-1, 0, 1])
    else:
        config[key] = rng.choice(ODD_VALUES)
    file.write_text(json.dumps(config))


# ------------------------------------------------------------------------------------------------------ safetensors


def change_header(directory: Path, rng: random.Random) -> None:
    """Valid JSON that says something else of the tensors."""
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = sorted(header.keys() - {"__metadata__"})
    one, other = rng.sample(names, 2)
    match rng.randrange(8):
        case 0:
            header[one]["shape"], header[other]["shape"] = header[other]["shape"], header[one]["shape"]
        case 1:
            header[one]["shape"].reverse()
        case 2:
            header[one], header[other] = header[other], header[one]
        case 3:
            header[rng.choice([other, one + ".x", "lm_head.weight", ""])] = header.pop(one)
        case 4:
            header[one]["dtype"] = rng.choice(["F16", "BF16", "F32", "I32", "U8", "F8_E4M3", "F4", 7])
        case 5:
            header[one]["data_offsets"][rng.randrange(2)] += rng.choice([-4, 4, 1 << 40, -1])
        case 6:
            header[one][rng.choice(["shape", "dtype", "data_offsets", "more"])] = rng.choice(ODD_VALUES)
        case 7:
            header[one]["shape"] = rng.choice([[], [-1], [0], [1 << 62, 4], [1, *header[one]["shape"]], [2.0]])
    text = json.dumps(header).encode()
    if rng.random() < 0.1:  # a key twice
        text = text[:-1] + b"," + json.dumps({other: header.get(other)}).encode()[1:]
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def flip_header(directory: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(directory.glob("*.safetensors")))
    length = int.from_bytes(file.read_bytes()[:8], "little")
    flip_bits(file, rng, last=8 + length)


def change_index(directory: Path, rng: random.Random) -> None:
    file = directory / INDEX
    tree = json.loads(file.read_text())
    files = tree["weight_map"]
    name = rng.choice(sorted(files))
    match rng.randrange(4):
        case 0:
            del files[name]
        case 1:
            files[name] = rng.choice([*files.values(), "../x.safetensors", "/etc/passwd", "config.json", 3, None, ""])
        case 2:
            files[name + ".x"] = files[name]
        case 3:
            tree[rng.choice(["weight_map", "metadata"])] = rng.choice(ODD_VALUES)
    file.write_text(json.dumps(tree))


def swap_files(directory: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(directory.glob("*.safetensors")), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


HUGGINGFACE: tuple[Damage, ...] = (
    any_file(truncate, "*.safetensors", INDEX, "config.json"),
    any_file(splice, "*.safetensors", INDEX, "config.json"),
    any_file(replace, "*.safetensors", INDEX, "config.json"),
    any_file(flip_bits, "*.safetensors"),
    any_file(flip_bits, INDEX, "config.json"),
    flip_header,
    flip_header,
    change_header,
    change_header,
    change_header,
    change_index,
    change_config,
    change_config,
    swap_files,
)

# ------------------------------------------------------------------------------------------------------ torch_dist


def change_metadata(directory: Path, rng: random.Random) -> None:
    """A sound pickle that says something else of keys, shapes, chunks and files."""
    file = directory / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
    one, other = rng.sample(sorted(tensors), 2)
    chunk = rng.choice(tensors[one].chunks)
    place = rng.choice(sorted(metadata.storage_data, key=str))
    where = metadata.storage_data[place]
    match rng.randrange(9):
        case 0:
            del metadata.state_dict_metadata[one]
        case 1:
            metadata.state_dict_metadata[one], metadata.state_dict_metadata[other] = tensors[other], tensors[one]
        case 2:
            tensors[one].chunks.append(chunk)
        case 3:
            tensors[one].chunks.remove(chunk)
        case 4:
            chunk.offsets = type(chunk.offsets)([n + rng.choice([-1, 0, 1, 8]) for n in chunk.offsets])
        case 5:
            chunk.sizes = type(chunk.sizes)([max(n + rng.choice([-1, 0, 1]), 0) for n in chunk.sizes])
        case 6:
            del metadata.storage_data[place]
        case 7:
            where.offset, where.length = where.offset + rng.choice([0, 1, 64, -1]), where.length * rng.choice([1, 2, 0])
        case 8:
            where.relative_path = rng.choice(["__1_0.distcp", "../x", "/etc/passwd", "config.json", ""])
    file.write_bytes(pickle.dumps(metadata))


MEGATRON: tuple[Damage, ...] = (
    any_file(truncate, ".metadata", "metadata.json", "*.distcp"),
    any_file(splice, ".metadata", "metadata.json", "*.distcp"),
    any_file(replace, ".metadata", "metadata.json", "*.distcp", "common.pt"),
    any_file(flip_bits, ".metadata"),
    any_file(flip_bits, ".metadata"),
    any_file(flip_bits, "metadata.json", "common.pt"),
    any_file(flip_bits, "*.distcp"),
    change_metadata,
    change_metadata,
    change_metadata,
    change_config,
)
