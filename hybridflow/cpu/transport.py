"""Pieces that a rank reads in the memory of peers, in place of messages, where it can: on CPUs of one host.

Both sides know the pieces and their order. Before the first, each tells those that would read where the pieces lie;
after those of a bucket each reader says so, and what was read may then go or change.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cpu import peer_memory

Parts = tuple[int, list[Tensor]]  # (peer, pieces)


class Traffic(NamedTuple):
    """Of a bucket on this rank."""

    receives: list[Parts]  # (peer, where it goes)
    contents: list[list[Tensor]]  # what is sent
    sends: list[tuple[int, int]]  # (peer, which content)


ExchangeBucket = Callable[[Traffic], tuple[int, int]]  # bytes received, bytes sent


class PeerSource(NamedTuple):
    """A peer whose memory is read: the process, and where the pieces lie that are to come."""

    process: int
    places: Iterator[tuple[int, int]]


class Reads:
    """sources: peers that this rank reads from. readers: peers that read from it. Both as `begin` found them."""

    def __init__(self, buckets: Sequence[Traffic], group: dist.ProcessGroup) -> None:
        self._buckets, self._group = buckets, group
        self.sources: dict[int, PeerSource] = {}
        self.readers: set[int] = set()

    def begin(self, messages: ExchangeBucket) -> ExchangeBucket:
        """Find out who can read from whom, and where: collective over the ranks that exchange anything.

        Returns an exchange of buckets: by reading where that is possible, else by `messages`.
        """
        sources, targets = _outgoing(self._buckets), _incoming(self._buckets)
        if not sources and not targets:
            return messages
        own = peer_memory.introduction()
        introductions = {peer: torch.cat([own, places_of(pieces)]) for peer, pieces in sources.items()}
        heard = {peer: own.new_empty(len(own) + 2 * len(pieces)) for peer, pieces in targets.items()}
        self._exchange(introductions, heard)
        answers = {peer: torch.tensor([peer_memory.can_read(x[: len(own)])]) for peer, x in heard.items()}
        asked = {peer: torch.zeros(1, dtype=torch.bool) for peer in introductions}
        self._exchange(answers, asked)
        self.sources = {
            peer: PeerSource(int(x[1]), map(tuple, x[len(own) :].view(-1, 2).tolist()))
            for peer, x in heard.items()
            if answers[peer]
        }
        self.readers = {peer for peer, yes in asked.items() if yes}
        return partial(self._read, messages)

    def _read(self, messages: ExchangeBucket, bucket: Traffic) -> tuple[int, int]:
        """Read what is due in a bucket, and wait until the others have read; bytes received, bytes sent."""
        receives = [(peer, pieces) for peer, pieces in bucket.receives if peer not in self.sources]
        sends = [(peer, i) for peer, i in bucket.sends if peer not in self.readers]
        by_message = messages(Traffic(receives, bucket.contents, sends))
        of_peers = {peer: x for peer, x in _incoming([bucket]).items() if peer in self.sources}
        for peer, targets in of_peers.items():
            process, places = self.sources[peer]
            pieces = [peer_memory.PeerRectangle(*next(places), target) for target in targets]
            peer_memory.read(process, pieces)
        for_peers = {peer: x for peer, x in _outgoing([bucket]).items() if peer in self.readers}
        self._exchange({peer: torch.ones(1) for peer in of_peers}, {peer: torch.empty(1) for peer in for_peers})
        received, sent = (sum(x.nbytes for pieces in way.values() for x in pieces) for way in (of_peers, for_peers))
        return by_message[0] + received, by_message[1] + sent

    def _exchange(self, to: dict[int, Tensor], of: dict[int, Tensor]) -> None:
        operations = [dist.P2POp(dist.isend, x, peer, self._group) for peer, x in to.items()]
        operations += [dist.P2POp(dist.irecv, x, peer, self._group) for peer, x in of.items()]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()


def _incoming(buckets: Sequence[Traffic]) -> dict[int, list[Tensor]]:
    return _by_peer(parts for bucket in buckets for parts in bucket.receives)


def _outgoing(buckets: Sequence[Traffic]) -> dict[int, list[Tensor]]:
    return _by_peer((peer, bucket.contents[i]) for bucket in buckets for peer, i in bucket.sends)


def _by_peer(parts: Iterable[Parts]) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for peer, pieces in parts:
        found.setdefault(peer, []).extend(pieces)
    return found


def places_of(pieces: Sequence[Tensor]) -> Tensor:
    """(2 x pieces,) int64: the address of each and the bytes from row to row."""
    places = [(x.data_ptr(), x.stride(0) * x.element_size() if x.dim() == 2 else x.nbytes) for x in pieces]
    return torch.tensor([number for place in places for number in place], dtype=torch.int64)
