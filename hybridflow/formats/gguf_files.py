"""GGUF files, as llama.cpp has them: no model of a run is one, and a conversion reads them. See `convert.from_gguf`."""

from pathlib import Path

SUFFIX = ".gguf"


def gguf_files(path: Path) -> list[Path]:
    """The GGUF file that this is, or those that the directory has, by name."""
    found = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    return sorted(file for file in found if file.suffix.lower() == SUFFIX)


def gguf_hint(path: Path) -> str:
    """What to do with a GGUF file in the place of a model's directory, to be put behind an error; else nothing."""
    files = gguf_files(path)
    if not files:
        return ""
    file = files[0]
    return f"; {file.name} is a GGUF file: run `hybridflow convert gguf-to-hf {file} DIR`, then name DIR"
