"""`python -m tools.stages`: see `hybridflow.examples.tiny.stages`."""

import sys

from hybridflow.examples.tiny.stages import main

if __name__ == "__main__":
    sys.exit(main())
