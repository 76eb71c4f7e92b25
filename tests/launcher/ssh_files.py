"""What OpenSSH reads on the hosts of tests/launcher/network.py and on who comes to them: keys and configs."""

from collections.abc import Iterable
from pathlib import Path

from tests.launcher.namespaces import system


def write_ssh_files(root: Path, hosts: Iterable[tuple[str, str]]) -> None:
    """For hosts of (name, address): keys, ROOT/NAME/sshd_config, and the client's files, which know the hosts' keys."""
    root.mkdir()
    client = make_key(root / "client_key")
    known, blocks = [], []
    for name, address in hosts:
        directory = root / name
        directory.mkdir()
        known.append(f"{address} {make_key(directory / 'host_key')}")
        (directory / "authorized_keys").write_text(client)
        (directory / "sshd_config").write_text(SSHD_CONFIG.format(directory=directory))
        blocks.append(f"Host {name}\n    HostName {address}\n")
    (root / "known_hosts").write_text("".join(known))
    (root / "ssh_config").write_text("".join(blocks) + SSH_CONFIG.format(directory=root))


# Nothing of the system's: neither its keys, nor its accounts' own files, nor PAM.
SSHD_CONFIG = """\
Port 22
AddressFamily inet
HostKey "{directory}/host_key"
AuthorizedKeysFile "{directory}/authorized_keys"
PidFile "{directory}/sshd.pid"
AllowUsers root
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
# bash then leaves .bashrc alone, which may be slow, and may leave locks behind where a host is killed
SetEnv SHLVL=2
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
"""
SSH_CONFIG = """\
Host *
    User root
    Port 22
    IdentityFile "{directory}/client_key"
    IdentitiesOnly yes
    UserKnownHostsFile "{directory}/known_hosts"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def make_key(path: Path) -> str:
    """A new key pair; returns the public one, as a line."""
    system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))
    return path.with_name(path.name + ".pub").read_text()
