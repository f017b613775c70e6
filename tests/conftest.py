"""What holds for all tests: processes, shared folders, and the need of a GPU.

How many processes they take, what these share, and which tests need a GPU.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import signal
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shared import WORKER, Shared, shared_root

# jsonschema loads a grammar of IRIs for a format that no schema here has: two seconds in each process.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
WORKFLOW = Path(__file__).parent / "workflow"
FIRST = WORKFLOW / "test_committed_lock.py"  # makes the demo's run
FAMILIES = Path(__file__).parent / "unit/workflow/test_whole_families.py"  # a quarter of the time of all tests
MOST_WORKERS = 8  # each holds torch and ONNX Runtime: up to 2 GB
if WORKER in os.environ:
    # One test a core: more threads would fight for them. Before torch is imported, and for the processes that tests
    # start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("LOCKSTEP_THREADS", "1")
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        # As in a shell's background job, and behind nohup: the processes that tests start would inherit it, and those
        # that they interrupt would go on.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return what `-n auto` means: a process for each core that may be used, and one.

    Tests wait for servers and jobs that they start: on 2 cores 3 processes take 6 % less time than 2.
    """
    return min(MOST_WORKERS, 1 + len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file to one process, but those of `FAMILIES`, which share nothing, to any."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file.endswith(FAMILIES.name) else file

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis try few examples where the long tests are left out, the same ones each time."""
    if find_spec("hypothesis") is None:  # the Python of the tests on a GPU may not have it
        return
    from hypothesis import settings

    if settings.get_current_profile_name() in ("default", "ci"):  # and none was requested
        # `ci` has no limit of 200 ms for each, nor one for their making, which a busy machine does not keep.
        examples = 25 if "not long" in config.option.markexpr else 300
        settings.register_profile("tests", settings.get_profile("ci"), max_examples=examples)
        settings.load_profile("tests")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Freeze all present objects, so that no later collection walks them.

    With torch and thousands of tests in the process each takes half a second, and hundreds of tests ask for one or make
    many objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(shared_root(tmp_path_factory.getbasetemp()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global traces_anew
    traces_anew = item.get_closest_marker("traces") is not None


traces_anew = False


def is_patched(module: str) -> bool:
    """Return whether a model's module is a test's own, or is patched by a test.

    Patched: a test has put a function or method there.
    """
    values = list(vars(sys.modules[module]).values())
    for value in list(values):
        if isinstance(value, type):
            values += vars(value).values()
    files = {value.__code__.co_filename for value in values if isinstance(value, types.FunctionType)}
    return any(file.startswith(str(TESTS)) for file in files)


TESTS = Path(__file__).resolve().parent
# Keys of a config.json that no trace depends on: tensors have their type.
NOT_TRACED = ("architectures", "dtype", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="session", autouse=True)
def each_model_is_traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace each model once a test run, for each content.

    A trace of layers takes seconds, and many tests export the same models. Tests marked `traces` trace again. Of the
    processes that tests start, each traces by itself.
    """
    unique_layers = sys.modules.get("lockstep.export.unique_layers")  # where no test loads it, it loads torch
    if unique_layers is None or find_spec("filelock") is None:  # the Python of the tests on a GPU may not have it
        yield
        return
    trace_and_cut = unique_layers.trace_and_cut
    shared = Shared(shared_root(tmp_path_factory.getbasetemp()))

    def cut(meta, indices, wide_residual):
        kind = type(meta)
        if traces_anew or is_patched(kind.__module__):
            return trace_and_cut(meta, indices, wide_residual)
        signature = unique_layers.layer_signature(meta, {})  # the module tree, its tensors and plain settings
        config = json.loads(meta.config.to_json_string(False))
        content = [
            f"{kind.__module__}.{kind.__qualname__}",
            {key: value for key, value in config.items() if key not in NOT_TRACED},
            signature,
            list(indices),
            wide_residual,
        ]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()

        def make(folder: Path) -> None:
            (folder / "cut.pickle").write_bytes(pickle.dumps(trace_and_cut(meta, indices, wide_residual)))

        return pickle.loads((shared.folder(f"traces/{digest}", make) / "cut.pickle").read_bytes())

    unique_layers.trace_and_cut = cut
    yield
    unique_layers.trace_and_cut = trace_and_cut


import lockstep  # noqa: E402, F401  first: it switches off what other packages send when they are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.exports)
    exporting = {item.path for item in items if item.get_closest_marker("exports")}
    # A process takes the next file when it is done with one: first the run that other files wait for, then files that
    # take long, so that the processes end together.
    items.sort(
        key=lambda item: (
            item.path != FIRST, item.path != FAMILIES, item.path not in exporting, item.path.parent == WORKFLOW
        )
    )  # fmt: skip
