"""`python -m hybridflow COMMAND ...`: see `hybridflow.cli.main`."""

import sys

from hybridflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
