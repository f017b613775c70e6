"""Tests of profiles/kubernetes and the manifests: `make kubernetes-test` installs their packages and says where they
are. Nothing else collects them. (A folder named `kubernetes` would hide the package of that name.)"""

from __future__ import annotations

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if "LOCKSTEP_KUBERNETES" in os.environ else ["test_*.py"]

if "LOCKSTEP_KUBERNETES" in os.environ:
    sys.path[:0] = [os.environ["LOCKSTEP_KUBERNETES"], str(Path(__file__).parents[1] / "workflow")]
