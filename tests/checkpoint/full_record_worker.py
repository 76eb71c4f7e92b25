"""`python -m hybridflow.train` whose metrics.csv is on a full device from some iteration on.

torchrun ... -m tests.checkpoint.full_record_worker CONFIG [section.key=value ...]
"""

import sys

from hybridflow.cli.train import main
from hybridflow.recording.writers import _CsvFile

FIRST = 5  # iteration
write = _CsvFile.write


def write_or_fail(file: _CsvFile, iteration: int, values: dict[str, float]) -> None:
    if iteration == FIRST:
        file._file = open("/dev/full", "a")
    write(file, iteration, values)


if __name__ == "__main__":
    _CsvFile.write = write_or_fail
    main(sys.argv[1:])
