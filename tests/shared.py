"""Folders that all processes of a test run read. Each is made once, by the first test that asks for it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.files import sha256_json

if TYPE_CHECKING:
    from lockstep.artifacts.assembly import Assembly
    from lockstep.export.unique_layers import TracedModel

WORKER = "PYTEST_XDIST_WORKER"  # set by pytest-xdist in each of its processes


class Shared:
    """Named folders below `root`.

    A test run has its own, so a name needs to tell apart what differs within one run only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, make: Callable[[Path], Any]) -> Path:
        """Return the folder `name`, not to be changed.

        `make` is given its path and makes it; what a failed or killed one left is removed first.
        """
        from filelock import FileLock  # the tests on a GPU run in a Python that may not have it

        folder = self.root / name
        done = self.root / f"{name}.done"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    def parts(self, config: dict[str, Any], precision: str) -> TracedModel:
        """Return the parts that a model of a config.json is traced to.

        The trace takes longer than all that is made of them.
        """
        from lockstep.export.tracer import meta_model  # loads torch
        from lockstep.export.unique_layers import trace_unique_layers

        def make(folder: Path) -> None:
            (folder / "parts.pickle").write_bytes(pickle.dumps(trace_unique_layers(meta_model(config, precision))))

        folder = self.folder(f"parts/{sha256_json([config, precision])}", make)
        return pickle.loads((folder / "parts.pickle").read_bytes())

    def assembled(self, config: dict[str, Any], precision: str) -> tuple[dict[str, bytes], Assembly]:
        """Return graphs by file name and the assembly of a config.json.

        As `assemble` gives them: no other model is made to check their numbers.
        """
        from lockstep.artifacts.assembly import Assembly
        from lockstep.export.run import assemble  # loads torch
        from lockstep.export.tracer import meta_model

        def make(folder: Path) -> None:
            files, assembly = assemble(
                meta_model(config, precision), config, precision, traced=self.parts(config, precision)
            )
            for name, data in files.items():
                (folder / name).write_bytes(data)
            assembly.save(folder / "assembly.json")

        folder = self.folder(f"assembled/{sha256_json([config, precision])}", make)
        return {path.name: path.read_bytes() for path in folder.glob("*.onnx")}, Assembly.load(folder / "assembly.json")

    def exported(self, config: dict[str, Any], precision: str) -> Path:
        """Return the folder with assembly.json and graphs of a config.json.

        Without a checkpoint, as `export_config` gives them.
        """
        from lockstep.export.run import export_config  # loads torch

        return self.folder(
            f"exported/{sha256_json([config, precision])}", lambda folder: export_config(config, precision, folder)
        )


def shared_root(default_root: Path) -> Path:
    """Return the folder that all processes of a test run share.

    default_root: this process's temporary folder. Those of a run's processes are in one folder.
    """
    common_root = default_root.parent if WORKER in os.environ else default_root
    return common_root / "shared"
