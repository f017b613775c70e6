"""Answers that follow a grammar: of the engine and of `lockstep serve`, with the real llguidance on the demo's
tokenizer. Schemas here have no free whitespace, so that each answer ends."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_family import NAME, build_family
from engine_steps import open_model

from lockstep.errors import InputError
from lockstep.runtime import Engine, Model, ModelOptions, Request, Sampling, Tokenizer
from lockstep.runtime.grammar import Grammar, compiler, trial
from lockstep.runtime.grammar.compiler import Compiler
from lockstep.runtime.grammar.trial import TrialProcess
from lockstep.runtime.tokenizer import tokenizer_path
from lockstep.step.logits_pipeline import Sampler
from lockstep.targets import Results
from lockstep_serve.bodies import BadRequest
from lockstep_serve.grammar import grammar_of
from lockstep_serve.openai import CompletionBody
from real_server import RealServer, make_tree

PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# Each of these patterns doubles what llguidance has to look through: it takes minutes.
SLOW = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 26)) + "\n"
# Compiled by functions that call themselves: without a trial this ends the process with SIGSEGV.
DEEP = "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x"' for i in range(9000)), 'r9000: "y"'])


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "ages"]
        and isinstance(value["name"], str)
        and value["kind"] in ("cat", "dog")
        and len(value["ages"]) <= 3
        and all(type(age) is int and 0 <= age < 100 for age in value["ages"])
    )


@pytest.fixture(scope="module")
def assembly(demo: Results) -> Path:
    return demo.assembly("demo-llama", "fp32")


@pytest.fixture(scope="module")
def model(demo: Results) -> Model:
    return open_model(demo)


@pytest.fixture(scope="module")
def tokenizer(assembly: Path) -> Tokenizer:
    return Tokenizer.open(assembly)


@pytest.fixture(scope="module")
def grammars(model: Model, assembly: Path) -> Compiler:
    return Compiler(assembly, model.vocab_size, model.eos_token_ids)


def answers(engine: Engine, requests: list[Request]) -> dict[tuple[int, int], tuple[list[int], str | None]]:
    """Tokens, and why they end, by request and choice."""
    results: dict[tuple[int, int], tuple[list[int], str | None]] = {}
    for output in engine.run(requests):
        tokens, _ = results.get((output.request, output.choice), ([], None))
        results[output.request, output.choice] = [*tokens, output.token], output.finish
    engine.scheduler.check()
    return results


def request(model: Model, tokenizer: Tokenizer, grammar: Grammar | None, **options: Any) -> Request:
    stop_ids = options.pop("stop_ids", frozenset(model.eos_token_ids))
    return Request(
        tokenizer.encode(PROMPT), options.pop("max_new_tokens", 150), None, stop_ids, grammar=grammar, **options
    )


def test_json_of_any_shape_and_a_grammar_of_rules(model: Model, tokenizer: Tokenizer, grammars: Compiler) -> None:
    rules = 'start: "yes " (NUMBER | "no"){2,3}\nNUMBER: /[0-9]{3}/\n'
    requests = [
        request(model, tokenizer, Grammar("json_object"), sampling=Sampling(1.0, seed=seed)) for seed in range(4)
    ] + [request(model, tokenizer, Grammar("lark", rules), sampling=Sampling(1.0, seed=seed)) for seed in range(4)]
    actual = answers(Engine(model, grammars={"": grammars}), requests)
    for number in range(4):
        tokens, end = actual[number, 0]
        assert end != "error" and (end == "max_new_tokens" or isinstance(json.loads(tokenizer.decode(tokens)), dict))
    for number in range(4, 8):
        assert re.fullmatch("yes ([0-9]{3}|no){2,3}", tokenizer.decode(actual[number, 0][0]))


def test_other_requests_of_a_step_keep_their_bits(model: Model, tokenizer: Tokenizer, grammars: Compiler) -> None:
    plain = [Request(tokenizer.encode(text), 40, lambda logits: int(logits.argmax())) for text in (PROMPT, "The")]

    def run(*arguments: Request) -> list[tuple[list[int], np.ndarray]]:
        results: dict[int, tuple[list[int], list[Any]]] = {}
        for output in Engine(model, prefix_caching=False, grammars={"": grammars}).run([*plain, *arguments]):
            tokens, logits = results.setdefault(output.request, ([], []))
            tokens.append(output.token)
            logits.append(output.logits)
        return [(results[number][0], np.array(results[number][1])) for number in range(len(plain))]

    alone = run()
    beside = run(
        request(model, tokenizer, Grammar("json_schema", json.dumps(SCHEMA)), sampling=Sampling(1.0, seed=1)),
        request(model, tokenizer, Grammar("regex", "[ab]{30}")),
    )
    for (tokens, logits), (expected_tokens, expected) in zip(beside, alone, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_array_equal(logits, expected)


def test_an_end_token_that_is_text_waits_for_the_grammar_and_a_stop_token_does_not(
    model: Model, tokenizer: Tokenizer, assembly: Path, grammars: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "string", "minLength": 20, "maxLength": 20}))
    ((text, _),) = answers(Engine(model, grammars={"": grammars}), [request(model, tokenizer, grammar)]).values()
    in_string = frozenset(text[2:-3])
    stop_ids = frozenset(model.eos_token_ids) | in_string
    constrained = request(model, tokenizer, grammar, stop_ids=stop_ids)
    ((tokens, finish),) = answers(Engine(model, grammars={"": grammars}), [constrained]).values()
    assert (tokens, finish) == (text[: len(tokens)], "stop_id") and tokens[-1] in in_string
    monkeypatch.setattr(model.checkpoints[""], "eos_token_ids", tuple(sorted(stop_ids)))
    own_grammars = Compiler(assembly, model.vocab_size, model.eos_token_ids)
    ((tokens, finish),) = answers(Engine(model, grammars={"": own_grammars}), [constrained]).values()
    assert len(json.loads(tokenizer.text(tokens))) == 20 and not in_string & set(tokens) and finish != "max_new_tokens"


def test_a_checkpoint_with_an_end_token_beyond_its_vocabulary_takes_grammars(tmp_path: Path) -> None:
    """Every guided request was refused for what tokenizer.json lacks."""
    build_family(tmp_path, "llama", "fp32", eos_token_id=[2, 99999])
    results = Results(tmp_path / "results")
    assembly = results.assembly(NAME, "fp32")
    engines = results.engines(NAME, "fp32", "onnxruntime")
    model = Model.open(
        engines, assembly, results.weights(NAME, "fp32"), options=ModelOptions(max_batch_size=1, max_seq_len=64)
    )
    grammars = Compiler(assembly, model.vocab_size, model.eos_token_ids)
    tokenizer = Tokenizer.open(assembly)
    constrained = request(model, tokenizer, Grammar("regex", "[ab]{5}"), max_new_tokens=40)
    ((tokens, finish),) = answers(Engine(model, grammars={"": grammars}), [constrained]).values()
    assert re.fullmatch("[ab]{5}", tokenizer.decode(tokens)) and finish in ("stop_id", "grammar_end")


def test_choices_follow_the_grammar_each_for_itself(model: Model, tokenizer: Tokenizer, grammars: Compiler) -> None:
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    choices = answers(
        Engine(model, grammars={"": grammars}), [request(model, tokenizer, schema, n=4, sampling=Sampling(1.0, seed=3))]
    )
    texts = [tokenizer.decode(choices[0, choice][0]) for choice in range(4)]
    assert all(map(follows_schema, texts)) and len(set(texts)) == 4


def test_an_answer_goes_on_where_it_was_interrupted(model: Model, tokenizer: Tokenizer, grammars: Compiler) -> None:
    full = request(
        model, tokenizer, Grammar("json_schema", json.dumps(SCHEMA)), sampling=Sampling(1.0, seed=5, logprobs=0)
    )
    tokens, end = answers(Engine(model, grammars={"": grammars}), [full])[0, 0]
    for cut in (1, len(tokens) // 2, len(tokens) - 1):
        resumed = request(model, tokenizer, full.grammar, sampling=full.sampling, answer_ids=tokens[:cut])
        assert answers(Engine(model, grammars={"": grammars}), [resumed])[0, 0] == (tokens[cut:], end)
    wrong = request(model, tokenizer, full.grammar, answer_ids=tokens[1:3])
    with pytest.raises(InputError, match="^grammar: expected answer_ids that the grammar allows"):
        answers(Engine(model, grammars={"": grammars}), [wrong])


def test_lists_do_not_count_where_they_leave_nothing_of_the_grammar() -> None:
    allowed = np.array([False, True, True, False])
    logits = np.array([5.0, 1.0, 2.0, 9.0], np.float32)
    for sampling in (Sampling(), Sampling(1.0, seed=1), Sampling(2.0, top_k=1), Sampling(1.0, top_p=0.1)):
        assert Sampler(sampling)(logits, 0, allowed).token in (1, 2)
    assert Sampler(Sampling(logit_bias={1: 5.0, 0: 99.0}))(logits, 0, allowed).token == 1
    assert Sampler(Sampling(bad_words=((2,),)))(logits, 0, allowed).token == 1
    assert Sampler(Sampling(bad_words=((1,), (2,))))(logits, 0, allowed).token == 2
    assert Sampler(Sampling(logprobs=1))(logits, 0, allowed).logprobs.top[0][0] == 3  # of the model's own logits


@pytest.fixture
def end_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that compile are ended with the test: one that goes on takes a CPU from the tests after it."""
    trials: list[TrialProcess] = []

    class Noted(TrialProcess):
        def __init__(self, *terms: Any):
            super().__init__(*terms)
            trials.append(self)

    monkeypatch.setattr(compiler, "TrialProcess", Noted)
    yield
    for started in trials:
        if started.process is not None:
            started.process.kill()  # the thread that waits for it does the rest


def test_a_grammar_is_compiled_once_and_steps_go_before_it(
    model: Model, tokenizer: Tokenizer, assembly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []

    def noted(*arguments: Any) -> Any:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return trial.compiled(*arguments)

    monkeypatch.setattr(compiler, "compiled", noted)
    grammars = Compiler(assembly, model.vocab_size, model.eos_token_ids)
    texts = set()
    for seed in range(3):
        schema = Grammar("json_schema", json.dumps(SCHEMA), name=f"of request {seed}")
        constrained = request(model, tokenizer, schema, sampling=Sampling(1.0, seed=seed))
        ((tokens, _),) = answers(Engine(model, grammars={"": grammars}), [constrained]).values()
        texts.add(tokenizer.decode(tokens))
    assert len(texts) == 3 and all(map(follows_schema, texts))
    assert niceness == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)]


def test_a_grammar_has_cpu_seconds_however_busy_the_machine_is(model: Model, assembly: Path) -> None:
    """A grammar's limit is CPU time: a compiler that gets no CPU, here one that is stopped, does not reach it."""
    tried = TrialProcess(tokenizer_path(assembly).read_text(), model.vocab_size, model.eos_token_ids)
    tried.check("lark", 'start: "a"', 1)
    assert tried.process is not None
    tried.process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(1, tried.process.send_signal, [signal.SIGCONT])
    goes_on.start()
    try:
        tried.check("lark", 'start: "b"', 0.5)
        with pytest.raises(trial.Refusal, match=r"compiles within 0\.5 s"):
            tried.check("lark", SLOW, 0.5)
    finally:
        goes_on.join()
        tried.close()


@pytest.mark.usefixtures("end_trials")
def test_a_grammar_waits_without_a_slot_and_can_be_aborted(model: Model, tokenizer: Tokenizer, assembly: Path) -> None:
    engine = Engine(model, grammars={"": Compiler(assembly, model.vocab_size, model.eos_token_ids, seconds=60)})
    slow = [engine.add(request(model, tokenizer, Grammar("lark", SLOW))) for _ in range(3)]
    plain = [engine.add(request(model, tokenizer, None, max_new_tokens=8)) for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < 4 * 8 and engine.has_work:
        tokens += [token.request for token in engine.step()]
        assert engine.scheduler.num_running <= 4
    assert set(tokens) == set(plain)  # all four slots were theirs
    assert engine.scheduler.num_waiting == 3 and engine.has_work
    for number in slow:
        assert engine.abort(number)
    assert not engine.has_work and not engine.scheduler.num_waiting
    engine.scheduler.check()


def test_a_grammar_without_llguidance_says_which_extra(
    model: Model, tokenizer: Tokenizer, assembly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine(model, grammars={"": Compiler(assembly, model.vocab_size, model.eos_token_ids)})
    with pytest.raises(
        InputError, match=r"^grammar: expected the Python package 'llguidance'.*pip install \"\.\[grammar\]\""
    ):
        answers(engine, [request(model, tokenizer, Grammar("regex", "a"))])
    with pytest.raises(InputError, match="^grammar: expected an engine that was opened with grammars"):
        Engine(model).add(request(model, tokenizer, Grammar("regex", "a")))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Grammar("json_schema", "{}")),
        ({"structured_outputs": {"json": '{"a": 1}'}}, Grammar("json_schema", '{"a": 1}')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("lark", "start: A")),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, Grammar("lark", 'start: "a" | "b\\""')),
        ({"structured_outputs": {"json": True, "regex": None}}, Grammar("json_schema", "true")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)
def test_all_spellings_of_a_form(fields: dict[str, Any], expected: Grammar | None) -> None:
    assert grammar_of(CompletionBody(model="m", prompt="p", **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, "response_format: expected type text, json_object or json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format: expected type text, .* found 'xml'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format: expected a schema in"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs: expected a JSON schema, found Expecting"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs: expected a JSON schema, found another"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs: expected text"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs: expected text in UTF-8"),
        (
            {"structured_outputs": {"regex": "a" * (1 << 19)}},
            "structured_outputs: expected at most 262144 characters, found 524288",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: expected a list of texts"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: expected one of .* json, regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs: expected one constraint",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=f"^{message}") as caught:
        grammar_of(CompletionBody(model="m", prompt="p", **fields))
    assert caught.value.param == message.partition(":")[0]


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(make_tree(tmp_path_factory.mktemp("grammar") / "results", demo), "--grammar-timeout", 1) as server:
        yield server


FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}


def test_a_completion_follows_its_response_format(server: RealServer) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": 1}):
        answer = server.complete(PROMPT, 150, response_format=FORMAT, **options)
        for choice in answer["choices"]:
            assert follows_schema(choice["text"]) and choice["finish_reason"] == "stop"
    with server.opened(PROMPT, 60, structured_outputs={"choice": ["zebra", "zoo"]}) as events:
        assert events.text() in ("zebra", "zoo")
    server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "pet"}}}}, "Invalid type"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"grammar": DEEP}}, "nests too deep"),
        ({"structured_outputs": {"grammar": SLOW}}, "compiles within 1 s"),
    ],
)
def test_a_grammar_that_is_none_is_a_400_and_disturbs_nobody(
    server: RealServer, fields: dict[str, Any], message: str
) -> None:
    before = server.complete("The", 200)
    pid = server.engine_pid
    with server.opened("The", 200) as events:
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.append(events.text()))
        reader.start()
        body = {"model": "demo-llama", "prompt": PROMPT, **fields}
        status, _, data = server.request("POST", "/v1/completions", body)
        reader.join(60)
    error = json.loads(data)["error"]
    (field,) = fields
    assert status == 400 and error["param"] == field and error["code"] == "invalid_grammar"
    assert error["message"].startswith(f"{field}: expected ") and message in error["message"]
    assert texts == [before["choices"][0]["text"]]
    assert server.engine_pid == pid
    assert follows_schema(server.complete(PROMPT, 150, response_format=FORMAT)["choices"][0]["text"])
    server.wait_idle()


@pytest.mark.long
def test_a_killed_engine_goes_on_in_the_grammar(server: RealServer) -> None:
    regex = "[a-z ]{120}END"
    options = {"structured_outputs": {"regex": regex}, "temperature": 1.0, "seed": 11}
    full = server.complete(PROMPT, 200, **options)["choices"][0]
    assert re.fullmatch(regex, full["text"])
    restarts = server.get("/status")["restarts"]
    with server.opened(PROMPT, 200, **options) as events:
        first = next(iter(events))
        os.kill(server.engine_pid, signal.SIGKILL)
        text = first["choices"][0]["text"] + events.text()
    assert text == full["text"] and server.get("/status")["restarts"] == restarts + 1
    server.wait_idle()


def test_a_grammar_that_becomes_too_complex_is_the_request_s_fault(server: RealServer) -> None:
    """llguidance takes that many choices, and gives up at the first token: to ask again would be of no use."""
    body = {"model": "demo-llama", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    body["structured_outputs"] = {"choice": [f"0.123456789 {number}" for number in range(2000)]}
    status, _, data = server.request("POST", "/v1/completions", body)
    error = json.loads(data)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "structured_outputs"), error
    assert "too complex; simplify it" in error["message"] and error["code"] == "grammar_error"
    server.wait_idle()


def test_a_json_object_with_a_schema_has_it() -> None:
    """As others take it; the schema was dropped without a word."""
    body = CompletionBody(prompt="", response_format={"type": "json_object", "schema": SCHEMA})
    grammar = grammar_of(body)
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.text) == SCHEMA
    plain = CompletionBody(prompt="", response_format={"type": "json_object", "schema": None})
    assert grammar_of(plain) == Grammar("json_object")
    wrong = CompletionBody(prompt="", response_format={"type": "json_object", "json_schema": {"schema": SCHEMA}})
    with pytest.raises(BadRequest, match="expected type json_schema with json_schema"):
        grammar_of(wrong)


@pytest.mark.parametrize(
    ("grammar", "max_spaces"),
    [
        (Grammar("json_object"), 64),
        (Grammar("json_schema", "true"), 64),
        (Grammar("json_schema", '{"type": "object", "x-guidance": {"coerce_one_of": true}}'), 64),
        (Grammar("json_schema", '{"type": "object", "x-guidance": {"whitespace_pattern": "[ ]{1,3}"}}'), 3),
    ],
)
def test_white_space_between_parts_of_json_ends(
    model: Model, tokenizer: Tokenizer, grammars: Compiler, grammar: Grammar, max_spaces: int
) -> None:
    """A model that would go on with spaces for ever closes its object."""
    liked = {tokenizer.encode(text, special=False).item(): 1e6 for text in (" ", "{")}
    greedy = Sampling(logit_bias=liked)
    constrained = request(model, tokenizer, grammar, sampling=greedy, max_new_tokens=200)
    ((tokens, _),) = answers(Engine(model, grammars={"": grammars}), [constrained]).values()
    match = re.match("{( *)", tokenizer.decode(tokens))
    assert match is not None and len(match[1]) == max_spaces
