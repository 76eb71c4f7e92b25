"""Hostfiles: as meant, or refused with the line; none of their words can become one of a shell or an option of ssh."""

import random
import re
from pathlib import Path

import pytest

from hybridflow.launcher.connection import BOOT, Ssh, command_of
from hybridflow.launcher.hostfile import LaunchError, LaunchHost, choose_hosts, parse_hostfile, read_hostfile

NUM_FUZZED = 2000
NASTY = "\"'`$(){}[]<>|&;*?!~#\\= \t@:-._/éß\x00\x1b漢\r\x0b\x85\u2028"


def test_lines_mean_what_they_say() -> None:
    hosts = parse_hostfile(
        "# all of them\n\nworker-0 slots=8\n  ubuntu@worker-1\tport=2222   slots=4 # a comment\n"
        "10.0.0.3 slots=1#none\nfd00::12 slots=2\nroot@[FD00:0::13] slots=2 port=22\n"
    )
    assert hosts == [
        LaunchHost("worker-0", 8),
        LaunchHost("worker-1", 4, "ubuntu", 2222),
        LaunchHost("10.0.0.3", 1),
        LaunchHost("fd00::12", 2),
        LaunchHost("fd00::13", 2, "root", 22),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a slots=1\nb", "hosts, line 2: 'b': slots, the number of ranks on it, is missing; a line is `[user@]host"),
        ("a slots=0", "hosts, line 1: 'slots=0': '0' is no whole number from 1 to 4096"),
        ("a slots=eight", "'eight' is no whole number"),
        ("a slots=²", "'²' is no whole number"),
        ("a slots=1 slots=2", "'slots=2': slots is given twice"),
        ("a slots=1 port=70000", "'70000' is no whole number from 1 to 65535"),
        ("a slot=1", "'slot=1': a line is"),
        ("a:22 slots=1", "'a:22' is no IPv6 address; a port of ssh is written port=N"),
        ("-oProxyCommand=x slots=1", "'-oProxyCommand=x' is no host name"),
        ("a@-b slots=1", "'-b' is no host name"),
        ("$(reboot)@a slots=1", "'$(reboot)' is no user name"),
        ("-l@a slots=1", "'-l' is no user name"),
        ("a;b slots=1", "'a;b' is no host name"),
        ("a slots=1\n\na slots=2", "line 3: a is already in line 1: give it all its slots in one line"),
        ("# nobody\n", "hosts: names no host"),
        ("a..b slots=1 x", "hosts, line 1: 'x'"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        parse_hostfile(text, "hosts")


def test_all_wrong_lines_are_told_at_once() -> None:
    with pytest.raises(LaunchError) as error:
        parse_hostfile("a\nb slots=1\nc slots=x\n")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["hostfile, line 1", "hostfile, line 3"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"hostfile .*/none: cannot be read: No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="cannot be read: it is no text"):
        read_hostfile(tmp_path / "bytes")


def meant(dice: random.Random, number: int) -> tuple[LaunchHost, str]:
    """A host and a line for it."""
    name = dice.choice(
        [f"host{number}", f"h-{number}.rack.example", f"10.1.{number % 256}.{number // 256}", f"fd00::{number + 1:x}"]
    )
    user = dice.choice([None, None, "root", "a.b-c_9", "svc$"])
    port = dice.choice([None, None, 22, 65535, dice.randint(1, 65535)])
    host = LaunchHost(name, dice.randint(1, 64), user, port)
    shown = f"[{name}]" if ":" in name and dice.random() < 0.5 else name
    words = [f"slots={host.slots}", *([f"port={port}"] if port else [])]
    dice.shuffle(words)
    gap = dice.choice([" ", "\t", "   "])
    comment = dice.choice(["", "", " # the rack's", "#x=1 @ $HOME"])
    return host, dice.choice(["", " "]) + gap.join([f"{user}@{shown}" if user else shown, *words]) + comment


def test_random_hostfiles_are_parsed_as_meant() -> None:
    for seed in range(NUM_FUZZED):
        dice = random.Random(seed)
        hosts = [meant(dice, number) for number in range(dice.randint(1, 6))]
        lines = [line for _, line in hosts]
        for _ in range(dice.randint(0, 3)):
            lines.insert(dice.randint(0, len(lines)), dice.choice(["", "   ", "# none slots=1", "\t#"]))
        assert parse_hostfile("\n".join(lines)) == [host for host, _ in hosts], lines


def test_random_words_are_refused_with_their_line_or_cannot_do_harm() -> None:
    refused = 0
    for seed in range(NUM_FUZZED):
        dice = random.Random(seed)
        _, line = meant(dice, 7)
        for _ in range(dice.randint(1, 4)):
            at = dice.randint(0, len(line))
            line = line[:at] + dice.choice(NASTY) + line[at + dice.randint(0, 2) :]
        try:
            hosts = parse_hostfile(f"first slots=1\n{line}")
        except LaunchError as error:
            assert "line 2" in str(error) or "line 3" in str(error), (line, error)  # a line feed is none of the nasty
            refused += 1
            continue
        for host in hosts:
            command = command_of(host, "/usr/bin/python3", Ssh())
            at = command.index("--")
            assert re.fullmatch(r"([A-Za-z0-9_][\w.-]*\$?@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*", command[at + 1]), line
            assert command[at + 2 :] == [f"exec /usr/bin/python3 -u -c '{BOOT}'"]
    assert NUM_FUZZED / 4 < refused < NUM_FUZZED


def test_filters() -> None:
    hosts = [LaunchHost(name, 1) for name in ("worker-0", "worker-1", "worker-10", "gpu.a", "gpu-b")]
    named = lambda include, exclude=(): [host.name for host in choose_hosts(hosts, include, exclude)]  # noqa: E731
    assert named(()) == ["worker-0", "worker-1", "worker-10", "gpu.a", "gpu-b"]
    assert named(["worker-[0-3]"]) == ["worker-0", "worker-1"]
    assert named(["worker-[0-3],gpu*"]) == ["worker-0", "worker-1", "gpu.a", "gpu-b"]
    assert named(["gpu.?", "worker-10"]) == ["worker-10", "gpu.a"]
    assert named(["worker-{0,10}"]) == ["worker-0", "worker-10"]
    assert named((), ["worker*"]) == ["gpu.a", "gpu-b"]
    assert named(["worker-[0-99]"], ["worker-1"]) == ["worker-0", "worker-10"]
    assert [host.name for host in choose_hosts([LaunchHost("n007", 1), LaunchHost("n7", 1)], ["n[005-009]"], ())] == [
        "n007"
    ]


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        (["worker-[2-3]"], [], "--include worker-[2-3]: fits none of worker-0, worker-1"),
        ([], ["gpu"], "--exclude gpu: fits none of"),
        (["worker-0"], ["worker-*"], "--include and --exclude leave no host"),
        (["worker-[3-2]"], [], "the range [3-2] is empty"),
    ],
)
def test_filters_that_fit_nothing(include: list[str], exclude: list[str], told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        choose_hosts([LaunchHost("worker-0", 1), LaunchHost("worker-1", 1)], include, exclude)
