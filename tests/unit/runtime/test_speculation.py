"""Drafts decide how many steps an answer takes and nothing else: tokens, logits and log-probabilities are those of
plain decoding, to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from engine_steps import argmax, ids, open_model

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.places import FileEntry
from lockstep.cli.main import main as cli
from lockstep.errors import InputError
from lockstep.runtime import Engine, Model, Request, Sampling, Tokenizer, scheduler
from lockstep.runtime.active_choice import ActiveChoice
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.drafts import NgramDrafter, Speculation
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.compiler import Compiler
from lockstep.runtime.speculative import Speculative, open_speculation, parse
from lockstep.step.advance import Advance
from lockstep.targets import Results
from lockstep.verify.golden.drafted import RecordedDrafter
from real_server import RealServer, make_tree
from some import some

Answers = dict[tuple[int, int], list[tuple]]


def recorded(answers: Answers, wrong_each: int) -> RecordedDrafter:
    return RecordedDrafter(tokens_of(answers), wrong_each)


def tokens_of(answers: Answers) -> dict[tuple[int, int], list[int]]:
    tokens = {}
    for key, answer in answers.items():
        tokens[key] = [token for token, *_ in answer]
    return tokens


def run(engine: Engine, *requests: Request) -> Answers:
    """Token, why it is the last, and its logits or log-probabilities, by request and choice."""
    results: Answers = {}
    engine.add_all(requests)
    while engine.has_work:
        for output in engine.step():
            logits = None if output.logits is None else output.logits.tobytes()
            results.setdefault((output.request, output.choice), []).append(
                (output.token, output.finish, output.logprobs, logits)
            )
    engine.scheduler.check()
    return results


@pytest.fixture(scope="module")
def model(demo: Results) -> Model:
    return open_model(demo)


SAMPLINGS = (
    Sampling(),
    Sampling(0.8, seed=5),
    Sampling(1.0, top_k=30, top_p=0.9, min_p=0.01, seed=6),
    Sampling(0.8, seed=5, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logprobs=3),
    Sampling(logprobs=2, logit_bias={7: 2.0}, min_tokens=5, bad_words=((9, 11),)),
)


def repeating(seed: int, length: int = 40) -> np.ndarray:
    return np.resize(ids(9, seed), length)


@pytest.mark.parametrize(("precision", "errors"), some([("fp32", (1, 10**9)), ("fp16", (3,))]))
def test_an_answer_is_the_plain_one_to_the_bit(demo: Results, precision: str, errors: Sequence[int]) -> None:
    """At all lengths up to the window, in all slots and more, together with prompts that come and go."""
    model = open_model(demo, precision, max_seq_len=144)
    requests = [
        *(Request(repeating(seed, 20 + 13 * seed), 50, sampling=item) for seed, item in enumerate(SAMPLINGS)),
        Request(repeating(8), 70, argmax),
        Request(repeating(9), 300),  # ends with the window
        Request(repeating(7), 50, sampling=Sampling(1.0, seed=3), n=3),
    ]
    plain = run(Engine(model), *requests)
    assert plain[6, 0][-1][1] == "max_seq_len"
    for wrong in errors:
        speculation = Speculation(recorded(plain, wrong), 5)
        assert run(Engine(model, speculation=speculation), *requests) == plain
        assert speculation.num_drafts and bool(sum(speculation.accepted)) is (wrong > 1)
        if wrong == 10**9:
            assert sum(speculation.accepted) == speculation.num_draft_tokens


def test_the_cache_holds_what_plain_steps_leave_there(model: Model) -> None:
    """Whatever a rejected token has left; at the lengths where a row is full, and where it grows."""
    tokens = ids(200)
    cache = model.executor.cache
    model.step([Advance(0, tokens[:50], 0)])
    plain = [model.step([Advance(0, tokens[at : at + 1], at)])[0] for at in range(50, 200)]
    copied = cache.copy_out(0, 0, 256)
    model.step([Advance(1, tokens[:50], 0)])
    random = np.random.default_rng(0)
    at = 50
    while at < 200:
        count = min(1 + int(random.integers(1, 7)), 200 - at, 1 + model.room(at + 1))
        right = int(random.integers(1, count + 1))
        draft = np.concatenate([tokens[at : at + right], ids(count - right, at)])
        actual = model.step([Advance(1, draft, at, verifies=count > 1)])
        np.testing.assert_array_equal(actual[:right], plain[at - 50 : at - 50 + right])
        at += right
        model.keep(1, at)
    for first, other in zip(cache.copy_out(1, 0, 256), copied):
        np.testing.assert_array_equal(first, other)
    for slot in (0, 1):
        model.release(slot)


def test_ngrams_draft_what_followed_before() -> None:
    drafter = NgramDrafter()
    choice = ActiveChoice(0, 0, Request([1], 9), np.array([5, 6, 7, 8, 5, 6]), None, scheduler.Scheduled(6, 20), ())
    assert drafter.propose({choice: 3}) == {choice: [7, 8, 5]}
    choice.answer += [7]
    assert drafter.propose({choice: 6}) == {choice: [8, 5, 6, 7, 8, 5]}  # and what repeats itself goes on
    choice.answer += [9]
    assert drafter.propose({choice: 3}) == {}


def test_the_same_layers_draft_what_is_accepted_and_a_cut_shares_them(demo: Results, model: Model) -> None:
    requests = [Request(repeating(seed, 150), 40, sampling=item) for seed, item in enumerate(SAMPLINGS[1:4])]
    plain = run(Engine(model), *requests)
    for layers, min_share in (("all", 0.8), (2, 0.05)):
        draft = open_model(demo, layers=layers, cut_of=model, chunk_size=64)
        assert draft.executor.networks[0].layers[0] is model.executor.networks[0].layers[0]
        speculation = Speculation(ModelDrafter(draft), 4)
        assert run(Engine(model, speculation=speculation), *requests) == plain
        assert sum(speculation.accepted) >= min_share * speculation.num_draft_tokens, speculation.counts()
        assert [draft.length(slot) for slot in range(4)] == [0] * 4


def test_drafts_that_are_wrong_become_rare(model: Model) -> None:
    request = Request(repeating(1), 200)
    plain = run(Engine(model), request)
    speculation = Speculation(recorded(plain, 1), 4)
    assert run(Engine(model, speculation=speculation), request) == plain
    assert 3 < speculation.num_drafts < 14 and speculation.num_draft_tokens < 18


def test_drafts_delay_no_prompt_and_leave_room_for_each_request(model: Model) -> None:
    requests = [Request(repeating(seed), 30) for seed in range(4)]
    speculation = Speculation(recorded(run(Engine(model), *requests), 10**9), 16)
    engine = Engine(model, speculation=speculation)
    sizes = []
    step = model.step_tokens

    def noted(advances: Sequence[Advance], *arguments: object) -> np.ndarray:
        sizes.append([len(advance.tokens) for advance in advances])
        return step(advances)

    with mock.patch.object(model, "step_tokens", noted):  # deletes it at the end: other tests have this model
        engine.add_all(requests[:2])
        engine.step()
        engine.step()
        engine.add_all(requests[2:])
        while engine.has_work:
            engine.step()
    assert sizes[1:4] == [[5, 5], [1, 1, 40, 40], [3, 3, 3, 3]]


def test_a_stop_string_ends_an_answer_inside_a_draft(demo: Results, model: Model) -> None:
    tokenizer = Tokenizer.open(demo.assembly("demo-llama", "fp32"))
    prompt = "San Francisco is a"
    (plain,) = Engine(model).generate([prompt], tokenizer, max_new_tokens=40)
    answers = {(0, 0): [(token,) for token in plain.choices[0].token_ids]}
    ends = set()
    for start in range(3, 20):
        stop = [plain.choices[0].text[start : start + 3]]
        expected = Engine(model).generate([prompt], tokenizer, max_new_tokens=40, stop=stop)
        engine = Engine(model, speculation=Speculation(recorded(answers, 10**9), 7))
        assert engine.generate([prompt], tokenizer, max_new_tokens=40, stop=stop) == expected
        ends.add(len(expected[0].choices[0].token_ids) % 8)
    assert len(ends) > 3  # at many places of a draft


def test_a_grammar_holds_with_drafts_that_break_it(demo: Results, model: Model) -> None:
    assembly = demo.assembly("demo-llama", "fp32")
    grammars = Compiler(assembly, model.vocab_size, model.eos_token_ids)
    tokenizer = Tokenizer.open(assembly)
    grammar = Grammar("regex", r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]")
    requests = [
        Request(tokenizer.encode("On"), 40, None, frozenset(model.eos_token_ids), Sampling(t, seed=4), grammar=grammar)
        for t in (0.0, 1.0)
    ]
    plain = run(Engine(model, grammars={"": grammars}), *requests)
    for wrong in (2, 10**9):
        engine = Engine(model, grammars={"": grammars}, speculation=Speculation(recorded(plain, wrong), 4))
        assert run(engine, *requests) == plain


@pytest.mark.long
def test_swapped_requests_keep_their_bits(demo: Results, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 16)
    requests = [Request(ids(60, seed), 100, argmax) for seed in range(4)]
    plain = run(Engine(model), *requests)
    tight = open_model(demo, kv_bytes=9 * model.tables.pool.page_nbytes)
    for drafter in (recorded(plain, 4), ModelDrafter(open_model(demo, layers=2, cut_of=tight))):
        engine = Engine(tight, admission="optimistic", speculation=Speculation(drafter, 5))
        assert run(engine, *requests) == plain
        assert engine.scheduler.num_swaps
    tight.tables.pool.check()


def test_an_abort_inside_a_draft_ends_the_choice_and_no_other(model: Model) -> None:
    requests = [Request(repeating(seed), 40, sampling=Sampling(1.0, seed=seed), n=2) for seed in range(2)]
    plain = run(Engine(model), *requests)
    engine = Engine(model, speculation=Speculation(recorded(plain, 10**9), 7))
    actual: dict[tuple[int, int], list[int]] = {}
    for output in engine.run(requests):
        answer = actual.setdefault((output.request, output.choice), [])
        answer.append(output.token)
        if (output.request, output.choice) == (0, 1) and len(answer) == 13:
            engine.abort(0, 1)
    expected = tokens_of(plain)
    assert actual == {**expected, (0, 1): expected[0, 1][:13]}
    engine.scheduler.check()
    assert [model.length(slot) for slot in range(4)] == [0] * 4


def test_rejected_tokens_are_in_no_prefix(model: Model) -> None:
    """A prompt that continues with rejected tokens reuses only its own chunks, and has the same bits."""
    first = Request(repeating(3, 60), 40)
    plain = run(Engine(model), first)
    pool = model.tables.pool
    pool.forget()
    engine = Engine(model, speculation=Speculation(recorded(plain, 3), 5))
    assert run(engine, first) == plain
    assert pool.num_cached == 0  # 60 tokens are no chunk, and answers are in none
    wrong = [(entry[0] + 1) % 500 for entry in plain[0, 0]]
    second = Request([*first.prompt_ids.tolist(), *wrong], 8, argmax)
    actual = run(engine, second)
    assert list(actual.values()) == list(run(Engine(model, prefix_caching=False), second).values())


def test_streams_go_on_plain_when_the_draft_model_dies(demo: Results, model: Model) -> None:
    class Dying(ModelDrafter):
        steps_left = 3

        def propose(self, requests):  # type: ignore[no-untyped-def]  # as its base does
            self.steps_left -= 1
            if not self.steps_left:
                raise RuntimeError("out of\nmemory")
            return super().propose(requests)

    requests = [Request(repeating(seed), 30, sampling=item) for seed, item in enumerate(SAMPLINGS[:3])]
    speculation = Speculation(Dying(open_model(demo, cut_of=model)), 4)
    assert run(Engine(model, speculation=speculation), *requests) == run(Engine(model), *requests)
    assert speculation.num_drafts and speculation.failure == "drafts: out of memory; decoding goes on without"


@pytest.mark.parametrize("text", ["ngram", "ngram:", "ngram:-1", "draft=:4", "draft:4", "eagle:3", "ngram=x:4", ""])
def test_what_is_no_speculation_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^speculative: expected ngram:4, or draft=TARGET:4"):
        parse(text)


@pytest.mark.parametrize("count", [0, 17, 100])
def test_a_draft_has_1_to_16_tokens(count: int) -> None:
    with pytest.raises(InputError, match=f"^speculative: expected 1 to 16 tokens of a draft, found {count}$"):
        parse(f"ngram:{count}")


def test_a_draft_longer_than_the_window_or_of_another_tokenizer_is_refused(demo: Results, tmp_path: Path) -> None:
    short = open_model(demo, max_seq_len=8)
    with pytest.raises(InputError, match="^speculative: expected 1 to 7 tokens of a draft, which fit into max_seq_len"):
        open_speculation(short, Speculative(9))
    paths = (
        demo.engines("demo-llama", "fp32", "onnxruntime"),
        demo.assembly("demo-llama", "fp32"),
        demo.weights("demo-llama", "fp32"),
    )
    tokenizer = json.loads((paths[1].parent / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, two = list(vocabulary)[40:42]
    vocabulary |= {first: vocabulary[two], two: vocabulary[first]}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer))
    entry = FileEntry(file.name, sha256_file(file))
    other = tmp_path / "assembly.json"
    replace(Assembly.load(paths[1]), tokenizer=entry).save(other)
    with pytest.raises(InputError, match="^speculative: expected a draft target of the same tokenizer, found x with"):
        open_speculation(short, Speculative(4, "x", str(paths[0]), str(other), str(paths[2])))
    assert open_speculation(short, Speculative(4, "x", *map(str, paths), 2)).num_tokens == 4


def test_a_backend_whose_rows_depend_on_their_number_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(model.engines), "batch_invariant", False)
    for refused in (
        lambda: Engine(model, speculation=Speculation(NgramDrafter(), 4)),
        lambda: open_speculation(model, Speculative(4)),
    ):
        with pytest.raises(InputError, match="^speculative: expected a backend .* found onnxruntime on this machine"):
            refused()


def test_commands_give_the_plain_answer_and_say_what_was_drafted(demo: Results, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "results", demo)
    command = ["generate", "demo-llama/fp32", "--prompt", "a b a b a b", "--json", "--results", str(tree)]
    plain, *drafted = (
        CliRunner().invoke(cli, [*command, *options])
        for options in ([], ["--speculative", "ngram:4"], ["--speculative", "draft=demo-llama/fp32/2:3"])
    )
    expected = json.loads(plain.stdout)["choices"]
    for result in drafted:
        document = json.loads(result.stdout)
        assert document["choices"] == expected and document["drafts"]["tokens"]
    source = tmp_path / "prompts.jsonl"
    outs = [tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"]
    source.write_text("".join(json.dumps({"prompt": text, "max_tokens": 30}) + "\n" for text in ("a b a b", "x")))
    for out, options in zip(outs, ([], ["--speculative", "ngram:4"])):
        files = ["--input", str(source), "--output", str(out), "--results", str(tree)]
        assert CliRunner().invoke(cli, ["generate", "demo-llama/fp32", *files, *options]).exit_code == 0
    assert outs[0].read_text() == outs[1].read_text()


@pytest.mark.long
def test_a_server_drafts_and_counts(demo: Results, tmp_path: Path) -> None:
    tree = make_tree(tmp_path, demo)
    body = {"model": "demo-llama", "prompt": "a b a b a b", "max_tokens": 40, "logprobs": 2, "temperature": 0.7}
    body |= {"seed": 3, "stop": ["zzz"]}
    with RealServer(tree) as server:
        plain = server.post("/v1/completions", **body)
    with RealServer(tree, "--speculative", "draft=demo-llama/fp32/2:4", "--metrics-prefix", "vllm") as server:
        assert server.post("/v1/completions", **body)["choices"] == plain["choices"]
        metrics = server.request("GET", "/metrics")[2].decode()
    counts = {
        name: float(value) for name, value in re.findall(r"vllm:spec_decode_num_(\w+)_total\{[^}]*\} (\S+)", metrics)
    }
    assert counts["drafts"] and counts["accepted_tokens"] <= counts["draft_tokens"] >= counts["drafts"]
    assert re.search(
        r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{model_name="demo-llama",position="3"\}', metrics
    )
