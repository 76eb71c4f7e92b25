"""`hybridflow launch` from a checkout, by any Python from 3.11 on: python launch/run.py --hostfile HOSTS CONFIG"""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (whatever Python a user has at hand starts this)
    sys.exit(f"launch/run.py needs Python 3.11 or newer, this is {sys.version.split()[0]}: .venv/bin/python is one")
sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of launch/

from hybridflow.launcher.main import main  # noqa: E402
from hybridflow.parallel.streams import speak_utf8  # noqa: E402

if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
