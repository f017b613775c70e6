"""Pictures that `make screenshots` takes for a person to look at. Nothing else collects them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "LOCKSTEP_SCREENSHOTS" in os.environ else ["test_*.py"]
