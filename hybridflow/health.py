"""`python -m hybridflow.health`: see `hybridflow.cli.health`."""

import sys

from hybridflow.cli.health import main

if __name__ == "__main__":
    sys.exit(main())
