"""Pointers of git-lfs: what a clone without it has in the place of a large file, three lines of text."""

POINTER = b"version https://git-lfs.github.com/spec/"
NOT_FETCHED = "is a pointer of git-lfs in the place of the file; `git lfs pull` in the clone fetches the file itself"


def is_pointer(beginning: bytes) -> bool:
    """beginning: of a file, at least 64 bytes where it has so many."""
    return beginning.startswith(POINTER)
