"""`python -m tools.make_sums`: see `hybridflow.examples.sums.make_sums`."""

import sys

from hybridflow.examples.sums.make_sums import main

if __name__ == "__main__":
    sys.exit(main())
