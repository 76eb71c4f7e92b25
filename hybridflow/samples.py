"""`python -m hybridflow.samples`: see `hybridflow.cli.samples`."""

import sys

from hybridflow.cli.samples import main

if __name__ == "__main__":
    sys.exit(main())
