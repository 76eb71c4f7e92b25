"""`python -m hybridflow.train`: see `hybridflow.cli.train`."""

import sys

from hybridflow.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
