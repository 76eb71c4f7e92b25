"""Data sets by their name on the HuggingFace Hub. `datasets` fetches them as Arrow files into a cache.

    fetch_data_set(source, "data.train")     where a run begins: what is missing is fetched
    files_of_data_set(source, "data.train")  the files there

A note beside them says which files a source has. Without network, what has been fetched for the same source is read;
`datasets` alone would take any revision in the cache.
"""

import hashlib
import json
import os
from pathlib import Path

from hybridflow.config.data import HubSourceConfig
from hybridflow.config.hub import first_line
from hybridflow.errors import DataError


def files_of_data_set(source: HubSourceConfig, key: str) -> list[Path]:
    """The Arrow files of a source that has been fetched. Errors: DataError where it has not."""
    noted = _read_note(source, key)
    if noted is None:
        raise DataError(f"{key} = {source.title}: is not in the cache of data sets, {_note(source, key).parents[1]}")
    return noted


def fetch_data_set(source: HubSourceConfig, key: str) -> None:
    """Fetch what the cache lacks.

    Errors: DataError that names key and data set, and what to do where there is no network.
    """
    where = f"{key} = {source.title}"
    if Path(source.hub).exists():
        raise DataError(f"{where}: {source.hub} is here as a file or directory: name its files instead")
    note = _note(source, key)
    from datasets import load_dataset
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.hub, revision=source.revision).sha
        rows = load_dataset(source.hub, source.name, split=source.split, revision=commit, keep_in_memory=False)
    except Exception as error:  # the Hub's, the network's and the disk's are of many kinds
        if _is_answer(error) or _read_note(source, key) is None:
            at = f" --revision {source.revision}" if source.revision else ""
            raise DataError(
                f"{where}: cannot be fetched from the HuggingFace Hub: {first_line(error)}; where there is network, "
                f"`hf download --repo-type dataset {source.hub}{at} --local-dir DIR`, then name the files there"
            ) from error
        return
    names = [file["filename"] for file in rows.cache_files]
    note.parent.mkdir(parents=True, exist_ok=True)
    written = note.with_suffix(f".{os.getpid()}")  # several processes of a host may fetch the same
    written.write_text(
        json.dumps({"source": source.model_dump(exclude={"weight"}), "commit": commit, "files": names}),
        encoding="utf-8",
    )
    written.replace(note)


def _is_answer(error: Exception) -> bool:
    """Whether the Hub has answered that there is no such data set, revision or split, or not for this user."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500 and error.response.status_code != 429  # 429: too many requests
    return isinstance(error, ValueError)  # the split or the subset


def _note(source: HubSourceConfig, key: str) -> Path:
    try:
        from datasets.config import HF_DATASETS_CACHE
    except ImportError as error:
        raise DataError(
            f"{key} = {source.title}: is a data set of the HuggingFace Hub, which `datasets` reads: pip install "
            "'hybridflow[hub]'"
        ) from error
    named = json.dumps(source.model_dump(exclude={"weight"}), sort_keys=True)
    return (
        Path(HF_DATASETS_CACHE) / "hybridflow" / f"{hashlib.blake2b(named.encode(), digest_size=16).hexdigest()}.json"
    )


def _read_note(source: HubSourceConfig, key: str) -> list[Path] | None:
    """The files that have been fetched for this source, if all are still there."""
    note = _note(source, key)
    if not note.is_file():
        return None
    files = [Path(name) for name in json.loads(note.read_text(encoding="utf-8"))["files"]]
    return files if all(file.is_file() for file in files) else None
