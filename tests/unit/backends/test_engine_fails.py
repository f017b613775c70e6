"""An engine, or a graph, that its library cannot run is one line, whichever check runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from lockstep.backends.base import get_backend
from lockstep.errors import CheckError
from lockstep.onnx_tools.sessions import open_session


@pytest.fixture
def joining(tmp_path: Path) -> Path:
    """A graph that can be built and loaded, and fails where its inputs have other numbers of rows."""
    graph = helper.make_graph(
        [helper.make_node("Concat", ["hidden", "carry_1"], ["joined"], axis=1)],
        "block",
        [
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["num_tokens", 4]),
            helper.make_tensor_value_info("carry_1", TensorProto.FLOAT, ["num_rows", 4]),
        ],
        [helper.make_tensor_value_info("joined", TensorProto.FLOAT, ["num_tokens", 8])],
    )
    path = tmp_path / "block.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


FEEDS = {"hidden": np.ones((2, 4), np.float32), "carry_1": np.ones((3, 4), np.float32)}


@pytest.mark.parametrize("library, threads", [("ONNX Runtime", None), ("OpenVINO", 1), ("OpenVINO", 2)])
def test_an_engine_that_its_library_cannot_run_is_one_line(
    joining: Path, tmp_path: Path, library: str, threads: int | None
) -> None:
    name = library.replace(" ", "").lower()
    if name == "openvino":
        pytest.importorskip("openvino")
    backend = get_backend(name)
    engine = tmp_path / f"engine{backend.suffixes[0]}"
    backend.build(joining, engine, backend.default_options())
    executable = backend.load(engine, (), threads, False).bind(None, {})
    call = executable.prepare(FEEDS, {"joined": np.empty((2, 8), np.float32)})
    with pytest.raises(CheckError, match=rf"{engine.name}: {library} \S+ cannot run this engine: .") as error:
        call()
    assert "\n" not in str(error.value)


def test_a_graph_that_onnx_runtime_cannot_run_is_one_line(joining: Path) -> None:
    with pytest.raises(CheckError, match=r"^block: ONNX Runtime \S+ cannot run this graph: .") as error:
        open_session(joining).run(None, FEEDS)
    assert "\n" not in str(error.value)
