"""stdout and stderr that cannot be written: the program goes on, and ends with the status that it has chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEAKS = """
import logging, sys
from rich.console import Console
from hybridflow.parallel.streams import keep_streams
keep_streams()
file = open(sys.argv[1], "w")
assert file.fileno() > 2, "what libraries print would be in this file"
logging.basicConfig(stream=file)
for _ in range(2):
    print("x" * 100_000, flush=True)
    print("x" * 100_000, file=sys.stderr, flush=True)
    Console().print("[bold]line")
    sys.stdout.writelines(["a", "b"])
assert sys.stdout.isatty() is False
file.close()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("behind", "why"),
    [
        ("2>&1 | true", "Broken pipe"),
        (">/dev/full 2>/dev/full", "No space left on device"),
        (">&- 2>&- <&-", None),
        (">/dev/null 2>/dev/null", None),
    ],
)
def test_a_program_goes_on_without_its_streams(behind: str, why: str | None, tmp_path) -> None:
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(SPEAKS)
    script = f"{sys.executable} {program} {log} {behind}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    told = [f"{name} cannot be written: {why}; the run continues" for name in ("stdout", "stderr")]
    assert [line.split(":", 2)[2] for line in log.read_text().splitlines()] == (told if why else [])


def test_what_can_be_written_is(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from hybridflow.parallel.streams import keep_streams; keep_streams(); print('one'); 1 / 0")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "one\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # as old locales have it: no UTF-8


@pytest.mark.parametrize(
    ("variables", "shown"),
    [(ASCII, b"\\xe9\\U0001f642"), (ASCII | {"PYTHONIOENCODING": "latin-1"}, b"\xe9\\U0001f642")],
)
def test_text_is_utf8_in_every_locale(variables: dict[str, str], shown: bytes, tmp_path: Path) -> None:
    """Files and names of files. What the terminal's encoding lacks is shown as an escape."""
    (tmp_path / "dédié.py").write_text("x = 'é\U0001f642'", encoding="utf-8")
    (tmp_path / "hybridflow-x").write_text(
        "from hybridflow.parallel.streams import speak_utf8; speak_utf8(); import sys; from pathlib import Path\n"
        "print(Path('d\\xe9di\\xe9.py').read_text()[5:-1], sys.argv[1:], sys.flags.utf8_mode)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"} | variables
    command = [sys.executable, "-u", "hybridflow-x", "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, shown + b" ['a b'] 1\n"), done.stderr
    aside = "import sys; sys.argv[0] = 'mine'; from hybridflow.parallel.streams import speak_utf8; speak_utf8()"
    code = f"{aside}; print(sys.flags.utf8_mode, '\\udc80')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"0 \\udc80\n"), "a program that calls a command stays as it is"
