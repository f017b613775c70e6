"""TensorRT-RTX's builder in a child process with a monotonic heap, on which engines are the same bytes everywhere.

    python -m lockstep_gpu.backends.tensorrt_rtx.compiler < requests

In: a line of JSON for each engine, {"graph", "out", "options"}. Out: the engine's file, and a line of JSON on stdout,
{"error": class and arguments} or {}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from lockstep import processes
from lockstep.artifacts.files import write_bytes
from lockstep.backends.profiles import built_limits, profiles
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep_gpu.backends.tensorrt.compat import GraphRefusedError
from lockstep_gpu.backends.tensorrt.contract import check_contract, check_types, tensor_types
from lockstep_gpu.backends.tensorrt_rtx.library import TENSORRT_RTX, RTXLibrary
from lockstep_gpu.backends.tensorrt_rtx.monotonic_heap import FIRST, LAST, shared_object

_WORKSPACE = 4 << 30  # bytes that a kernel may use while it runs
_LEVEL = 3  # TensorRT's default
_MAX_ENGINES = 8  # of one process: each leaks up to 200 MB, as nothing is freed
_ERRORS = {error.__name__: error for error in (InputError, CheckError, GraphRefusedError, OSError)}


class Compiler:
    """A builder of engines in another process, which is started with the first engine and ends after some."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self._built = 0

    def build(self, graph: Path, out: Path, options: Mapping[str, Any]) -> None:
        """Build one engine in the other process.

        Raises CheckError where the library rejects the graph, or its network differs from it, and where it ends the
        process; OSError where the engine cannot be written.
        """
        if self.process is None:
            self.process = _start()
            self._built = 0
            weakref.finalize(self, _end, self.process)
        process = self.process
        request = {"graph": str(graph), "out": str(out), "options": dict(options)}
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # interrupted: cancel the build
            process.kill()
            self.end()
            raise
        self._built += 1
        if not answer or self._built == _MAX_ENGINES:
            self.end()
        if not answer:
            raise CheckError(
                f"{out}: expected an engine, found that the builder's process ended with exit code "
                f"{process.returncode}; below 0 it is the signal that ended it (memory ran out?)"
            )
        if error := json.loads(answer).get("error"):
            raise _ERRORS[error[0]](*error[1:])

    def end(self) -> None:
        if self.process is not None:
            _end(self.process)
            self.process = None


def _start() -> subprocess.Popen[str]:
    heap = os.memfd_create("lockstep-heap")
    try:
        with open(heap, "wb", closefd=False) as file:
            file.write(shared_object())
        preload = ":".join(filter(None, (f"/proc/self/fd/{heap}", os.environ.get("LD_PRELOAD"))))
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**processes.environment(), "LD_PRELOAD": preload, "PYTHONHASHSEED": "0"},
            pass_fds=(heap,),
            start_new_session=True,  # Ctrl-C interrupts this process alone, which ends the builder
        )
    finally:
        os.close(heap)


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the builder's process, which ends when there is nothing more to read."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.close()
    process.wait()
    process.stdout.close()


def build(library: RTXLibrary, graph: Path, out: Path, options: Mapping[str, Any]) -> None:
    """Build one engine in this process.

    Products with quantised weights are rewritten by `onnx_tools.dequantized`. The network is compared with the graph
    before the build: names, types, sizes and profiles of inputs and outputs, and the type of each value.
    """
    # The toolkit is needed only where engines are built.
    from lockstep.onnx_tools.dequantized import DequantizeProducts
    from lockstep.onnx_tools.toolkit import run_passes

    where = str(out)
    model = run_passes(onnx.load(graph), DequantizeProducts(where))
    builder = library.create_builder()
    library.use_one_thread(builder)
    types = tensor_types(model)
    bounds = profiles(model, built_limits(options))
    network = library.create_network(builder)
    parser = library.parse(network, model.SerializeToString(), where)  # noqa: F841  it owns what the network reads
    config = library.create_config(builder, _WORKSPACE, _LEVEL, None)
    library.set_compute_capabilities(config, options["compute_capabilities"])
    added = [library.add_profile(builder, config, profile) for profile in bounds]
    check_contract(library.network_tensors(network, added), model, bounds, where)
    check_types(library.network_types(network), types, where)
    write_bytes(out, library.build_plan(builder, network, config, where))


def _check_heap() -> None:
    """Raise CheckError if malloc is not the monotonic heap's: the builder's output depends on addresses."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(1) or 0  # None for NULL. Never freed: the process builds a few engines and ends
    if not FIRST <= address < LAST:
        raise CheckError(
            "backend tensorrt_rtx: expected a builder with a monotonic heap, by LD_PRELOAD and with 128 GiB of "
            "addresses, found the C library's heap; raise their limit (ulimit -v)"
        )


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            _check_heap()
            build(TENSORRT_RTX, Path(request["graph"]), Path(request["out"]), request["options"])
        except LockstepError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        except OSError as error:  # a full disk, say
            answer = {"error": ["OSError", error.errno, error.strerror, error.filename or request["out"]]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
