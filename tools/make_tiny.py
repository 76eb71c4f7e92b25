"""`python -m tools.make_tiny`: see `hybridflow.examples.tiny.make_tiny`."""

import sys

from hybridflow.examples.tiny.make_tiny import main

if __name__ == "__main__":
    sys.exit(main())
