"""GGUF files, as llama.cpp has them: no model of a run is one, and a conversion reads them. See `convert.from_gguf`."""

from pathlib import Path

SUFFIX = ".gguf"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that this is, or that the directory has; None where there is none."""
    if path.is_dir():
        return min(path.glob(f"*{SUFFIX}"), default=None)
    return path if path.suffix.lower() == SUFFIX and path.is_file() else None


def gguf_hint(path: Path) -> str:
    """What to do with a GGUF file in the place of a model's directory, to be put behind an error; else nothing."""
    file = gguf_file(path)
    if file is None:
        return ""
    return f"; {file.name} is a GGUF file: run `hybridflow convert gguf-to-hf {file} DIR`, then name DIR"
