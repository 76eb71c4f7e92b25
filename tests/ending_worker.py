"""A rank that leaves in one of the ways that there are, with all that Python ends first.

python -m tests.ending_worker return | fail | no-status | STATUS | MESSAGE
"""

import atexit
import sys
import threading
import time


def end_late() -> None:
    time.sleep(0.2)
    print("a thread has ended")


def leave(how: str) -> None:
    if how == "fail":
        raise RuntimeError("this rank fails")
    if how == "no-status":
        sys.exit()
    if how != "return":
        sys.exit(int(how) if how.isdecimal() else how)


if __name__ == "__main__":
    atexit.register(print, "the first registered is called last")
    atexit.register(print, "the last registered is called first")
    threading.Thread(target=end_late).start()
    leave(sys.argv[1])
