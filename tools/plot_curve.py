"""`python -m tools.plot_curve`: see `hybridflow.cli.plot_curve`."""

import sys

from hybridflow.cli.plot_curve import main

if __name__ == "__main__":
    sys.exit(main())
