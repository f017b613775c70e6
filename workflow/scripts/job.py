"""What every script opens with: this checkout's package, and all that the job says in its rule's log."""

import contextlib
import os
import sys
from pathlib import Path

# The rule's key is of the code in this checkout, and an environment that conda made has no other.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from lockstep.errors import guard  # noqa: E402


@contextlib.contextmanager
def job(log):
    """Send stdout and stderr, also those of native libraries, to the file `log`; a user's mistake becomes one line there."""
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with guard():
        yield
