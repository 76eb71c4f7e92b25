"""`python -m hybridflow.data`: see `hybridflow.cli.data`."""

import sys

from hybridflow.cli.data import main

if __name__ == "__main__":
    sys.exit(main())
