"""What holds for all tests: how many processes they take, what these share, and which tests need a GPU."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from shared import WORKER, Shared, shared_root

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
    """What `-n auto` stands for: a process for each core that this one may use."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What is there by now is walked by no later collection: with torch and thousands of tests in the process each
    takes half a second, and hundreds of tests ask for one or make many objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(shared_root(tmp_path_factory.getbasetemp()))


import lockstep  # noqa: E402, F401  first: it switches off what other packages send when they are imported


def _missing() -> str | None:
    """What this machine lacks to build with TensorRT."""
    from lockstep.backends import get_backend
    from lockstep.errors import LockstepError

    try:
        get_backend("tensorrt").describe_device()
    except LockstepError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.exports)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
