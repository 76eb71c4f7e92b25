"""Write one HTML page of one run or several: what ran, curves, phase times, layouts, samples, and configs that differ.

    hybridflow report runs/math [runs/math_seed2 ...] [--output report.html]

RUN is the directory of a run that is over or under way. The page is one file and needs no network. Any browser opens
the file. The command replaces an existing file. A long run is drawn as means with their range, and the page says so.
The exit status is 0, or 1 after an error message.
"""

from pathlib import Path

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.errors import RunDirError, UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.report", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="directories of runs")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="the file to write (default report.html)",
    )
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        write_report(options.runs, options.output)
    except UserError as error:
        print_error(error, "hybridflow.report")
        return 1
    runs = f"{len(options.runs)} run{'s' * (len(options.runs) > 1)}"
    print(f"{options.output.resolve()}: {runs}; open it in a browser")
    return 0


def write_report(runs: list[Path], output: Path) -> None:
    """Errors: RunDirError and ConfigError, naming the directory or the file."""
    # torch loads for seconds: a wrong argument fails before
    from hybridflow.recording.run_dir import replace_file
    from hybridflow.reporting.page import SAMPLED_ITERATIONS, page
    from hybridflow.reporting.runs import read_runs

    text = page(read_runs(runs, sampled_iterations=SAMPLED_ITERATIONS))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, [text.encode(errors="backslashreplace")])
    except OSError as error:
        raise RunDirError(f"{output}: cannot be written: {error.strerror}") from error
