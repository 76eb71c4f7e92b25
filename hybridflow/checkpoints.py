"""`python -m hybridflow.checkpoints`: see `hybridflow.cli.checkpoints`."""

import sys

from hybridflow.cli.checkpoints import main

if __name__ == "__main__":
    sys.exit(main())
