"""Compiled kernels are kept: by all that they depend on, and whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

import fake_gpu
from lockstep_gpu import kernel_cache

SOURCE = 'extern "C" __global__ void __launch_bounds__(128) twice(float* x, int count) {}'


def test_a_source_is_compiled_once_for_each_set_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu.installed(name="cuda"):
        from lockstep_gpu import cuda

        monkeypatch.setattr(kernel_cache, "user_cache", lambda *parts: tmp_path.joinpath(*parts))
        compiled = []
        compile_source = cuda._compile
        monkeypatch.setattr(cuda, "_compile", lambda *parts: (compiled.append(parts), compile_source(*parts))[1])

        def code(*options: str, capability: tuple[int, int] = (9, 0)) -> bytes:
            cuda.compile_source.cache_clear()  # as another process
            return cuda.compile_source(SOURCE, options, capability)

        first = code()
        assert code() == first and len(compiled) == 1
        code("-DN=2")
        code(capability=(8, 0))
        assert len(compiled) == 3
        for path in sorted((tmp_path / "kernels").iterdir()):
            path.write_bytes(path.read_bytes()[:-1])  # a disk that was full
        assert code() == first and len(compiled) == 4
        monkeypatch.setattr(kernel_cache, "user_cache", lambda *parts: Path("/proc/self/nowhere", *parts))
        assert code() == first and len(compiled) == 5, "without a place for it"
