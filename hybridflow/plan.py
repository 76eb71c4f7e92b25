"""`python -m hybridflow.plan`: see `hybridflow.cli.plan`."""

import sys

from hybridflow.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
