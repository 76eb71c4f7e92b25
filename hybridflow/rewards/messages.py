"""Messages over a socket between processes of one machine: a JSON header, and bytes that are passed on as they are.

    channel.send({"unit": 3, "seconds": 2.0}, pickled_rows)     # at once: what does not go now goes with `flush`
    for header, body in channel.receive(): ...                  # what has arrived

What comes from a process that runs a user's code is read as JSON alone: nothing of it is unpickled.
"""

import contextlib
import json
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

Header = dict[str, Any]
LENGTHS = struct.Struct(">IQ")  # of the header and of the body, in bytes
CHUNK = 1 << 16


class ChannelClosed(Exception):
    """The other end is gone."""


class MessageChannel:
    """One end. It takes the socket over, which no longer blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._out, self._in = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something is yet to be sent."""
        return bool(self._out)

    def send(self, header: Header, body: bytes = b"") -> None:
        head = json.dumps(header).encode()
        self._out += LENGTHS.pack(len(head), len(body)) + head + body
        self.flush()

    def send_all(self, header: Header, body: bytes = b"") -> None:
        """Until the other end has taken it. Errors: ChannelClosed."""
        self.send(header, body)
        while self.has_more:
            _wait(self, select.POLLOUT)
            self.flush()

    def wait(self, seconds: float | None = None) -> None:
        """Until something has arrived, or the other end is gone; so long at most."""
        _wait(self, select.POLLIN, seconds)

    def flush(self) -> None:
        """Send what the other end takes now. Errors: ChannelClosed."""
        try:
            while self._out:
                del self._out[: self.socket.send(memoryview(self._out)[:CHUNK].tobytes())]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> Iterator[tuple[Header, bytes]]:
        """The whole messages that have arrived. Errors: ChannelClosed, after the last of them."""
        ended = self._read()
        while len(self._in) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._in)
            end = LENGTHS.size + head + body
            if len(self._in) < end:
                break
            message = bytes(self._in[LENGTHS.size : end])
            del self._in[:end]
            yield json.loads(message[:head]), message[head:]
        if ended:
            raise ChannelClosed

    def close(self) -> None:
        """For both ends, also where a process that was forked holds this one too."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self) -> bool:
        """Whether the other end is gone."""
        try:
            while data := self.socket.recv(CHUNK):
                self._in += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def _wait(channel: MessageChannel, event: int, seconds: float | None = None) -> None:
    poll = select.poll()  # select.select knows no file beyond the 1024th
    poll.register(channel, event)
    poll.poll(None if seconds is None else 1000 * seconds)
