"""The launcher of the distributed tests: a hang ends, and says where every rank stood."""

import pytest

from tests.launch import torchrun

HANG = """
import time

def rank_waits_here():
    time.sleep(600)

rank_waits_here()
"""


def test_a_hang_ends_with_the_stacks_of_every_rank(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    with pytest.raises(AssertionError, match="no end after 15 s") as caught:
        torchrun(2, script, timeout=15)
    assert str(caught.value).count("in rank_waits_here") == 2
