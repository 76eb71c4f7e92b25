"""Local copies of data files that are compressed, or that lie elsewhere: `a.jsonl.gz`, `s3://bucket/a.parquet`.

    make_copies("s3://bucket/part-*.jsonl.zst", "data.train")   where a run begins
    copies_of("s3://bucket/part-*.jsonl.zst", "data.train")     the files that were made, which a run reads

Rows are read at their places in a file, which takes a plain file on a local disk. The copies lie in
~/.cache/hybridflow/data, with a note by path of what each was made from. Files elsewhere are read through fsspec.
Without network the copies are read that an earlier start has made.
"""

import contextlib
import gzip
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from hybridflow.config.hub import first_line
from hybridflow.data.files import locked, opened
from hybridflow.data.listing import COMPRESSED, JSON_LINES, files_of_split, local_files
from hybridflow.errors import DataError

REMOTE = re.compile(r"[a-z][a-z0-9+.-]+://")
BLOCK = 8 << 20  # bytes read at once
TELL_SECONDS = 10.0  # between two lines about one file
ARCHIVES = (".zip", ".tar", ".tgz", ".bz2", ".xz", ".7z", ".lz4")


def is_remote(path: str) -> bool:
    return REMOTE.match(path) is not None


def needs_copy(path: Path) -> bool:
    return path.suffix in COMPRESSED


def make_copies(path: str, key: str) -> None:
    """Copy what `path` names and the cache lacks. Errors: DataError that names key, file, and what to do."""
    if is_remote(path):
        _make_of_remote(path, key)
        return
    for file in local_files(Path(path), key)[0]:
        if needs_copy(file) and file.is_file() and _read_note(_where(file)) is None:
            with opened(file):  # refuses a pointer of git-lfs
                pass
            _make(_where(file), key, str(file), partial(_opened_here, file))


def copies_of(path: str | Path, key: str) -> tuple[list[Path], tuple[str, ...]]:
    """The copies of a remote path, or of one compressed file, and notes. Errors: DataError where there are none."""
    remote = isinstance(path, str)
    if not remote and not Path(path).is_file():
        raise DataError(f"{key} = {path}: no such file")
    note = _read_note(str(path) if remote else _where(Path(path)))
    if note is None:
        what = "lies elsewhere (remote)" if remote else "is compressed"
        raise DataError(
            f"{key} = {path}: {what} and has no local copy yet. A start makes one in {_directory()}, and so does "
            f"`hybridflow data '{path}'`"
        )
    return [_directory() / name for name in note["files"]], tuple(note["notes"])


def check_no_archive(path: Path) -> None:
    """Errors: DataError for a file of a compressed kind that is not read."""
    if path.suffix in ARCHIVES:
        raise DataError(
            f"{path}: is compressed as {path.suffix[1:]}, which is not read; expand the file, or compress it as "
            f"{' or '.join(COMPRESSED)}"
        )


# ------------------------------------------------------------------------------------------------ making

Opened = tuple[str, int | None, Callable[[], IO[bytes]]]  # name, bytes if known, how to open it


def _opened_here(file: Path) -> list[Opened]:
    return [(file.name, file.stat().st_size, lambda: file.open("rb"))]


def _make_of_remote(url: str, key: str) -> None:
    try:
        system, found, notes = _listed(url, key)
        made_from = [[path, str(system.ukey(path))] for path in found]
    except DataError:
        raise
    except Exception as error:  # the network's, the service's and the package's are of many kinds
        if not isinstance(error, FileNotFoundError) and _read_note(url) is not None:
            return
        raise DataError(f"{key} = {url}: cannot be read: {first_line(error)}") from error
    before = _read_note(url)
    if before is not None and before["from"] == made_from:
        return

    def files() -> list[Opened]:
        return [(PurePosixPath(path).name, system.size(path), partial(system.open, path, "rb")) for path in found]

    _make(url, key, url, files, made_from=made_from, notes=notes)


def _listed(url: str, key: str) -> tuple[Any, list[str], tuple[str, ...]]:
    """(the file system, paths in it, notes). Errors: DataError, and those of the file system."""
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{key} = {url}: lies elsewhere (remote), and reading there needs a package: {error}"
        ) from error
    except ValueError as error:
        raise DataError(f"{key} = {url}: is no URL that fsspec reads: {error}") from error
    if any(sign in path for sign in "*?["):
        found = sorted(name for name in system.glob(path) if system.isfile(name))
        if not found:
            raise DataError(f"{key} = {url}: is a pattern (glob) that no file matches")
        return system, found, (f"{key} = {url}: {', '.join(PurePosixPath(name).name for name in found[:10])}",)
    if not system.isdir(path):
        return system, [path], ()
    by_name = {PurePosixPath(name).name: name for name in system.ls(path, detail=False) if system.isfile(name)}
    names, notes = files_of_split(list(by_name), key, url)
    return system, [by_name[name] for name in names], notes


def _make(
    where: str,
    key: str,
    shown: str,
    files: Callable[[], Sequence[Opened]],
    *,
    made_from: Any = None,
    notes: Sequence[str] = (),
) -> None:
    """Write the copies, then the note. Ranks of a host wait for the first."""
    directory = _directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f"{_digest(where)}.lock"):
            before = _read_note(where)
            if before is not None and before["from"] == made_from:
                return
            names = [_copy(opened, key, directory, where) for opened in files()]
            note = {"of": shown, "from": made_from, "files": names, "notes": list(notes)}
            _replace(_note(where), lambda file: file.write(json.dumps(note).encode()))
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: pyarrow's, of zstd
        raise DataError(f"{key} = {shown}: cannot be copied to {directory}: {first_line(error)}") from error


def _copy(opened: Opened, key: str, directory: Path, where: str) -> str:
    """The name of a copy: plain, with the suffix of what it holds."""
    name, size, begin = opened
    plain = PurePosixPath(name).stem if PurePosixPath(name).suffix in COMPRESSED else name
    suffix = PurePosixPath(plain).suffix
    if plain != name and suffix not in JSON_LINES:
        raise DataError(f"{key} = {name}: of compressed files those of JSON lines are read, such as a.jsonl.gz")
    made = f"{PurePosixPath(plain).stem}-{_digest(f'{where}/{name}')}{suffix}"

    def write(file: IO[bytes]) -> None:
        with begin() as raw, _expanded(raw, name) as stream:
            _stream(stream, raw, file, f"{key}: copying {name}", size)

    _replace(directory / made, write)
    return made


@contextlib.contextmanager
def _expanded(raw: IO[bytes], name: str) -> Iterator[Any]:
    if name.endswith(".gz"):
        with gzip.open(raw) as stream:
            yield stream
    elif name.endswith(".zst"):
        import pyarrow

        with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd") as stream:
            yield stream
    else:
        yield raw


def _stream(stream: Any, raw: IO[bytes], file: IO[bytes], what: str, size: int | None) -> None:
    """Copy all of it, and say how far it is where that takes long."""
    shown = time.monotonic()
    while block := stream.read(BLOCK):
        file.write(block)
        if time.monotonic() - shown > TELL_SECONDS:
            shown, done = time.monotonic(), raw.tell()
            share = f"{done / size:.0%} of {size / 1e6:,.0f} MB" if size else f"{done / 1e6:,.0f} MB"
            print(f"{what}: {share}", file=sys.stderr, flush=True)


def _replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """A file that is there as a whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        try:
            write(part)
            part.close()
            shutil.move(part.name, path)
        finally:
            Path(part.name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ places


def _directory() -> Path:
    return Path.home() / ".cache" / "hybridflow" / "data"


def _where(file: Path) -> str:
    """What a compressed file here is: another size or time is another file."""
    about = file.stat()
    return f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _note(where: str) -> Path:
    return _directory() / f"{_digest(where)}.json"


def _read_note(where: str) -> dict[str, Any] | None:
    """What the note says of the copies, where all copies are still there."""
    note = _note(where)
    if not note.is_file():
        return None
    found: dict[str, Any] = json.loads(note.read_bytes())
    return found if all((_directory() / name).is_file() for name in found["files"]) else None
