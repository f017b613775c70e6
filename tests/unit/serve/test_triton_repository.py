"""`lockstep triton`: the repository that it writes, its lint, and each model.py against a real server.
Triton itself runs them in tests/tritonserver."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

import triton_stand_in
from calls import call
from lockstep.errors import InputError
from lockstep.targets import Results
from lockstep_serve.triton.model_config import read_config, text_of
from lockstep_serve.triton.models import MODELS
from lockstep_serve.triton.repository.lint import check_repository
from lockstep_serve.triton.repository.options import ACCEPTED, IGNORED, TAKEN, serve_options
from lockstep_serve.triton.repository.write import Repository, config_of, files_of, write_repository
from lockstep_serve.unix_socket import unix_socket
from real_server import ENDS, STARTS, RealServer, make_tree
from triton_stand_in import Request

# As the pages of TensorRT-LLM's backend have it.
TEMPLATE = (
    "triton_backend:tensorrtllm,triton_max_batch_size:4,decoupled_mode:False,max_beam_width:1,engine_dir:/engines,"
    "tokenizer_dir:/tokenizer,max_tokens_in_paged_kv_cache:,max_attention_window_size:,"
    "kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,"
    "batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,max_queue_size:9,"
    "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,preprocessing_instance_count:1,"
    "postprocessing_instance_count:1,bls_instance_count:1,accumulate_tokens:False,hf_model_path:a\\,b,"
)
# The other ${KEY} of its five models, which the pages leave empty.
TEMPLATE += "".join(f"{key}:," for key in """
    add_special_tokens batch_scheduler_policy cancellation_check_period_ms cross_kv_cache_fraction
    cuda_graph_cache_size cuda_graph_mode decoding_mode eagle_choices enable_chunked_context
    enable_context_fmha_fp32_acc enable_trt_overlap encoder_engine_dir gpu_device_ids gpu_weights_percent
    guided_decoding_backend iter_stats_max_iterations kv_cache_host_memory_bytes kv_cache_onboard_blocks
    lookahead_ngram_size lookahead_verification_set_size lookahead_window_size lora_cache_gpu_memory_fraction
    lora_cache_host_memory_bytes lora_cache_max_adapter_size lora_cache_optimal_adapter_size lora_prefetch_dir
    max_num_images medusa_choices multi_block_mode multimodal_encoders_name multimodal_model_path normalize_log_probs
    num_nodes participant_ids prompt_embedding_table_data_type request_stats_max_iterations sink_token_length
    skip_special_tokens speculative_decoding_fast_logits stats_check_period_ms tensorrt_llm_draft_model_name
    tensorrt_llm_model_name xgrammar_tokenizer_info_path
""".split())  # fmt: skip
SHARED = ("lockstep_http", "lockstep_process", "lockstep_watchdog")
PROMPT = "What is machine learning?"


def make(folder: Path, socket_path: Path, **options: Any) -> Path:
    write_repository(Repository(options.pop("command", command(socket_path)), socket_path, 4, **options), folder)
    return folder


def command(socket_path: Path) -> list[str]:
    return [sys.executable, "-m", "lockstep", "serve", "--unix", str(socket_path)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make(tmp_path / "repository", tmp_path / "s")


# What is written


def test_the_command_writes_a_repository_without_a_fault(demo: Results, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "results", demo)
    out = tmp_path / "out"

    def triton(*arguments: object) -> subprocess.CompletedProcess:
        return call("lockstep", ("triton", *map(str, arguments)), tmp_path, os.environ)

    refused = triton("demo-llama/fp16/all", out, "--results", tree, "--set", "max_beam_width:2")
    assert "max_beam_width: expected 1" in refused.stderr and not out.exists(), "nothing is left behind"
    done = triton("demo-llama/fp16/all", out, "--results", tree, "--set", TEMPLATE)
    assert done.returncode == 0, done.stderr
    core = (out / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "max_queue_size: 9" in core and "decoupled" not in core and serve_options(out)["kv_bytes"] == 0.5
    assert sorted(path.name for path in out.iterdir()) == sorted(MODELS)
    assert "${" not in "".join(path.read_text() for path in out.rglob("*.pbtxt"))
    assert triton("--check", out).stdout.endswith("no fault found\n")
    (out / "ensemble" / "config.pbtxt").write_text("max_batch_size: ${size}")
    done = triton("--check", out)
    assert done.returncode == 1 and "line 1: expected a value, found a '${'" in done.stderr
    assert "--check" in triton("demo-llama/fp16/all").stderr


def test_the_same_is_written_twice(tmp_path: Path) -> None:
    written = Repository(["x"], tmp_path / "s", 4)
    assert files_of(written) == files_of(written)


def test_model_files_are_short_and_take_only_numpy_from_elsewhere(repository: Path) -> None:
    for path in repository.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 130, path
        imports = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
        allowed = {*SHARED, "numpy", "triton_python_backend_utils"}
        assert imports <= allowed | set(sys.stdlib_module_names), path


def test_a_configuration_is_read_as_it_is_written(repository: Path) -> None:
    for name in MODELS:
        path = repository / name / "config.pbtxt"
        config = read_config(path)
        assert text_of(config) == path.read_text()
        assert config == config_of(name, Repository(command(repository.parent / "s"), repository.parent / "s", 4))


def test_a_configuration_may_have_what_this_version_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(
        "name: 'x\\'y' \"z\" # one\ninput [ { dims: [1, 2]; }, {data_type: TYPE_BOOL} ], made_up { a: -1.5e3 b {} }"
    )
    actual = read_config(path)
    assert actual.name == "x'yz" and list(actual.input[0].dims) == [1, 2] and len(actual.input) == 2


@pytest.mark.parametrize(("damaged", "line"), [
    ("name", 1), ("name:", 1), ("\ninput {", 2), ("name 1", 1), ("name: }", 1), ('name: "', 1), ("\n\ninput: [1", 3),
    ("input {" * 100, 1), ("name: \0", 1), ("max_batch_size: four", 1), ("input {\n  data_type: TYPE_TEXT\n}", 2),
    ("name: 'a'\nname: 'b'", 2), ("dynamic_batching { default_queue_policy { max_queue_size: -1 } }", 1),
    ("made_up: }", None), ("made_up {" * 5000, None),
])  # fmt: skip
def test_a_damaged_configuration_is_one_line(tmp_path: Path, damaged: str, line: int | None) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(damaged)
    with pytest.raises(InputError) as raised:
        read_config(path)
    where = str(path) if line is None else f"{path}, line {line}"
    assert str(raised.value).startswith(f"{where}: expected ") and "\n" not in str(raised.value)
    assert ", found " in str(raised.value) and "; correct it" in str(raised.value)


def edited(repository: Path, model: str, old: str, new: str) -> list[str]:
    path = repository / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return check_repository(repository)


@pytest.mark.parametrize("model, old, new, named", [
    ("tensorrt_llm", 'name: "tensorrt_llm"', 'name: "gpt"', "name: expected tensorrt_llm, found gpt"),
    ("tensorrt_llm", 'backend: "python"', 'backend: "tensorrtllm"', "backend: expected python"),
    ("preprocessing", 'name: "QUERY"', 'name: "TEXT"', "input QUERY: expected data_type"),
    ("preprocessing", 'name: "QUERY"', 'name: "TEXT"', "input TEXT: expected none"),
    ("postprocessing", "TYPE_STRING", "TYPE_INT32", "output OUTPUT: expected data_type: TYPE_STRING"),
    ("tensorrt_llm", "dims: [-1, -1]", "dims: [7]", "found data_type: TYPE_FP16 dims: [7]"),
    ("preprocessing", "max_batch_size: 4", "max_batch_size: 8", "max_batch_size: expected 4, found 8"),
    ("preprocessing", 'string_value: "/', 'string_value: "/other/', "lockstep_socket: expected /"),
    ("ensemble", 'value: "_INPUT_ID"', 'value: "_ELSE"', "expected _INPUT_ID, found _ELSE"),
    ("ensemble", 'key: "OUTPUT"', 'key: "TEXT"', "output_map TEXT: expected none, found text_output"),
    ("ensemble", 'model_name: "preprocessing"', 'model_name: "other"', "step other, input_map QUERY: expected none"),
    ("tensorrt_llm", '"guaranteed_no_evict"', '"static_batch"', "batch_scheduler_policy: expected"),
    ("tensorrt_llm", '"inflight_fused_batching"', '"V1"', "gpt_model_type: expected"),
    ("tensorrt_llm", 'key: "gpt_model_type"', 'key: "unheard_of"', "'unheard_of'"),
    ("tensorrt_llm", 'key: "lockstep_command"', 'key: "engine_dir"', "lockstep_command"),
    ("tensorrt_llm", 'string_value: "600"', 'string_value: "soon"', "lockstep_start_seconds: expected a number"),
])  # fmt: skip
def test_the_lint_names_what_is_wrong(repository: Path, model: str, old: str, new: str, named: str) -> None:
    assert check_repository(repository) == []
    assert any(named in fault for fault in edited(repository, model, old, new))


def test_the_lint_names_files_that_are_missing_or_changed(repository: Path, tmp_path: Path) -> None:
    (repository / "preprocessing" / "1" / "model.py").write_text("pass\n")
    (repository / "tensorrt_llm" / "1" / "lockstep_http.py").unlink()
    (repository / "ensemble" / "1" / "README").unlink()
    (repository / "ensemble" / "1").rmdir()
    faults = check_repository(repository)
    assert len(faults) == 3 and all("expected" in fault for fault in faults)
    with pytest.raises(InputError, match="expected a folder that"):
        check_repository(tmp_path / "none")


def test_options_of_the_configuration_are_the_server_s(tmp_path: Path) -> None:
    defaults = serve_options(make(tmp_path / "a", tmp_path / "s"))
    assert defaults == {"no_prefix_caching": False, "admission": "guaranteed", "max_queue": 128}
    options = {"batch_scheduler_policy": "max_utilization", "enable_kv_cache_reuse": "false"}
    options["kv_cache_free_gpu_mem_fraction"] = "0.5"
    other = make(tmp_path / "b", tmp_path / "s", options=options, max_queue=7)
    expected = {"no_prefix_caching": True, "admission": "optimistic", "max_queue": 7, "kv_bytes": 0.5}
    assert serve_options(other) == expected and check_repository(other) == []
    for name, value, advice in (
        ("kv_cache_free_gpu_mem_fraction", "1.5", "correct it"),
        ("stats_check_period_ms", "x", "correct it"),
        ("max_beam_width", "2", "correct it"),
        ("max_tokens_in_paged_kv_cache", "2560", "set kv_cache_free_gpu_mem_fraction"),
    ):
        with pytest.raises(InputError, match=f"{name}: expected .*; {advice}, or leave it out"):
            serve_options(make(tmp_path / "c", tmp_path / "s", options={name: value}))


def test_each_option_has_one_meaning() -> None:
    assert not set(TAKEN) & set(ACCEPTED) and not set(TAKEN) & IGNORED and not set(ACCEPTED) & IGNORED


# The socket


def test_a_socket_is_this_user_s_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with unix_socket(path) as end:
        end.listen()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(InputError, match="another server has it"), unix_socket(path):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(InputError, match="a server listens there"), unix_socket(path):
            pass
    path.unlink()
    path.write_text("mine")
    with pytest.raises(InputError, match="found another file"), unix_socket(path):
        pass
    assert path.read_text() == "mine"
    for wrong in (tmp_path / "none" / "socket", tmp_path / ("a" * 120)):
        with pytest.raises(InputError, match="--unix: expected"), unix_socket(wrong):
            pass


# The models


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("u")
    with RealServer(make_tree(folder / "results", demo), "--unix", folder / "s") as server:
        assert f"unix:{folder / 's'}" in server.line
        yield server


@pytest.fixture
def load(server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Load and initialize a model, as Triton's stub does."""
    path = server.line.partition("unix:")[2].partition(" ")[0]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_stand_in)
    loaded = []

    def load(name: str, **options: Any) -> Any:
        folder = make(tmp_path / "repository", Path(path), **options) / name / "1"
        monkeypatch.syspath_prepend(str(folder))
        for shared in SHARED:
            monkeypatch.delitem(sys.modules, shared, raising=False)
        spec = importlib.util.spec_from_file_location(f"{name}_model", folder / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        model.initialize({"model_name": name, "model_config": json.dumps(as_triton_gives(folder.parent))})
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        model.finalize()
    for shared in SHARED:
        sys.modules.pop(shared, None)


def as_triton_gives(folder: Path) -> dict[str, Any]:
    config = read_config(folder / "config.pbtxt")
    fields = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return {**fields, "model_transaction_policy": {"decoupled": config.model_transaction_policy.decoupled}}


def triton_request(outputs: tuple[str, ...] = (), id: str = "", parameters: Any = None, **arrays: Any) -> Request:
    kinds = {str: np.object_, int: np.int32, float: np.float32, bool: np.bool_}
    results = {}
    for name, value in arrays.items():
        kind = kinds[type(value)] if not isinstance(value, np.ndarray) else None
        data = value.encode() if isinstance(value, str) else value
        results[name] = data if kind is None else np.array([[data]], kind)
    return Request(results, outputs, id, parameters or {})


def run(model: Any, request: Request) -> list[Any]:
    assert model.execute([request]) is None
    return request.sender.all()


def prompt_ids(server: RealServer) -> np.ndarray:
    inputs = [{"name": "QUERY", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT]}]
    inputs.append({"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [20]})
    outputs = server.post("/v2/models/preprocessing/infer", inputs=inputs)["outputs"]
    return np.array([next(output["data"] for output in outputs if output["name"] == "INPUT_ID")], np.int32)


def core(server: RealServer, num_tokens: int, **options: Any) -> dict[str, Any]:
    ids = prompt_ids(server)
    return {"input_ids": ids, "input_lengths": ids.shape[1], "request_output_len": num_tokens, "end_id": -1, **options}


def test_preprocessing_gives_tokens(server: RealServer, load: Callable[..., Any]) -> None:
    model = load("preprocessing")
    outputs = tuple(MODELS["preprocessing"].outputs)
    good = triton_request(outputs, QUERY=PROMPT, REQUEST_OUTPUT_LEN=20, STOP_WORDS_DICT="end")
    bad = triton_request(outputs, QUERY=PROMPT, REQUEST_OUTPUT_LEN=20.5)
    first, second, third = model.execute([good, bad, good])
    assert first.error is None and first.arrays["INPUT_ID"].tolist() == prompt_ids(server).tolist()
    assert first.arrays["INPUT_ID"].dtype == np.int32 and first.arrays["STOP_WORDS_IDS"].shape[:2] == (1, 2)
    assert str(second.error).startswith("REQUEST_OUTPUT_LEN: datatype") and second.error.code == "INVALID_ARG"
    assert third.arrays["INPUT_ID"].tolist() == first.arrays["INPUT_ID"].tolist()


def test_a_stream_of_tokens_becomes_the_text_with_its_spaces(server: RealServer, load: Callable[..., Any]) -> None:
    expected = server.complete(PROMPT, 60, ignore_eos=True, return_token_ids=True)["choices"][0]
    responses = run(load("tensorrt_llm"), triton_request(**core(server, 60, streaming=True)))
    ids = []
    for response in responses:
        ids += response.arrays["output_ids"].ravel()[: response.arrays["sequence_length"].item()].tolist()
    assert len(responses) > 5 and ids == expected["token_ids"]
    assert [response.arrays["IS_LAST"].item() for response in responses] == [False] * (len(responses) - 1) + [True]
    post = load("postprocessing")
    pieces = []
    for response in responses:
        outputs = response.arrays
        request = triton_request(
            TOKENS_BATCH=outputs["output_ids"],
            SEQUENCE_LENGTH=outputs["sequence_length"],
            CONTEXT_IDS=outputs["CONTEXT_IDS"],
            IS_LAST=outputs["IS_LAST"],
        )
        (answer,) = post.execute([request])
        pieces.append(answer.arrays["OUTPUT"].item().decode())
    assert "".join(pieces) == expected["text"]


def test_a_whole_answer_has_the_prompt_and_zeros_for_log_probabilities(
    server: RealServer, load: Callable[..., Any]
) -> None:
    model = load("tensorrt_llm")
    (full,) = run(model, triton_request(**core(server, 20)))
    ids = prompt_ids(server)[0].tolist()
    assert full.arrays["output_ids"][0, 0, : len(ids)].tolist() == ids
    assert full.arrays["sequence_length"].tolist() == [[len(ids) + 20]]
    assert full.arrays["output_log_probs"].shape == (1, 1, 20) and not full.arrays["output_log_probs"].any()
    tensors = triton_request(**core(server, 20)).inputs()
    inputs = {tensor.name(): np.concatenate([tensor.as_numpy()] * 2) for tensor in tensors}
    responses = run(model, Request(inputs, (), "", {}))
    assert sorted(response.arrays["batch_index"].item() for response in responses) == [0, 1]


@pytest.mark.long
def test_cancellation_and_stopping_end_what_runs(server: RealServer, load: Callable[..., Any]) -> None:
    model = load("tensorrt_llm")
    cancelled = triton_request(**core(server, 230, streaming=True))
    with server.stopped_engine():
        model.execute([cancelled])
        server.wait_until(lambda status: status["streams"] == 1)
        cancelled.sender.cancelled = True
        assert cancelled.sender.all() == []
    server.wait_idle()
    stopped = triton_request(id="7", **core(server, 230, streaming=True))
    ids = {"input_ids": np.ones([1, 1], np.int32), "input_lengths": 1, "request_output_len": 1}
    with server.stopped_engine():
        model.execute([stopped])
        server.wait_until(lambda status: status["streams"] == 1)
        assert run(model, triton_request(id="7", stop=True, **ids)) == []
    assert len(stopped.sender.all()) < 229
    server.wait_idle()


def test_no_response_follows_cancellation(server: RealServer, load: Callable[..., Any]) -> None:
    """Though the tokens have come already."""
    model = load("tensorrt_llm")
    request = triton_request(**core(server, 230, streaming=True))
    request.sender.open.clear()
    model.execute([request])
    request.sender.sent.get(timeout=ENDS)
    server.wait_idle()
    request.sender.cancelled = True
    end = time.monotonic() + ENDS
    while not all(stream.is_cancelled for stream in model.running):
        assert time.monotonic() < end
        time.sleep(0.01)
    request.sender.open.set()
    assert request.sender.all() == []


def test_what_the_server_refuses_is_an_error_of_that_request(load: Callable[..., Any]) -> None:
    model = load("tensorrt_llm_bls")
    (refused,) = run(model, triton_request(text_input=PROMPT, max_tokens=0))
    assert str(refused.error).startswith("max_tokens:") and refused.error.code == "INVALID_ARG"
    (odd,) = run(model, triton_request(text_input=np.array([[b"\xff"]], np.object_), max_tokens=3))
    assert "UTF-8" in str(odd.error)
    (good,) = run(model, triton_request(text_input=PROMPT, max_tokens=3))
    assert good.error is None and good.arrays["text_output"].item().decode().startswith(PROMPT)


def test_a_batch_of_which_one_prompt_is_wrong_is_refused(load: Callable[..., Any]) -> None:
    """Before another one runs: an ensemble that fails with a step in flight never ends in Triton."""
    texts = np.array([[PROMPT.encode()]] * 2, np.object_)
    lengths = np.array([[230], [0]], np.int32)
    (refused,) = run(
        load("tensorrt_llm_bls"), triton_request(text_input=texts, max_tokens=lengths, stream=np.ones([2, 1], bool))
    )
    assert str(refused.error).startswith("max_tokens:") and refused.error.code == "INVALID_ARG"


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_configuration_says_what_a_request_does_not(load: Callable[..., Any], decoupled: bool) -> None:
    options = {"exclude_input_in_output": "True", "cancellation_check_period_ms": "none"}
    model = load("tensorrt_llm_bls", decoupled=decoupled, options=options)
    texts = []
    for options in ({}, {"exclude_input_in_output": False}):
        request = triton_request(text_input=PROMPT, max_tokens=8, **options)
        (response,) = run(model, request) if decoupled else model.execute([request])
        texts.append(response.arrays["text_output"].item())
    assert not texts[0].startswith(PROMPT.encode()) and texts[1].startswith(PROMPT.encode())
    assert texts[1].endswith(texts[0])


def test_bls_accumulates_where_it_is_asked_to(load: Callable[..., Any]) -> None:
    options = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, "stream": True}
    pieces = [item.arrays["text_output"].item() for item in run(load("tensorrt_llm_bls"), triton_request(**options))]
    parts = run(load("tensorrt_llm_bls"), triton_request(parameters={"accumulate_tokens": True}, **options))
    assert parts[-1].arrays["text_output"].item() == b"".join(pieces)


def test_a_model_that_is_not_decoupled_gives_one_response(load: Callable[..., Any]) -> None:
    model = load("tensorrt_llm_bls", decoupled=False)
    good, bad = model.execute(
        [triton_request(text_input=PROMPT, max_tokens=8), triton_request(text_input=PROMPT, max_tokens=0)]
    )
    assert good.arrays["text_output"].ravel()[0].decode().startswith(PROMPT)
    assert str(bad.error).startswith("max_tokens:")


@pytest.mark.long
def test_the_core_model_starts_the_server_again_and_ends_it(
    demo: Results, load: Callable[..., Any], tmp_path: Path
) -> None:
    tree = make_tree(tmp_path / "results", demo)
    path = tmp_path / "s"
    command = [
        sys.executable, "-m", "lockstep", "serve", "demo-llama/fp32/all", "--results", str(tree), "--unix", str(path),
    ]  # fmt: skip
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    module_path = make(tmp_path / "own", path, command=command) / "tensorrt_llm" / "1"
    model = load("tensorrt_llm")  # for its modules; it found the module's server
    server_model = type(model)()
    os.environ.setdefault("LOCKSTEP_THREADS", "1")
    server_model.initialize(
        {"model_name": "tensorrt_llm", "model_config": json.dumps(as_triton_gives(module_path.parent))}
    )
    try:
        ids = np.array([[5, 6, 7]], np.int32)
        request = triton_request(input_ids=ids, input_lengths=3, request_output_len=4)
        assert run(server_model, request)[0].error is None
        first = server_model.process.process.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + STARTS
        while True:
            responses = run(server_model, triton_request(input_ids=ids, input_lengths=3, request_output_len=4))
            if responses[0].error is None:
                break
            assert responses[0].error.code in ("UNAVAILABLE", "INTERNAL") and time.monotonic() < end
            time.sleep(0.1)
        assert server_model.process.process.pid != first
    finally:
        server_model.finalize()
    assert server_model.process.process.returncode == 0 and not path.exists()


KEEPS_THE_LOCK = "ctypes.PyDLL(None).sleep(1000)  # the interpreter's"


@pytest.mark.long
@pytest.mark.parametrize(("after", "call"), [(0, KEEPS_THE_LOCK), (1, KEEPS_THE_LOCK), (1, "time.sleep(1000)")])
def test_a_model_s_process_ends_where_its_parent_is_killed(repository: Path, after: int, call: str) -> None:
    """After seconds of a call that never returns; one that is the first thing that a model does, too."""
    code = "import ctypes, time, lockstep_watchdog\nlockstep_watchdog._STUCK_SECONDS = 2\n"
    code += f"watchdog = lockstep_watchdog.Watchdog()\ntime.sleep({after})\nprint('runs', flush=True)\n{call}\n"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    folder = str(repository / "preprocessing" / "1")
    parent = subprocess.Popen(
        [sys.executable, "-c", start],
        env={**os.environ, "PYTHONPATH": folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"runs\n"
    parent.kill()
    # Its end comes where nobody has the pipe's other end any more.
    assert parent.communicate(timeout=60)[0] == b""
