"""`python -m hybridflow.report`: see `hybridflow.cli.report`."""

import sys

from hybridflow.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
