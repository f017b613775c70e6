"""`lockstep` where only pyproject's `dependencies` are installed: `python tests/without_extras.py COMMAND ...`."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

from lockstep.cli.extras import EXTRAS

HIDDEN = set(EXTRAS) - {"google.protobuf", "ml_dtypes"}  # which onnx needs


class Absent(importlib.abc.MetaPathFinder):
    """Packages of the extras are not found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    from lockstep.cli.main import main

    main(sys.argv[1:], prog_name="lockstep")
