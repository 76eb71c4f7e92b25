"""`python -m hybridflow.train`: see `hybridflow.cli.train`."""

import sys

if not sys.flags.safe_path:  # `python -m` has the working directory first: a user's random.py would be Python's
    sys.path.append(sys.path.pop(0))

from hybridflow.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
