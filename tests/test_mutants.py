"""The mutants are of the package as it is, and each has a row in the table of which test finds it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.patch import ROOT, Mutant, functions_of, mutants
from tests.mutants.table import Killed, read_table, written_table

MUTANTS = mutants()
ROOMS = ("gradients", "context", "experts", "reshard", "resume", "partial", "plan")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_still_makes_its_fault(mutant: Mutant) -> None:
    """Whoever moves the code takes the mutant along."""
    assert mutant.problem(ROOT) == "", mutant.name
    assert mutant.fault and "\n" not in mutant.fault
    assert mutant.functions(ROOT) and all(name.startswith("hybridflow/") for name in mutant.files)


def test_every_room_has_mutants() -> None:
    counts = Counter(mutant.room for mutant in MUTANTS)
    assert sum(counts.values()) >= 40 and all(counts[room] >= 5 for room in ROOMS), counts


def test_every_mutant_is_found_and_by_a_test_that_is_there() -> None:
    table = read_table()
    assert table.keys() == {mutant.name for mutant in MUTANTS}
    for name, killed in table.items():
        file, _, function = killed.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"{name}: {killed.test}"
        assert killed.set in ("default", "rest"), name
    in_default = sum(killed.set == "default" for killed in table.values())
    assert in_default >= 0.9 * len(table), "the default set finds nine of ten"


DIFF = """\
Two is three

--- a/package/sums.py
+++ b/package/sums.py
@@ -2,7 +2,6 @@

 class Sums:
     def two(self):
-        two = 1 + 1
-        return two
+        return 3

     def three(self):
"""
SOURCE = """\


class Sums:
    def two(self):
        two = 1 + 1
        return two

    def three(self):
        return 3
"""


def test_a_mutant_knows_its_function_and_goes_into_a_copy(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "sums.py").write_text(SOURCE)
    (tmp_path / "small-sum.patch").write_text(DIFF)
    mutant = Mutant.of(tmp_path / "small-sum.patch")
    assert (mutant.name, mutant.fault, mutant.room) == ("small-sum", "Two is three", "small")
    assert mutant.functions(tmp_path) == ["package/sums.py::Sums.two"]
    mutant.put_into(tmp_path)
    assert "        return 3\n\n    def three" in (tmp_path / "package" / "sums.py").read_text()
    assert "patch does not apply" in mutant.problem(tmp_path)
    assert [name for name, _ in functions_of(tmp_path / "package" / "sums.py")] == ["Sums.two", "Sums.three"]


def test_the_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    mutant, killed = Mutant("a-b", "A fault", ""), Killed("rest", "tests/test_x.py::test_y")
    (tmp_path / "table.md").write_text(written_table([mutant], {"a-b": killed, "gone": killed}))
    assert read_table(tmp_path / "table.md") == {"a-b": killed}
