"""`python -m tools.convert`: see `hybridflow.convert`."""

import sys

from hybridflow.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
