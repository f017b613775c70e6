"""Tests of the model that `make real` downloads and builds, which says where it is. Nothing else collects them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "LOCKSTEP_REAL" in os.environ else ["test_*.py"]
