"""Whether all ranks have the same: the files of a run when it starts, the batch of each iteration.

    check_agreement({"data.train": prompts.digest, ...}, dist.group.WORLD)
    check_agreement({f"iteration {i}: the batch": digest_tensors(batch.tensors())}, dist.group.WORLD)

Ranks compute on what they take for one batch under one config. Where a host has another file, nothing fails by itself:
the parts are put together all the same. So ranks compare what they have, by 16 bytes a rank.
"""

import hashlib
import logging
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hybridflow.errors import DisagreementError, OfAnotherRank
from hybridflow.parallel.diagnosis import lost_peer
from hybridflow.parallel.rank_log import IN_FILES_ALONE
from hybridflow.parallel.ranks import shown
from hybridflow.parallel.versions import installed_version

DIGEST_BYTES = 16  # as b2sum -l 128 prints them
LOG = logging.getLogger(__name__)
MEETING_SECONDS = 10.0  # between the first rank with an error and the last
CHECKED_BYTES = 1 << 16  # of a tensor, by one checksum of 32 bits
SAMPLE_BYTES = 1 << 14
PACKAGES = ("torch", "megatron-core", "vllm", "transformers")  # what computes


def check_agreement(digests: Mapping[str, bytes], group: dist.ProcessGroup) -> None:
    """Raise the same DisagreementError on every rank unless all have the same names with the same bytes.

    Collective over `group`, which must take tensors on the CPU: one collective of 16 bytes a rank; only where they
    differ a second one, by which every rank learns what the others have.

    digests: of what must be alike, by the name that the user knows it under. Ranks may have other names; their order
    does not matter. A value that is text is shown in the message, as a version is.
    """
    own = torch.frombuffer(bytearray(_joint_digest(digests)), dtype=torch.uint8)
    joint = own.new_empty(group.size() * DIGEST_BYTES)
    dist.all_gather_into_tensor(joint, own, group=group)
    if bool((joint.view(-1, DIGEST_BYTES) == own).all()):
        return
    every: list[dict[str, bytes]] = [{} for _ in range(group.size())]
    dist.all_gather_object(every, dict(digests), group=group)
    raise DisagreementError("; ".join(differences(dict(zip(dist.get_process_group_ranks(group), every, strict=True)))))


def failures(own: str | None, group: dist.ProcessGroup) -> list[str]:
    """What went wrong, on whichever rank, known to all: `rank 3: ...`. `own`: here, None if nothing did.

    Collective over `group`, which must take tensors on the CPU: one collective of a number; a second if there is one.
    """
    failed = torch.tensor(own is not None, dtype=torch.int32)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed:
        return []
    every: list[str | None] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    return [f"rank {rank}: {text}" for rank, text in zip(ranks, every, strict=True) if text is not None]


def raise_on_all_ranks(own: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise on all ranks what one of them has met: `own` there, OfAnotherRank elsewhere. Collective, as `failures`."""
    found = failures(None if own is None else f"{type(own).__name__}: {own}", group)
    if found:
        raise OfAnotherRank("; ".join(found)) if own is None else own


def met_by_all(error: Exception, number: int, group: dist.ProcessGroup, store: Store) -> bool:
    """Whether all ranks have met an error at this place, and so may call collectives again. number: of the iteration.

    Ranks ask the store, not each other: a rank without an error is in another collective, and never answers.
    """
    if group.size() == 1:
        return True
    if lost_peer(error) and not isinstance(error, OfAnotherRank):
        return False
    LOG.error("have all ranks met it? %s: %s", type(error).__name__, error, extra=IN_FILES_ALONE)
    key = f"met/{number}/{_place(error)}"
    until = time.monotonic() + MEETING_SECONDS
    try:
        count = store.add(key, 1)
        while count < group.size() and time.monotonic() < until:
            time.sleep(0.05)
            count = store.add(key, 0)
    except RuntimeError:  # the store has ended with another rank
        return False
    return count >= group.size()


def _place(error: BaseException) -> str:
    """A digest of the calls that led to `error`, down to `raise_on_all_ranks` if that call has raised the error."""
    calls = traceback.extract_tb(error.__traceback__)
    known = next((i for i, call in enumerate(calls) if call.name == raise_on_all_ranks.__name__), None)
    return digest_bytes(*(f"{call.filename}:{call.lineno}".encode() for call in calls[:known])).hex()


def differences(digests: Mapping[int, Mapping[str, bytes]]) -> list[str]:
    """A line for each name that does not stand for the same on all ranks: who has another than most. Pure.

    digests: rank -> name -> bytes. Where no value is that of most ranks, that of the lowest one is what others differ
    from.
    """
    lines = []
    for name in dict.fromkeys(name for own in digests.values() for name in own):
        holders: dict[bytes | None, list[int]] = {}
        for rank, own in sorted(digests.items()):
            holders.setdefault(own.get(name), []).append(rank)
        (usual, most), *others = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
        if others:
            unlike = ", ".join(f"{_ranks(ranks)} {_has(value, len(ranks))}" for value, ranks in others)
            lines.append(f"{name} differs between ranks: {unlike}, but {_ranks(most)} {_has(usual, len(most))}")
    return lines


def digest_bytes(*pieces: bytes) -> bytes:
    """The digest of these pieces; how the bytes are cut counts."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.digest()


def digest_files(files: Sequence[Path], root: Path) -> bytes:
    """Of the bytes of small files and of their names below `root`."""
    return digest_bytes(
        *(piece for file in files for piece in (str(file.relative_to(root)).encode(), file.read_bytes()))
    )


def digest_samples(directory: Path, patterns: Sequence[str]) -> bytes:
    """Of large files: names, sizes, the first SAMPLE_BYTES, and as many at each 64th of a file. Milliseconds each."""
    pieces: list[bytes] = []
    for file in sorted({file for pattern in patterns for file in directory.glob(pattern)}):
        size = file.stat().st_size
        pieces.append(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(0, size, max(size // 64, SAMPLE_BYTES)):
                opened.seek(place)
                pieces.append(opened.read(SAMPLE_BYTES))
    return digest_bytes(*pieces)


def digest_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Of every bit of the tensors, their dtypes, shapes and names, in any order of names: 0.2 s a GB.

    A checksum of each CHECKED_BYTES stands for them. Nobody forges a batch, and a checksum takes a fifth of the time.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHECKED_BYTES):
            digest.update(zlib.crc32(data[start : start + CHECKED_BYTES]).to_bytes(4, "little"))
    return digest.digest()


def code_digests() -> dict[str, bytes]:
    """hybridflow's own Python files, and the versions of the packages that compute."""
    root = Path(__file__).resolve().parents[1]
    code = digest_files(sorted(root.rglob("*.py")), root)
    versions = {f"the version of {name}": (installed_version(name) or "none").encode() for name in PACKAGES}
    return {"hybridflow's code": code} | versions


def _joint_digest(digests: Mapping[str, bytes]) -> bytes:
    return digest_bytes(*(piece for name, value in sorted(digests.items()) for piece in (name.encode(), value)))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {shown(ranks)}"


def _has(value: bytes | None, num_ranks: int) -> str:
    has = "has" if num_ranks == 1 else "have"
    if value is None:
        return f"{has} none"
    text = value.decode("ascii", errors="replace")
    return f"{has} {text if text.isascii() and text.isprintable() else value.hex()}"
