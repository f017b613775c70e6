"""`lockstep serve`, the real one: completions as in OpenAI's API, and rejected requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep_serve.bodies import BadRequest, decode_body, is_near
from lockstep_serve.openai import CompletionBody
from lockstep_serve.openai_chat import ChatBody
from real_server import RealServer

ROOT = Path(__file__).parents[3]
PROMPT = "Once upon a time"


def test_says_where_it_is_and_what_it_serves(server: RealServer) -> None:
    status = server.get("/status")
    assert status["identity"][:12] in server.line and "demo-llama" in server.line
    assert "127.0.0.1" in server.url and status["limits"]["max_seq_len"] == 256
    sizes = status["step_sizes"]
    assert sizes["equal"][-1] == status["limits"]["max_batch_size"] and not sizes["differing"] + len(sizes["untried"])
    assert f", the same bits in steps of 1 to {sizes['equal'][-1]} rows" in server.line


def test_a_stream_adds_up_to_the_whole_answer(server: RealServer) -> None:
    full = server.complete(PROMPT, 30)
    with server.opened(PROMPT, 30, stream_options={"include_usage": True}) as events:
        *chunks, usage = events
    assert events.done
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == full["choices"][0]["text"]
    assert usage["choices"] == [] and usage["usage"] == full["usage"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]  # a busy machine gets fewer, longer chunks
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_each_chunk_counts_the_tokens_of_its_answer_where_that_is_asked_for(server: RealServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.opened([[1, 17, 300], [5]], 8, n=2, ignore_eos=True, stream_options=options) as events:
        *chunks, last = events
    results: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        usage = chunk["usage"]
        results.setdefault(choice["index"], []).append(usage["completion_tokens"])
        assert usage["prompt_tokens"] == (3 if choice["index"] < 2 else 1)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sorted(results) == [0, 1, 2, 3]
    assert all(counts == sorted(counts) and counts[0] > 0 and counts[-1] == 8 for counts in results.values())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 32
    with server.opened("a", 3, stream_options={"include_usage": None, "continuous_usage_stats": True}) as events:
        assert all(chunk["choices"] and "usage" not in chunk for chunk in events) and events.done


def test_prompts_and_choices_are_numbered_in_order(server: RealServer) -> None:
    alone = [server.complete(prompt, 8)["choices"][0]["text"] for prompt in (PROMPT, "The pendulum")]
    together = server.complete([PROMPT, "The pendulum"], 8, n=2)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in together["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert together["usage"]["completion_tokens"] == 32


def test_token_ids_are_taken_as_they_are(server: RealServer) -> None:
    ids = [1, 17, 300, 45]
    assert server.complete(ids, 8)["usage"]["prompt_tokens"] == 4
    choices = server.complete([ids, [5, 6]], 8)
    assert choices["choices"][0]["text"] == server.complete(ids, 8)["choices"][0]["text"]
    assert choices["usage"]["prompt_tokens"] == 6


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(server: RealServer) -> None:
    sampling = {"temperature": 1.2, "top_p": 0.95, "seed": 7}
    alone = server.complete(PROMPT, 24, n=3, **sampling)
    texts = [choice["text"] for choice in alone["choices"]]
    assert len(set(texts)) == 3
    with server.opened("The pendulum", 200, temperature=1.0, ignore_eos=True) as other:
        assert other.status == 200
        again = server.complete(PROMPT, 24, n=3, **sampling)
    assert [choice["text"] for choice in again["choices"]] == texts


def test_without_a_seed_answers_differ(server: RealServer) -> None:
    texts = {server.complete(PROMPT, 24, temperature=1.5)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_a_stop_string_over_tokens_ends_the_text_before_it(server: RealServer) -> None:
    text = server.complete(PROMPT, 30)["choices"][0]["text"]
    stop = text[10:17]
    assert len(stop) == 7
    full = server.complete(PROMPT, 30, stop=["never there", stop])
    assert full["choices"][0] == {
        "index": 0,
        "text": text[: text.index(stop)],
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert full["usage"]["completion_tokens"] < 30
    with server.opened(PROMPT, 30, stop=stop) as events:
        assert events.text() == full["choices"][0]["text"]
    server.wait_idle()


def test_a_stop_string_ends_no_answer_before_min_tokens(server: RealServer) -> None:
    text = server.complete(PROMPT, 30)["choices"][0]["text"]
    stop = text[4:7]
    stopped = server.complete(PROMPT, 30, stop=stop)
    assert stopped["choices"][0]["text"] == text[: text.index(stop)]
    assert server.complete(PROMPT, 30, stop=stop, min_tokens=29)["choices"][0]["text"] == text
    min_tokens = stopped["usage"]["completion_tokens"] - 1  # it ends in the token after those
    assert server.complete(PROMPT, 30, stop=stop, min_tokens=min_tokens)["choices"] == stopped["choices"]


def test_the_model_need_not_be_named(server: RealServer) -> None:
    answer = server.post("/v1/completions", **{**GOOD, "model": None})
    assert answer["model"] == "demo-llama"
    assert server.post("/v1/completions", prompt="a", max_tokens=2)["model"] == "demo-llama"


def test_the_token_that_was_chosen_is_among_the_likeliest(server: RealServer) -> None:
    for number in (0, 1):
        choice = server.complete(PROMPT, 8, logprobs=number, temperature=2.0, seed=1)["choices"][0]
        logprobs = choice["logprobs"]
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert token in top and top[token] >= value and number <= len(top) <= number + 1


def test_logprobs_are_of_the_tokens_of_the_text(server: RealServer) -> None:
    choice = server.complete(PROMPT, 12, logprobs=3)["choices"][0]
    actual = choice["logprobs"]
    assert "".join(actual["tokens"]) == choice["text"]
    assert all(value < 0 for value in actual["token_logprobs"])
    for token, value, top in zip(actual["tokens"], actual["token_logprobs"], actual["top_logprobs"], strict=True):
        assert max(top, key=top.__getitem__) == token and top[token] == value  # greedy: the likeliest
    offsets = [choice["text"][at:].startswith(token) for at, token in zip(actual["text_offset"], actual["tokens"])]
    assert all(offsets)
    with server.opened(PROMPT, 12, logprobs=3) as events:
        streamed = [event["choices"][0]["logprobs"] for event in events]
    assert sum((item["token_logprobs"] for item in streamed), []) == actual["token_logprobs"]
    assert sum((item["text_offset"] for item in streamed), []) == actual["text_offset"]


def test_logit_bias_and_min_tokens_hold(server: RealServer) -> None:
    first = server.complete(PROMPT, 1, logprobs=1)["choices"][0]["logprobs"]["tokens"]
    forced = server.complete(PROMPT, 3, logit_bias={"42": 100}, logprobs=1)["choices"][0]["logprobs"]["tokens"]
    assert len(set(forced)) == 1 and forced[0] != first[0]


def test_bad_words_do_not_come(server: RealServer) -> None:
    text = server.complete(PROMPT, 20)["choices"][0]["text"]
    word = text.split()[1]
    assert word in text and word not in server.complete(PROMPT, 20, bad_words=[word])["choices"][0]["text"].split()


def test_models_names_the_model_and_its_limit(server: RealServer) -> None:
    listed = server.get("/v1/models")
    assert [model["id"] for model in listed["data"]] == ["demo-llama"]
    assert listed["data"][0]["max_model_len"] == 256
    assert server.get("/v1/models/demo-llama") == listed["data"][0]
    status, _, data = server.request("GET", "/v1/models/gpt-4")
    assert status == 404 and json.loads(data)["error"]["param"] == "model"


GOOD = {"model": "demo-llama", "prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(("request_id", "header", "expected"), [
    ("a-1", None, "cmpl-a-1"), (None, "b:2", "cmpl-b:2"), ("a-1", "b:2", "cmpl-b:2"), ("a-1", "b 2", "cmpl-a-1"),
    (None, "x" * 129, None),
])  # fmt: skip
def test_who_names_a_request_finds_the_name_in_the_answers_id(
    server: RealServer, request_id: str | None, header: str | None, expected: str | None
) -> None:
    """As in vLLM, X-Request-Id goes before `request_id`."""
    headers = {} if header is None else {"X-Request-Id": header}
    _, _, data = server.request("POST", "/v1/completions", {**GOOD, "request_id": request_id}, headers)
    actual = json.loads(data)["id"]
    assert actual == expected if expected else len(actual) == len("cmpl-") + 24


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({**GOOD, "model": "gpt-4"}, 404, "model", "expected demo-llama, found 'gpt-4'"),
        ({"model": "demo-llama"}, 400, "prompt", "prompt: expected a value, found none"),
        ({**GOOD, "max_tokens": 0}, 400, "max_tokens", "expected 1 to"),
        ({**GOOD, "max_tokens": 256}, 400, "max_tokens", "expected 1 to 25"),
        ({**GOOD, "max_completion_tokens": 256}, 400, "max_completion_tokens", "expected 1 to 25"),
        ({**GOOD, "prompt_embeds": "AAAA"}, 400, "prompt_embeds", "not supported"),
        ({**GOOD, "return_tokens_as_token_ids": True}, 400, "return_tokens_as_token_ids", "not supported"),
        ({**GOOD, "structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, 400, "structured_outputs",
         "expected one of json, json_object, regex, grammar, choice, found disable_any_whitespace, regex"),
        ({**GOOD, "response_format": {}}, 400, "response_format", "found none"),
        ({**GOOD, "prompt": "word " * 300}, 400, "prompt", "expected 1 to 128 tokens, found"),
        ({**GOOD, "prompt": "word " * 100_000}, 400, "prompt", "expected 1 to 128 tokens, found at least"),
        ({**GOOD, "prompt": ""}, 400, "prompt", "expected 1 to 128 tokens, found 0; give it a text"),
        ({**GOOD, "prompt": []}, 400, "prompt", "expected"),
        ({**GOOD, "prompt": {"text": "a"}}, 400, "prompt", "expected text"),
        ({**GOOD, "prompt": [1, 1 << 40]}, 400, "prompt", "expected"),
        ({**GOOD, "prompt": "\ud800"}, 400, "prompt", "expected"),
        ({**GOOD, "temperature": -1}, 400, "temperature", "expected 0 or more"),
        ({**GOOD, "top_p": 0}, 400, "top_p", "expected above 0"),
        ({**GOOD, "n": 5}, 400, "n", "expected 1 to 4"),
        ({**GOOD, "seed": 1 << 64}, 400, "seed", "expected"),
        ({**GOOD, "logprobs": 21}, 400, "logprobs", "expected"),
        ({**GOOD, "stop": ""}, 400, "stop", "not empty"),
        ({**GOOD, "stop": ["a"] * 65}, 400, "stop", "at most 64 words and 4096 characters, found 65 and 65"),
        ({**GOOD, "bad_words": ["a"] * 100_000}, 400, "bad_words", "at most 64 words and 4096 characters"),
        ({**GOOD, "logit_bias": {"99999": 1}}, 400, "logit_bias", "token ids 0 to"),
        ({**GOOD, "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "token ids 0 to"),
        ({**GOOD, "logit_bias": {"": 1}}, 400, "logit_bias", "token ids 0 to"),
        ({**GOOD, "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias", "each token once, found 5 also as '05'"),
        ({**GOOD, "max_token": 3}, 400, "max_token", "max_token: expected max_tokens, found another name"),
        ({**GOOD, "tempertaure": 1}, 400, "tempertaure", "expected temperature"),
        ({**GOOD, "stream_options": {"include_usages": True}}, 400, "stream_options.include_usages",
         "expected stream_options.include_usage"),
        ({**GOOD, "stop_token_ids": [-1]}, 400, "stop_token_ids", "expected"),
        ({**GOOD, "priority": 1 << 70}, 400, "priority", "expected"),
        ({**GOOD, "cache_salt": "a" * 257}, 400, "cache_salt", "expected 0 to 256 characters"),
        ({**GOOD, "min_tokens": 3}, 400, "min_tokens", "expected"),
        ({**GOOD, "allowed_token_ids": [3]}, 400, "allowed_token_ids", "not supported"),
        ({**GOOD, "request_id": "a b"}, 400, "request_id", "1 to 128 visible ASCII characters"),
        ({**GOOD, "logit_bias": {"\u0665": 1}}, 400, "logit_bias", "token ids 0 to"),
        ({**GOOD, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", "got `int`"),
        (b'{"model": "demo-llama", "model": "x"}', 400, "model", "'model' twice"),
        (b'{"temperature": NaN}', 400, None, "NaN"),
        (b'{"temperature": 1e999}', 400, None, "1e999"),
        (b"[" * 100_000, 400, None, "nested too deep"),
        (b"[1, 2]", 400, None, "expected `object`, got `array`"),
        (b"", 400, None, "expected JSON"),
        (b'{"model": "\xff"}', 400, None, "UTF-8"),
        (b'{"model": "demo-llama", "prompt": "a", "n": ' + b"1" * 5000 + b"}", 400, None, "found one of 5000 digits"),
        ('{"model": "demo-llama", "prompt": "a"}'.encode("utf-16"), 400, None, "expected JSON in UTF-8, found"),
        ({**GOOD, "prompt": ["a"] * 133}, 400, "prompt", "132 prompts (128 that wait and 4 that run), found 133"),
    ],
)  # fmt: skip
def test_a_bad_body_is_told_in_one_line(
    server: RealServer, body: Any, status: int, param: str | None, words: str
) -> None:
    actual, headers, data = server.request("POST", "/v1/completions", body)
    error = json.loads(data)["error"]
    assert (actual, error["param"]) == (status, param), error
    assert words in error["message"] and "\n" not in error["message"] and len(error["message"]) < 300
    assert error["type"] == "invalid_request_error" and headers["content-type"] == "application/json"
    assert server.complete("a", 2)["usage"]["completion_tokens"] == 2


# Each is spelled out: an answer for which one was ignored would be misread.
REFUSED = """
    best_of suffix logits_processors logprob_token_ids repetition_detection prompt_logprobs use_beam_search
    length_penalty truncate_prompt_tokens skip_special_tokens include_stop_str_in_output
    guided_json guided_regex guided_grammar guided_choice guided_whitespace_pattern
""".split()
REFUSED_IN_CHATS = "functions function_call audio documents chat_template".split()


@pytest.mark.parametrize(
    ("kind", "names"), [(CompletionBody, REFUSED), (ChatBody, [*REFUSED, *REFUSED_IN_CHATS])], ids=["prompt", "chat"]
)
def test_what_would_change_an_answer_elsewhere_is_refused(kind: type, names: list[str]) -> None:
    for name in names:
        body = json.dumps({"prompt": "a", "messages": [], name: [3]}).encode()
        with pytest.raises(BadRequest, match=f"^{name}: not supported by this server; leave it out$"):
            asyncio.run(decode_body(body, kind))


def test_null_is_as_if_left_out_and_the_unknown_is_ignored(server: RealServer) -> None:
    names = ("stop", "logprobs", "seed", "n", "stream", "logit_bias", "top_p", "stream_options", "echo", "suffix")
    choice = server.complete("a", 4, **dict.fromkeys(names), user="me", something_new={"a": [1]})
    assert choice["choices"] == server.complete("a", 4)["choices"]


# Of OpenAI, vLLM, SGLang, llama.cpp and routers, which clients send to any server.
IGNORED = """
    user metadata store service_tier safety_identifier prompt_cache_key verbosity modalities prediction audio
    reasoning_effort web_search_options parallel_tool_calls detail top_a top_n_sigma typical_p tfs_z mirostat
    xtc_probability dry_multiplier dynatemp_range repeat_penalty repeat_last_n n_predict n_keep n_probs cache_prompt
    id_slot samplers grammar json_schema regex ebnf min_new_tokens max_new_tokens no_stop_trim stop_regex
    separate_reasoning stream_reasoning lora_path session_params return_hidden_states rid documents chat_template
    add_special_tokens include_reasoning spaces_between_special_tokens vllm_xargs kv_transfer_params
    return_token_ids mm_processor_kwargs truncation_side use_cache provider models transforms route plugins
    num_ctx keep_alive format raw system images template context think options hidden_states_to_return
""".split()


def test_a_name_that_others_know_is_no_slip(server: RealServer) -> None:
    """Each body is accepted, or rejected for its own fault, not for a similar field's."""
    for kind in (CompletionBody, ChatBody):
        fields = (*kind.__struct_fields__, *kind.UNSUPPORTED)
        for name, field in itertools.product({*IGNORED} - {*fields}, fields):
            assert not is_near(name, field), (name, field)
    assert is_near("max_token", "max_tokens") and not is_near("maxtoken", "max_tokens") and not is_near("m", "n")
    assert server.complete("a", 2, **dict.fromkeys(IGNORED))["choices"]


def test_another_path_or_method_is_told_as_json(server: RealServer) -> None:
    for method, path, expected in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 405)):
        status, headers, data = server.request(method, path)
        assert status == expected and json.loads(data)["error"]["message"]
        assert status != 405 or headers["allow"]
    assert server.request("POST", "/v1/completions/", GOOD)[0] == 404  # no redirect
    for method, path, expected in (("GET", "/v2/nothing", 404), ("PUT", "/v2", 405)):
        status, headers, data = server.request(method, path)
        assert status == expected and isinstance(json.loads(data)["error"], str)


def test_a_server_without_the_option_takes_no_weights(server: RealServer) -> None:
    status, _, data = server.request("POST", "/update_weights", {"path": "tuned"})
    assert status == 403 and "expected a server with --allow-weight-updates" in json.loads(data)["error"]["message"]


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(server: RealServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 104857600\r\n\r\n{")
        answer = b""
        while b"}}" not in answer and (data := client.recv(4096)):
            answer += data
    assert answer.startswith(b"HTTP/1.1 413") and b"expected at most 4194304 bytes, found 104857600" in answer


def test_a_body_in_chunks_without_end_is_cut_off(server: RealServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                client.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_clean_http_is_refused_and_nothing_else_suffers(server: RealServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(head + b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := client.recv(65536):
                answer += data
    assert answer.count(b"HTTP/1.1 ") <= 1 and (not answer or answer.startswith(b"HTTP/1.1 4")), answer[:200]
    assert server.get("/health/ready")["ready"]
    assert "Invalid HTTP" not in server.stderr


def raw(server: RealServer, data: bytes) -> bytes:
    """All that a connection gives until the server ends it."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_request_without_a_host_or_with_two_is_told_why(server: RealServer) -> None:
    assert b"host: expected one line of the head, found none" in raw(server, b"GET /health HTTP/1.1\r\n\r\n")
    twice = b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
    assert b"host: expected one line of the head, found 2" in raw(server, twice)
    assert b" 200 OK" in raw(server, b"GET /health HTTP/1.0\r\n\r\n")


def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(server: RealServer) -> None:
    body = json.dumps({**GOOD, "stream": True, "temperature": 0}).encode()
    head, _, events = raw(
        server, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    ).partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"connection: close" in head
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n") if line)


@pytest.mark.parametrize("line", ["POST /v1/nothing", "PUT /v1/completions", "POST /v1/completions"])
def test_an_answer_before_the_body_is_there_ends_the_connection(server: RealServer, line: str) -> None:
    answer = raw(server, f"{line} HTTP/1.1\r\nHost: a\r\nContent-Length: 104857600\r\n\r\nabc".encode())
    assert answer.startswith(b"HTTP/1.1 4") and b"connection: close" in answer
    assert not answer.startswith(b"HTTP/1.1 408"), "it did not wait for the body"


def test_http_1_0_and_kept_connections_are_served(server: RealServer) -> None:
    body = json.dumps(GOOD).encode()
    answer = raw(server, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert b" 200 OK" in answer and b'"text_completion"' in answer
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    sockets = set()
    for _ in range(3):
        connection.request("POST", "/v1/completions", body)
        answered = connection.getresponse()
        assert answered.status == 200 and json.loads(answered.read())["choices"]
        sockets.add(connection.sock)
    assert len(sockets) == 1
    connection.close()


def test_a_page_of_another_site_cannot_use_the_server(server: RealServer) -> None:
    status, _, data = server.request("POST", "/v1/completions", GOOD, {"Origin": "https://evil.example"})
    assert status == 403 and "evil.example" in json.loads(data)["error"]["message"]
    assert server.request("POST", "/v1/completions", GOOD, {"Origin": server.url})[0] == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [("evil.example:8000", 403), ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("LOCALHOST", 200)],
)
def test_a_name_that_points_here_is_no_name_of_a_local_server(server: RealServer, host: str, expected: int) -> None:
    """DNS rebinding: a page whose name is made to point to 127.0.0.1 has Host and Origin alike."""
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert server.request("POST", "/v1/completions", GOOD, headers)[0] == expected
    assert server.request("POST", "/v1/completions", GOOD, {"Host": host})[0] == 200  # no browser
    # Such a page reads from "its own" site, without an Origin.
    for path in ("/v1/models", "/tokenizer_info", "/metrics", "/status", "/v2", "/v2/models/ensemble/config"):
        status, _, data = server.request("GET", path, headers={"Host": host})
        assert status == expected, (path, data)
    assert server.request("GET", "/health", headers={"Host": host})[0] == 200  # which tells nothing


def test_a_compressed_body_is_refused(server: RealServer) -> None:
    status, _, answer = server.request("POST", "/v1/completions", b"abc", {"Content-Encoding": "gzip"})
    assert status == 415 and "found 'gzip'" in json.loads(answer)["error"]["message"]


def test_metrics_count_what_was_asked_and_made(server: RealServer) -> None:
    before = numbers(server)
    server.complete("a b c", 6)
    after = numbers(server)
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)}
    assert grown["lockstep:generation_tokens_total"] == 6
    assert grown["lockstep:time_to_first_token_seconds_count"] == 1
    assert grown["lockstep:inter_token_latency_seconds_count"] == 5
    assert grown["lockstep:e2e_request_latency_seconds_count"] == 1
    assert grown['lockstep:request_success_total{finished_reason="length"}'] == 1
    assert after["lockstep:kv_cache_usage_perc"] == 0 and after["lockstep:engine_up"] == 1


def test_what_schedulers_ask_of_a_server(server: RealServer) -> None:
    assert server.get("/version") == {"version": lockstep.__version__}
    assert [server.request(method, "/ping")[::2] for method in ("GET", "POST")] == [(200, b"")] * 2
    pages = server.get("/status")["pages"]["total"]
    series = f'lockstep:cache_config_info{{block_size="64",num_gpu_blocks="{pages}"}}'
    (name,) = [name for name in numbers(server) if "cache_config" in name]
    assert name.replace("{,", "{") == series and numbers(server)[name] == 1
    assert not [name for name in numbers(server) if "lora" in name]


def test_a_request_that_is_refused_is_in_no_series(server: RealServer) -> None:
    before = numbers(server)
    status, _, data = server.request("POST", "/v1/completions", {**GOOD, "structured_outputs": {"grammar": "start: ("}})
    assert (status, json.loads(data)["error"]["code"]) == (400, "invalid_grammar")
    after = numbers(server)
    # Gauges of requests come with the engine's last step, which may be one of an earlier test.
    changed = {name for name in after if after[name] != before.get(name, 0)}
    assert not {name for name in changed if "_created" not in name and "num_requests_" not in name}


def test_the_dashboard_asks_for_the_series_that_there_are(server: RealServer) -> None:
    dashboard = json.loads((ROOT / "resources" / "grafana" / "lockstep.json").read_text(encoding="utf-8"))
    expressions = [item["definition"] for item in dashboard["templating"]["list"] if "definition" in item]
    for panel in dashboard["panels"]:
        expressions += [target["expr"] for target in panel["targets"]]
    series = set()
    for query in expressions:
        matches = re.findall(r"([a-zA-Z_:][\w:]*)(?=\{)|label_values\((\S+),", query.replace("${prefix}", "lockstep"))
        assert matches, query
        series |= {name or of_label for name, of_label in matches}
    server.complete("a", 1)  # a reason of an end is there once there was one
    exported = {name.partition("{")[0] for name in numbers(server)}
    assert series <= exported
    # and none is forgotten
    assert {name for name in exported if not name.endswith(("_created", "_sum", "_count", "_info"))} == series


def numbers(server: RealServer) -> dict[str, float]:
    """The series of /metrics, without the model's name."""
    results = {}
    for line in server.request("GET", "/metrics")[2].decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(,?)model_name="demo-llama"', "", name).replace("{}", "").replace(",}", "}")
            results[name] = float(value)
    return results
