"""Triton's HTTP API on the real `lockstep serve`: requests of users of its TensorRT-LLM backend, and rejected ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lockstep.targets import Results
from real_server import Events, RealServer, make_tree

PROMPT = "What is machine learning?"
CURL = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
KEYS = [
    "cum_log_probs", "model_name", "model_version", "output_log_probs", "sequence_end", "sequence_id", "sequence_start",
    "text_output",
]  # fmt: skip
ENSEMBLE = "/v2/models/ensemble"
BLS = "/v2/models/tensorrt_llm_bls"


def generate(server: RealServer, model: str = "ensemble", **body: Any) -> Any:
    return server.post(f"/v2/models/{model}/generate", **{**CURL, **body})


def refusal(server: RealServer, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and message of a request that is refused as Triton refuses."""
    status, response_headers, data = server.request("POST", path, body, headers)
    assert response_headers["content-type"] == "application/json", data
    answer = json.loads(data)
    assert list(answer) == ["error"], answer
    return status, answer["error"]


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def core(ids: list[int], num_tokens: int, *arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Inputs of tensorrt_llm for one prompt."""
    return [
        tensor("input_ids", "INT32", [1, len(ids)], ids),
        tensor("input_lengths", "INT32", [1, 1], [len(ids)]),
        tensor("request_output_len", "INT32", [1, 1], [num_tokens]),
        *arguments,
    ]


def infer(server: RealServer, model: str, inputs: list[dict[str, Any]], **body: Any) -> dict[str, dict[str, Any]]:
    """Return the outputs of a model, {name: tensor}."""
    answer = server.post(f"/v2/models/{model}/infer", inputs=inputs, **body)
    assert answer["model_name"] == model and answer["model_version"] == "1"
    return {output["name"]: output for output in answer["outputs"]}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_curl_without_a_content_type(server: RealServer, model: str) -> None:
    url = f"{server.url}/v2/models/{model}/generate"
    body = json.dumps(CURL)
    answers = [json.loads(server.request("POST", f"/v2/models/{model}/generate", body.encode())[2])]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(
        "POST", f"/v2/models/{model}/generate", body, {"Content-Type": "application/x-www-form-urlencoded"}
    )
    answers.append(json.loads(connection.getresponse().read()))
    connection.close()
    if shutil.which("curl"):
        run = subprocess.run(["curl", "-s", "-X", "POST", url, "-d", body], capture_output=True, check=True, timeout=60)
        answers.append(json.loads(run.stdout))
    for answer in answers:
        assert sorted(answer) == KEYS and answer == answers[0]
    assert answers[0]["model_name"] == model and answers[0]["model_version"] == "1"
    openai = server.complete(PROMPT, 20, ignore_eos=True, stop_token_ids=[2])["choices"][0]["text"]
    assert answers[0]["text_output"] == PROMPT + openai


@pytest.mark.parametrize("path", [ENSEMBLE, BLS])
def test_a_stream_gives_what_is_new_and_no_prompt(server: RealServer, path: str) -> None:
    full = server.post(f"{path}/generate", **CURL, exclude_input_in_output=True, return_log_probs=True)
    events = list(Events(server.port, f"{path}/generate_stream", {**CURL, "stream": True, "return_log_probs": True}))
    assert len(events) > 1 and all(sorted(event) == KEYS for event in events)
    assert "".join(event["text_output"] for event in events).strip() == full["text_output"].strip()
    assert events[-1]["cum_log_probs"] == full["cum_log_probs"] < 0
    said_no = list(Events(server.port, f"{path}/generate_stream", {**CURL, "stream": False}))
    assert [event["text_output"] for event in said_no] == [generate(server)["text_output"]]


def test_bls_accumulates_when_it_is_asked_to(server: RealServer) -> None:
    events = list(Events(server.port, f"{BLS}/generate_stream", {**CURL, "accumulate_tokens": True}))
    texts = [event["text_output"] for event in events]
    assert all(later.startswith(text) for text, later in zip(texts, texts[1:])) and len(texts) > 1
    assert texts[-1].strip() == generate(server, exclude_input_in_output=True)["text_output"].strip()


def test_words_stop_or_do_not_come(server: RealServer) -> None:
    text = generate(server)["text_output"]
    word = text.removeprefix(PROMPT).split()[2]
    stopped = generate(server, stop_words=[word, ""])["text_output"]
    assert stopped == text[: text.index(word, len(PROMPT)) + len(word)]  # the word is given out, as upstream does
    parts = list(Events(server.port, f"{ENSEMBLE}/generate_stream", {**CURL, "stop_words": word}))
    assert PROMPT + "".join(part["text_output"] for part in parts) == stopped
    assert word not in generate(server, bad_words=word)["text_output"].removeprefix(PROMPT)


def test_sampling_is_greedy_unless_it_is_asked_for(server: RealServer) -> None:
    greedy = generate(server)
    assert generate(server, top_k=1, temperature=5.0) == greedy == generate(server, top_k=0, top_p=0.0)
    drawn = [generate(server, top_k=0, top_p=0.9, temperature=1.5, seed=seed)["text_output"] for seed in (0, 0, 3)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != greedy["text_output"]
    older = generate(server, top_p=0.9, temperature=1.5, random_seed=3)
    assert older["text_output"] == drawn[2]
    answers = generate(server, top_p=0.9, temperature=1.5, num_return_sequences=2)["text_output"]
    assert answers[0] == drawn[0] and answers[1] != drawn[0]
    biased = generate(server, embedding_bias_words=["zz"], embedding_bias_weights=[100.0])["text_output"]
    assert biased.removeprefix(PROMPT) != greedy["text_output"].removeprefix(PROMPT)


def test_end_id_ends_and_is_not_given_out(server: RealServer) -> None:
    prompt = infer(server, "preprocessing", query(PROMPT, 20))["INPUT_ID"]["data"]
    ids = infer(server, "tensorrt_llm", core(prompt, 20))["output_ids"]["data"]
    assert ids[: len(prompt)] == prompt
    answer = ids[len(prompt) :]
    end = answer[5]
    first = answer.index(end)
    answer_ids = infer(server, "tensorrt_llm", core(prompt, 20, tensor("end_id", "INT32", [1, 1], [end])))
    assert answer_ids["output_ids"]["data"] == prompt + answer[:first]
    assert answer_ids["sequence_length"]["data"] == [len(prompt) + first]


def test_stop_sequences_of_tokens_end_and_are_given_out(server: RealServer) -> None:
    prompt = infer(server, "preprocessing", query(PROMPT, 20))["INPUT_ID"]["data"]
    answer = infer(server, "tensorrt_llm", core(prompt, 20))["output_ids"]["data"][len(prompt) :]
    for stop in (answer[4:7], answer[6:7]):
        at = next(i for i in range(len(answer)) if answer[i : i + len(stop)] == stop)
        rows = stop + [0], [len(stop)] + [-1] * len(stop)
        stop_words = tensor("stop_words_list", "INT32", [1, 2, len(stop) + 1], [list(row) for row in rows])
        answer_ids = infer(server, "tensorrt_llm", core(prompt, 20, stop_words))
        assert answer_ids["output_ids"]["data"] == prompt + answer[: at + len(stop)]
    server.wait_idle()


def query(text: str, num_tokens: int) -> list[dict[str, Any]]:
    return [
        tensor("QUERY", "BYTES", [1, 1], [text]),
        tensor("REQUEST_OUTPUT_LEN", "INT32", [1, 1], [num_tokens]),
        tensor("BAD_WORDS_DICT", "BYTES", [1, 1], [""]),
        tensor("STOP_WORDS_DICT", "BYTES", [1, 1], ["zebra"]),
    ]


def test_the_models_by_hand_give_what_the_ensemble_gives(server: RealServer) -> None:
    preprocessed = infer(server, "preprocessing", query(PROMPT, 12))
    renamed = {
        "INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths", "REQUEST_OUTPUT_LEN": "request_output_len",
        "DECODER_INPUT_ID": "decoder_input_ids", "BAD_WORDS_IDS": "bad_words_list", "STOP_WORDS_IDS": "stop_words_list",
        "EMBEDDING_BIAS": "embedding_bias", "OUT_END_ID": "end_id", "OUT_PAD_ID": "pad_id",
    }  # fmt: skip
    tokens = infer(server, "tensorrt_llm", [{**preprocessed[name], "name": to} for name, to in renamed.items()])
    text = infer(
        server,
        "postprocessing",
        [{**tokens["output_ids"], "name": "TOKENS_BATCH"}, {**tokens["sequence_length"], "name": "SEQUENCE_LENGTH"}],
    )
    inputs = [tensor("text_input", "BYTES", [1, 1], [PROMPT]), tensor("max_tokens", "INT32", [1, 1], [12])]
    ensemble = infer(server, "ensemble", inputs)
    assert text["OUTPUT"]["data"] == ensemble["text_output"]["data"] and ensemble["text_output"]["shape"] == [1]


def test_a_batch_is_answered_side_by_side(server: RealServer) -> None:
    inputs = [
        tensor("text_input", "BYTES", [2, 1], [PROMPT, "Once upon a time"]),
        tensor("max_tokens", "INT32", [2, 1], [20, 7]),
        tensor("end_id", "INT32", [2, 1], [2, 2]),
        tensor("return_log_probs", "BOOL", [2, 1], [[True], [True]]),
    ]
    outputs = infer(server, "ensemble", inputs, outputs=[{"name": "text_output"}, {"name": "output_log_probs"}])
    texts = [
        generate(server)["text_output"],
        generate(server, text_input="Once upon a time", max_tokens=7)["text_output"],
    ]
    assert list(outputs) == ["text_output", "output_log_probs"]
    assert outputs["text_output"]["data"] == texts and outputs["output_log_probs"]["shape"] == [2, 1, 20]
    assert outputs["output_log_probs"]["data"][27:] == [0.0] * 13  # the shorter one is filled up


@pytest.mark.parametrize("in_tokens", [False, True])
def test_infer_stream_gives_all_outputs_of_each_answer(server: RealServer, in_tokens: bool) -> None:
    """As the models of a Triton repository send them on."""
    prompts = [
        infer(server, "preprocessing", query(text, 5))["INPUT_ID"]["data"] for text in (PROMPT, "Once upon a time")
    ]
    length = max(map(len, prompts))
    inputs = [
        tensor("input_ids", "INT32", [2, length], [prompt + [0] * (length - len(prompt)) for prompt in prompts]),
        tensor("input_lengths", "INT32", [2, 1], [len(prompt) for prompt in prompts]),
        tensor("request_output_len", "INT32", [2, 1], [5, 7]),
        tensor("end_id", "INT32", [2, 1], [-1, -1]),
        tensor("streaming", "BOOL", [2, 1], [in_tokens] * 2),
        tensor("exclude_input_in_output", "BOOL", [2, 1], [False, True]),
    ]
    events = list(Events(server.port, "/v2/models/tensorrt_llm/infer_stream", {"id": "a", "inputs": inputs}))
    assert [event["parameters"]["triton_final_response"] for event in events] == [False] * (len(events) - 1) + [True]
    results: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        outputs = {output["name"]: output for output in event["outputs"]}
        names = {"output_ids", "sequence_length", "cum_log_probs", "output_log_probs", "batch_index", "sequence_index"}
        assert event["id"] == "a" and outputs.keys() == names | {"CONTEXT_IDS", "IS_LAST"}
        number = outputs["batch_index"]["data"][0]
        data = outputs["output_ids"]["data"]
        has_prompt = not in_tokens and number == 0
        before = [-1] if has_prompt else [*prompts[number], *results[number]][-32:]
        assert outputs["CONTEXT_IDS"]["data"] == before and outputs["CONTEXT_IDS"]["shape"] == [1, 1, len(before)]
        results[number] += data
        ended = len(results[number]) == (5, 7)[number] + has_prompt * len(prompts[number])
        assert outputs["IS_LAST"]["data"] == [ended] and outputs["sequence_length"]["data"] == [len(data)]
        assert outputs["output_log_probs"]["data"] == [0.0] * (len(data) - has_prompt * len(prompts[number]))
    assert results[0][: len(prompts[0])] == prompts[0] or in_tokens
    assert refusal(server, "/v2/models/tensorrt_llm/infer_stream", {"inputs": inputs[:1]})[0] == 400


def test_server_and_models_describe_themselves(server: RealServer) -> None:
    assert server.get("/v2")["name"] == "lockstep" and "binary_tensor_data" in server.get("/v2")["extensions"]
    for path in ("/v2/health/live", "/v2/health/ready", f"{ENSEMBLE}/ready", f"{ENSEMBLE}/versions/1/ready"):
        assert server.request("GET", path)[0] == 200
    index = json.loads(server.request("POST", "/v2/repository/index", b"")[2])
    assert [(model["version"], model["state"]) for model in index] == [("1", "READY")] * 6
    for name in (model["name"] for model in index):
        described = server.get(f"/v2/models/{name}/versions/1")
        config = server.get(f"/v2/models/{name}/config")
        assert config["max_batch_size"] == server.get("/status")["limits"]["max_batch_size"]
        assert config.get("platform") != "ensemble"  # perf_analyzer reads the steps of one, and crashes without
        assert [[-1, *item["dims"]] for item in config["input"]] == [item["shape"] for item in described["inputs"]]
        assert {item["datatype"] for item in described["outputs"]} <= {"BYTES", "INT32", "FP32"}
    names = [item["name"] for item in server.get(ENSEMBLE)["inputs"]]
    assert {"text_input", "max_tokens", "seed", "lora_task_id"} <= set(names) and "random_seed" not in names


def test_statistics_count_requests_of_each_model(server: RealServer) -> None:
    before = server.get(f"{ENSEMBLE}/stats")["model_stats"][0]
    generate(server)
    refusal(server, f"{ENSEMBLE}/generate", {**CURL, "max_tokens": 0})
    (after,) = server.get(f"{ENSEMBLE}/versions/1/stats")["model_stats"]
    assert after["execution_count"] - before["execution_count"] == 1 and after["last_inference"] > 1 << 40
    times = after["inference_stats"]
    earlier = before["inference_stats"]
    # perf_analyzer ends where the parts of a computation are not counted alike.
    for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"):
        assert times[name]["count"] - earlier[name]["count"] == 1
        assert name in ("fail", "compute_input", "compute_output") or times[name]["ns"] > earlier[name]["ns"]
    assert [item["name"] for item in server.get("/v2/models/stats")["model_stats"]] == [
        load["name"] for load in json.loads(server.request("POST", "/v2/repository/index")[2])
    ]
    assert refusal(server, "/v2/models/gpt/stats", None)[0] in (404, 405)


def test_binary_tensors(server: RealServer) -> None:
    text = PROMPT.encode()
    data = struct.pack("<I", len(text)) + text + struct.pack("<i", 12)
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(text) + 4}},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}},
    ]
    head = json.dumps({"id": "a", "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    status, headers, body = server.request(
        "POST", f"{ENSEMBLE}/infer", head + data, {"Inference-Header-Content-Length": str(len(head))}
    )
    assert status == 200, body
    length = int(headers["inference-header-content-length"])
    answer = json.loads(body[:length])
    assert answer["id"] == "a" and answer["parameters"]["sequence_id"] == 0
    (size,) = struct.unpack_from("<I", body, length)
    assert answer["outputs"][0]["parameters"]["binary_data_size"] == size + 4 == len(body) - length
    assert body[length + 4 :].decode() == generate(server, max_tokens=12, end_id=None)["text_output"]


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"text_input": None}, "text_input"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 40}, "max_tokens"),
    ({"text_input": ["a", "b"]}, "text_input"),
    ({"text_input": ""}, "text_input"),
    ({"text_input": "\ud800"}, "text_input"),
    ({"text_input": "a b " * 200_000}, "text_input"),
    ({"stop_words": ["a"] * 65}, "stop_words"),
    ({"embedding_bias_words": ["a"] * 65, "embedding_bias_weights": [1.0] * 65}, "embedding_bias_words"),
    ({"beam_width": 4}, "beam_width"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 1.5}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 3, "random_seed": 3}, "random_seed"),
    ({"num_return_sequences": 99}, "num_return_sequences"),
    ({"lora_task_id": 1}, "lora_task_id"),
    ({"return_context_logits": True}, "return_context_logits"),
    ({"guided_decoding_guide": "[a-z]"}, "guided_decoding_guide"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_weights"),
    ({"unheard_of": {}}, "unheard_of"),
]


@pytest.mark.parametrize("change, name", BAD_BODIES, ids=[f"{list(c)[-1]}-{i}" for i, (c, _) in enumerate(BAD_BODIES)])
def test_what_generate_refuses_is_named(server: RealServer, change: dict[str, Any], name: str) -> None:
    for action in ("generate", "generate_stream"):
        status, message = refusal(server, f"{BLS}/{action}", {**CURL, **change})
        assert status == 400 and message.startswith(f"{name}:"), message
    assert generate(server)["text_output"].startswith(PROMPT)


def test_what_asks_for_nothing_is_taken(server: RealServer) -> None:
    nothing = {
        "lora_task_id": 0, "return_context_logits": False, "beam_width": 1, "unheard_of": 3, "length_penalty": 1.0,
    }  # fmt: skip
    assert generate(server, **nothing, guided_decoding_guide="") == generate(server)


def changed(name: str, **change: Any) -> list[dict[str, Any]]:
    return [{**item, **(change if item["name"] == name else {})} for item in core([5, 6, 7], 4)]


BAD_INPUTS: list[tuple[list[dict[str, Any]], str]] = [
    (core([5, 6, 7], 4)[1:], "input_ids"),
    (changed("input_ids", datatype="INT64"), "input_ids"),
    (changed("input_ids", datatype="FP8"), "input_ids"),
    (changed("input_ids", shape=[3]), "input_ids"),
    (changed("input_ids", shape=[1, 4]), "input_ids"),
    (changed("input_ids", shape=[0, 1 << 40], data=[]), "input_ids"),
    (changed("input_ids", shape=[3, 1]), "input_lengths"),
    (changed("input_ids", data=[5, 6, 1 << 20]), "input_ids"),
    (changed("input_ids", data=[5, 6, 7.5]), "input_ids"),
    (changed("input_ids", data=[5, 6, None]), "input_ids"),
    (changed("input_ids", data=[5, [6, True]]), "input_ids"),
    (changed("input_ids", parameters={"shared_memory_region": "a"}), "input_ids"),
    (changed("input_lengths", data=[4]), "input_lengths"),
    (core([5, 6, 7], 4, tensor("unheard_of", "INT32", [1, 1], [1])), "unheard_of"),
    (core([5, 6, 7], 4, *core([5, 6, 7], 4)), "input_ids"),
    (core([5, 6, 7], 4, tensor("draft_input_ids", "INT32", [1, 2], [5, 6])), "draft_input_ids"),
    (core([5, 6, 7], 4, tensor("bad_words_list", "INT32", [1, 2, 1], [5, 9])), "bad_words_list"),
    (core([5], 4, tensor("bad_words_list", "INT32", [1, 2, 65], [5] * 65 + list(range(1, 66)))), "bad_words_list"),
    (
        core([5], 4, tensor("stop_words_list", "INT32", [1, 2, 5000], [5] * 5000 + [5000] + [-1] * 4999)),
        "stop_words_list",
    ),
    (core([5, 6, 7], 4, tensor("stop_words_list", "INT32", [1, 2, 1], [-7, 1])), "stop_words"),
    (core([5, 6, 7], 4, tensor("embedding_bias", "FP32", [1, 1 << 15], [1] * (1 << 15))), "bias"),
]


@pytest.mark.parametrize("inputs, name", BAD_INPUTS, ids=[f"{name}-{i}" for i, (_, name) in enumerate(BAD_INPUTS)])
def test_what_infer_refuses_is_named(server: RealServer, inputs: list[dict[str, Any]], name: str) -> None:
    status, message = refusal(server, "/v2/models/tensorrt_llm/infer", {"inputs": inputs})
    assert status == 400 and message.startswith(f"{name}:"), message


def test_damaged_requests(server: RealServer) -> None:
    path = "/v2/models/tensorrt_llm/infer"
    good = json.dumps({"inputs": core([5, 6, 7], 4)}).encode()
    for length in ("-1", "9" * 30, str(len(good) + 1), "x"):
        assert refusal(server, path, good, {"Inference-Header-Content-Length": length})[0] == 400
    assert "bytes more" in refusal(server, path, good + b"abc", {"Inference-Header-Content-Length": str(len(good))})[1]
    for size in (13, 11, -1, 1 << 62, "12", True):
        ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 3], "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [ids, *core([5, 6, 7], 4)[1:]]}).encode()
        headers_sent = {"Inference-Header-Content-Length": str(len(head))}
        assert refusal(server, path, head + bytes(12), headers_sent)[0] == 400, size
    for data in (b"\xff\xff\xff\xffabcd", b"\1\0\0\0", b"\1\0\0\0ab", b"\4\0\0\0\xff\xfe\xfd\xfc"):
        text = {
            "name": "text_input",
            "datatype": "BYTES",
            "shape": [1, 1],
            "parameters": {"binary_data_size": len(data)},
        }
        head = json.dumps({"inputs": [text, tensor("max_tokens", "INT32", [1, 1], [4])]}).encode()
        headers_sent = {"Inference-Header-Content-Length": str(len(head))}
        assert refusal(server, f"{ENSEMBLE}/infer", head + data, headers_sent)[0] == 400, data
    for body in (b"", b"{", b"[]", b"\xff", b'{"inputs": 3}', b"[" * 100_000, b'{"inputs": [], "inputs": []}'):
        assert refusal(server, path, body)[0] == 400
        assert refusal(server, f"{ENSEMBLE}/generate", body)[0] == 400
    assert refusal(server, path, good, {"Content-Encoding": "gzip"})[0] == 415
    assert refusal(server, path, {"inputs": core([5], 4), "outputs": [{"name": "unheard_of"}]})[0] == 400
    assert refusal(server, path, {"inputs": core([5], 4), "id": 3})[0] == 400
    assert refusal(server, f"{ENSEMBLE}/generate", b" " * ((4 << 20) + 1))[0] == 413
    with contextlib.suppress(ConnectionError):  # it may be closed before all of the head is sent
        assert server.request("POST", path, good, {"X-Long": "a" * (1 << 20)})[0] == 400
    for other in ("/v2/models/gpt/generate", "/v2/models/ensemble/versions/2/infer", "/v2/models/gpt/infer"):
        assert refusal(server, other, good)[0] == 404
    assert infer(server, "tensorrt_llm", core([5, 6, 7], 4))["sequence_length"]["data"] == [7]
    server.wait_idle()


@pytest.mark.long
def test_another_request_stops_one_by_its_id(server: RealServer) -> None:
    body = {**CURL, "max_tokens": 240, "end_id": -1, "id": "42"}
    events = Events(server.port, f"{ENSEMBLE}/generate_stream", body)
    assert next(iter(events))["id"] == "42"
    stop = core([1], 0, tensor("stop", "BOOL", [1, 1], [True]))
    assert refusal(server, "/v2/models/tensorrt_llm/infer", {"inputs": stop})[1].startswith("id:")
    assert infer(server, "tensorrt_llm", stop, id="other") == {}
    assert infer(server, "tensorrt_llm", stop, id="42") == {}
    assert len(list(events)) < 238
    server.wait_idle()


@pytest.mark.long
def test_keys_pages_of_others_and_a_full_queue(demo: Results, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    tree = make_tree(tmp_path / "results", demo, max_batch_size=1)
    with RealServer(tree, "--api-key-file", tmp_path / "keys", "--max-queue", 0) as server:
        key = {"Authorization": "Bearer secret"}
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert refusal(server, f"{ENSEMBLE}/generate", CURL)[0] == 401
        assert refusal(server, f"{ENSEMBLE}/infer", CURL, {"Authorization": "Bearer other"})[0] == 401
        assert refusal(server, f"{ENSEMBLE}/generate", CURL, {**key, "Origin": "http://elsewhere"})[0] == 403
        with ThreadPoolExecutor(6) as threads:
            long = {**CURL, "max_tokens": 240, "end_id": -1}
            answers = list(threads.map(lambda _: server.request("POST", f"{BLS}/generate", long, key), range(6)))
        by_status = {status: (headers, data) for status, headers, data in answers}
        assert set(by_status) == {200, 429}
        assert int(by_status[429][0]["retry-after"]) >= 1 and list(json.loads(by_status[429][1])) == ["error"]
