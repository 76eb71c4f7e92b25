"""Which hosts a run lies on: the hostfile, and the filters of the command line.

    # comment                             ranks are numbered in the order of the lines
    worker-0 slots=8
    ubuntu@worker-1 slots=8 port=2222     # user and port of ssh
    fd00::12 slots=4                      # an address; [fd00::12] too

--include and --exclude name hosts by patterns: * and ? as in file names, [0-3] a range of numbers, {a,b} alternatives,
and a comma between patterns: `--include 'worker-[0-3],big*'`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SLOTS = 4096
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")  # of a host in DNS, /etc/hosts or ssh's config
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")
RULE = "a line is `[user@]host slots=N [port=N]`"


class LaunchError(Exception):
    """What a person can mend; a line a reason."""


@dataclass(frozen=True)
class LaunchHost:
    """A line of the hostfile. slots: ranks; each rank has one GPU where the host has GPUs."""

    name: str
    slots: int
    user: str | None = None
    port: int | None = None

    @property
    def target(self) -> str:
        """As ssh takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        return self.name


def read_hostfile(path: Path) -> list[LaunchHost]:
    """The hosts in order. Errors: LaunchError that names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(f"hostfile {path}: cannot be read: {reason}") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str = "hostfile") -> list[LaunchHost]:
    """The hosts in order. Errors: LaunchError with all wrong lines."""
    hosts: dict[str, LaunchHost] = {}
    lines: dict[str, int] = {}
    reasons = []
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _parse(words)
            if host.name in hosts:
                raise LaunchError(
                    f"{host.name} is already in line {lines[host.name]}: give it all its slots in one line"
                )
            hosts[host.name], lines[host.name] = host, number
        except LaunchError as error:
            reasons.append(f"{name}, line {number}: {error}")
    if not hosts and not reasons:
        reasons.append(f"{name}: names no host; {RULE}")
    if reasons:
        raise LaunchError("\n".join(reasons))
    return list(hosts.values())


def _parse(words: Sequence[str]) -> LaunchHost:
    user, at, name = words[0].rpartition("@")
    if at and not USER.fullmatch(user):
        raise LaunchError(f"{words[0]!r}: {user!r} is no user name; {RULE}")
    keys: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "port") or not equals:
            raise LaunchError(f"{word!r}: {RULE}")
        if key in keys:
            raise LaunchError(f"{word!r}: {key} is given twice")
        keys[key] = _number(word, value, 65535 if key == "port" else MAX_SLOTS)
    if "slots" not in keys:
        raise LaunchError(f"{words[0]!r}: slots, the number of ranks on it, is missing; {RULE}")
    return LaunchHost(_host_name(name), keys["slots"], user or None, keys.get("port"))


def _number(word: str, value: str, most: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= most:
        raise LaunchError(f"{word!r}: {value!r} is no whole number from 1 to {most}")
    return int(value)


def _host_name(given: str) -> str:
    """A name, or an address without the brackets."""
    if given.startswith("[") and given.endswith("]"):
        return _address(given[1:-1], given)
    if ":" in given:
        return _address(given, given)
    if not NAME.fullmatch(given) or len(given) > 253:
        raise LaunchError(f"{given!r} is no host name and no address; {RULE}")
    return given


def _address(text: str, given: str) -> str:
    """Errors: LaunchError; `host:port` is a common slip."""
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise LaunchError(f"{given!r} is no IPv6 address; a port of ssh is written port=N") from None


# ------------------------------------------------------------------------------------------------ filters


def choose_hosts(hosts: Sequence[LaunchHost], include: Sequence[str], exclude: Sequence[str]) -> list[LaunchHost]:
    """Those that an --include names, all where there is none, and no --exclude. Errors: LaunchError.

    A pattern that fits no host is a slip, and an error.
    """
    wanted, unwanted = (_matches(hosts, patterns, f"--{option}") for option, patterns in
                        (("include", include), ("exclude", exclude)))  # fmt: skip
    left = [host for host in hosts if (host.name in wanted or not include) and host.name not in unwanted]
    if not left:
        raise LaunchError("--include and --exclude leave no host")
    return left


def _matches(hosts: Sequence[LaunchHost], patterns: Sequence[str], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in [part for given in patterns for part in _split(given)]:
        expression = _expression(pattern, option)
        fits = {host.name for host in hosts if expression.fullmatch(host.name)}
        if not fits:
            raise LaunchError(f"{option} {pattern}: fits none of {', '.join(host.name for host in hosts)}")
        found |= fits
    return found


def _split(text: str) -> list[str]:
    """At commas outside braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _expression(pattern: str, option: str) -> re.Pattern[str]:
    """A pattern as a regular expression."""
    pieces = re.split(r"(\*|\?|\[[0-9]+-[0-9]+\]|\{[^{}]*\})", pattern.strip())
    expression = ""
    for piece in pieces:
        interval = re.fullmatch(r"\[([0-9]+)-([0-9]+)\]", piece)
        if interval:
            expression += _numbers(interval[1], interval[2], option)
        elif piece.startswith("{") and piece.endswith("}"):
            expression += f"(?:{'|'.join(re.escape(word) for word in piece[1:-1].split(','))})"
        else:
            expression += {"*": ".*", "?": "."}.get(piece, re.escape(piece))
    return re.compile(expression)


def _numbers(first: str, last: str, option: str) -> str:
    """[08-12]: with as many digits as the first has, at least."""
    if int(last) < int(first) or int(last) - int(first) > 100_000:
        raise LaunchError(f"{option}: the range [{first}-{last}] is empty, or too long")
    return f"(?:{'|'.join(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))})"
