"""Compute graphs in ONNX Runtime.

In: a model. Out: a session that computes it unoptimised; the rows of an expert are one product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from lockstep.errors import CheckError

_GATHERS = re.compile(rb"GatherND|GatherBlockQuantized")  # in the bytes of a graph that may have experts
E4M3 = "float8_e4m3fn"


def e4m3_value(array: np.ndarray) -> ort.OrtValue:
    """Return an array of e4m3 numbers for ONNX Runtime, which does not accept NumPy's type."""
    bits = np.ascontiguousarray(array).view(np.uint8)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.FLOAT8E4M3FN)


class _Session(ort.InferenceSession):
    """A session that accepts e4m3 arrays too. `run` raises CheckError where the library fails."""

    def run(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        feeds = dict(input_feed)
        for name, array in input_feed.items():
            if isinstance(array, np.ndarray) and array.dtype.name == E4M3:
                feeds[name] = e4m3_value(array)
        try:
            return super().run(output_names, feeds, run_options)
        except Exception as error:  # ONNX Runtime's errors share no base class
            failure = f"ONNX Runtime {ort.__version__} cannot run this graph: {' '.join(str(error).split())}"
            raise CheckError(f"{self.get_modelmeta().graph_name}: {failure}") from error


def open_session(model: Path | bytes, threads: int | None = None) -> ort.InferenceSession:
    """Open a session without optimisation, of a path or bytes. Raises CheckError if ONNX Runtime rejects the graph."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.intra_op_num_threads = threads or 0
    settings.enable_cpu_mem_arena = False  # it would keep the casts of weights, of every graph
    # Idle threads that spin would take the cores from other sessions' pools.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 3
    source: bytes | str
    if isinstance(model, bytes):
        source = data = model
        where = ""
    else:
        data = model.read_bytes()
        source = str(model)
        where = f"{model}: "
    if _GATHERS.search(data):
        # Lazy: engines run without the toolkit.
        from lockstep.onnx_tools.group_experts import GroupExperts
        from lockstep.onnx_tools.toolkit import run_passes

        source = run_passes(onnx.ModelProto.FromString(data), GroupExperts(stacked=True)).SerializeToString()
    while True:
        try:
            return _Session(source, settings, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:  # ONNX Runtime's errors share no base class
            failure = " ".join(str(error).split())
            if "use_per_session_threads" not in failure or not settings.use_per_session_threads:
                raise CheckError(f"{where}ONNX Runtime {ort.__version__} cannot load this graph: {failure}") from error
        # A process that also runs engines has one pool for all sessions.
        settings.use_per_session_threads = False
        settings.intra_op_num_threads = 0


def compute(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a graph's outputs by name; feeds: its inputs, further arrays are ignored."""
    session = open_session(model.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    inputs = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, inputs)))
