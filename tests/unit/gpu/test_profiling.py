"""NVTX ranges: calls have them by name, and only if the user turns them on."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lockstep.errors import InputError
from lockstep_gpu import profiling


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    importlib.reload(profiling)


def test_ranges_have_the_names_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    @contextlib.contextmanager
    def annotate(name: str) -> Iterator[None]:
        names.append(name)
        yield
        names.append(f"/{name}")

    calls = [("block", lambda: names.append("call"))]
    assert profiling.in_ranges(calls) is calls and profiling.in_range("step")(restored) is restored
    monkeypatch.setenv(profiling.NVTX, "1")
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    importlib.reload(profiling)
    ((_, call),) = profiling.in_ranges(calls)
    profiling.in_range("step")(call)()
    assert names == ["step", "block", "call", "/block", "/step"]


def test_the_package_that_they_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiling.NVTX, "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(InputError, match="LOCKSTEP_NVTX: expected the package nvtx"):
        importlib.reload(profiling)
    monkeypatch.undo()
