"""The engine over real models: what a request gives does not depend on its company, on reuse, on swapping or on an
interruption, to the bit; and memory comes back in every state."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from demo_model import DEMO
from engine_steps import CHUNK, argmax, ids, open_model, with_logits

from lockstep.artifacts.weights import WeightsManifest
from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.runtime import Advance, Engine, Model, ModelOptions, Request, Sampling, Tokenizer, engine_core, scheduler
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.prefix import root_key
from lockstep.step.host import HostExecutor
from lockstep.step.logits_pipeline import Sampler
from lockstep.weights import convert
from some import some


@pytest.fixture(scope="module")
def model(demo):
    return open_model(demo)


@pytest.mark.parametrize("precision", some(["fp16", "fp32"]))
def test_a_request_gives_the_same_bits_in_any_company(demo, precision):
    model = open_model(demo, precision)
    lengths = (9, 100, 64, 129, 200, 1, 65, 30)
    requests = [Request(ids(length, seed), 12, argmax) for seed, length in enumerate(lengths)]
    alone = [with_logits(Engine(model, prefix_caching=False), request)[0] for request in requests]
    for seed in range(3):
        random = np.random.default_rng(seed)
        order = random.permutation(len(requests))
        arrivals = np.sort(random.integers(0, 30, len(requests)))
        engine = Engine(model, prefix_caching=False, max_num_tokens=int(random.choice([CHUNK + 3, 200, 512])))
        actual = with_logits(engine, *(requests[i] for i in order), arrivals=arrivals)
        for number, i in enumerate(order):
            assert actual[number][0] == alone[i][0], (seed, lengths[i])
            np.testing.assert_array_equal(actual[number][1], alone[i][1])


def test_a_prefix_that_is_reused_gives_the_bits_of_one_that_is_computed(demo):
    model = open_model(demo)
    prefix = ids(2 * CHUNK)
    requests = [Request(np.concatenate([prefix, ids(count, count)]), 8, argmax) for count in (1, 5, CHUNK, 70)]
    cold = [with_logits(Engine(model, prefix_caching=False), request)[0] for request in requests]
    engine = Engine(model)
    for number, request in enumerate(requests):
        pool = model.tables.pool
        cached = model.tables.pool.num_cached
        engine.add(request)
        engine.step()
        # all but the first compute tokens after the prefix only; of the second prompt just its last token is left
        assert (model.length(0) >= 2 * CHUNK) and (cached > 0) == (number > 0)
        with_logits(engine)
        assert pool.num_available == pool.num_pages
    warm = Engine(model)
    for number, request in enumerate(requests):
        tokens, logits = with_logits(warm, request)[number]
        assert tokens == cold[number][0]
        np.testing.assert_array_equal(logits, cold[number][1])


def test_prefixes_are_shared_within_a_salt_a_model_and_a_depth_only(demo):
    model = open_model(demo)
    prompt = ids(150)
    engine = Engine(model)
    steps = []
    for salt in ("", "", "a", "a"):
        engine.add(Request(prompt, 1, cache_salt=salt))
        tokens = model.tables.pool.num_cached
        while engine.has_work:
            engine.step()
        steps.append(model.tables.pool.num_cached - tokens)
    assert [count > 0 for count in steps] == [True, False, True, False]
    shallow = open_model(demo, layers=2)
    assert (
        len({root_key(model), root_key(model, "a"), root_key(shallow), root_key(open_model(demo, chunk_size=128))}) == 4
    )


def test_identity_is_of_what_the_weights_are_not_of_where_they_lie(demo, tmp_path):
    """In fp16 the manifest of weights points into the checkpoint, whose files a bundle brings along."""
    engines = demo.engines("demo-llama", "fp16", "onnxruntime")
    assembly = demo.assembly("demo-llama", "fp16")
    options = ModelOptions(max_batch_size=4, max_seq_len=256, chunk_size=CHUNK)

    def key_of(weights):
        return root_key(Model.open(engines, assembly, weights, options=options))

    keys = {root_key(open_model(demo, "fp16"))}
    for folder in (tmp_path / "elsewhere", tmp_path / "deeper" / "still"):
        copy = folder / "checkpoint"
        shutil.copytree(DEMO, copy)
        checkpoint = resolve(str(copy), copy, folder / "checkpoint.json")
        weights = convert(checkpoint, "fp16", folder / "fp16" / "weights.json")
        keys.add(key_of(weights))
    WeightsManifest.load(weights).moved(os.path.basename).save(copy / "weights.json")
    keys.add(key_of(copy / "weights.json"))
    assert len(keys) == 1
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    changed = convert(resolve(str(copy), copy, folder / "checkpoint.json"), "fp16", weights)
    keys.add(key_of(changed))
    assert len(keys) == 2


def test_the_same_prompt_twice_in_one_step(model):
    prompt = ids(150)
    actual = with_logits(Engine(model), *[Request(prompt, 4, argmax)] * 3)
    assert actual[0][0] == actual[1][0] == actual[2][0]
    np.testing.assert_array_equal(actual[0][1], actual[2][1])


def test_choices_of_a_prompt_draw_for_themselves_and_share_its_computation(model):
    request = Request(ids(70), 10, sampling=Sampling(1.0, seed=5), n=4)
    engine = Engine(model, prefix_caching=False)
    engine.add(request)
    results = {}
    for output in engine.run():
        results.setdefault(output.choice, []).append(output.token)
    assert engine.speed.prefill_tokens == 70
    assert sorted(results) == [0, 1, 2, 3] and len({tuple(tokens) for tokens in results.values()}) == 4
    alone = Engine(model, prefix_caching=False)
    alone.add(replace(request, n=1))
    assert [output.token for output in alone.run()] == results[0]
    engine.scheduler.check()


def test_a_seed_gives_the_same_tokens_in_any_company_and_order(model):
    sampling = Sampling(0.9, top_p=0.95, seed=2**63 + 11, frequency_penalty=0.3)
    request = Request(ids(20), 16, sampling=sampling)
    alone = [output.token for output in Engine(model).run([request])]
    requests = [Request(ids(length, length), 9, sampling=Sampling(1.0, seed=length)) for length in (7, 40, 130)]
    results = [output.token for output in Engine(model).run([*requests, request]) if output.request == 3]
    assert results == alone and len(set(alone)) > 4


def test_the_executor_draws_what_the_sampler_draws(demo, monkeypatch):
    """Whatever else is in the step, in slots that others had, and after a swap; `logprobs` has the host draw."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 1)
    page = open_model(demo).tables.pool.page_nbytes
    model = open_model(demo, kv_bytes=5 * page)
    rules = [Sampling(1.2, seed=2**64 - 1), Sampling(0.8, top_p=0.9), Sampling(), Sampling(3.0, top_k=40, min_p=0.01)]
    terms = [(length, rules[length % 4]) for length in (9, 62, 100, 7, 60, 33, 1, 66)]

    def tokens(**options):
        engine = Engine(model, prefix_caching=False, admission="optimistic")
        results = {}
        requests = [Request(ids(n, n), 20, sampling=replace(rule, **options)) for n, rule in terms]
        several = Request(ids(30), 9, sampling=replace(rules[0], **options), n=3)
        for output in engine.run([*requests, several]):
            results.setdefault((output.request, output.choice), []).append(output.token)
            assert (output.logits is None) == (not options) or output.request == 8  # whose choices fork from logits
        engine.scheduler.check()
        return results, engine.scheduler.num_swaps

    drawn, swaps = tokens()
    by_logits, _ = tokens(logprobs=0)
    assert drawn == by_logits and len({tuple(drawn[8, choice]) for choice in range(3)}) == 3 and swaps
    greedy = model.step_tokens([Advance(slot, ids(9), 0) for slot in range(4)])
    assert len(set(greedy.tolist())) == 1, "slots are greedy again once they are released"
    with pytest.raises(InputError, match="sampling: expected temperature, top_k, top_p, min_p and seed alone"):
        model.set_sampling(0, Sampler(Sampling(1.0, logprobs=2)))


@pytest.mark.parametrize("num_sent", [1, 7, 15])
def test_an_interrupted_request_goes_on_to_the_bit(model, num_sent):
    for sampling, choose in ((Sampling(1.0, seed=3, presence_penalty=0.5), None), (Sampling(), argmax)):
        request = Request(ids(100), 16, choose, sampling=sampling)
        full = list(Engine(model, prefix_caching=False).run([request]))
        resumed = replace(request, answer_ids=[output.token for output in full[:num_sent]])
        outputs = list(Engine(model, prefix_caching=False).run([resumed]))
        for output, expected in zip(outputs, full[num_sent:], strict=True):
            assert output.token == expected.token
            np.testing.assert_array_equal(output.logits, expected.logits)


def test_an_interrupted_request_completes_no_bad_word(model):
    tokenizer = Tokenizer(DEMO / "tokenizer.json")
    *earlier, last = (tokenizer.encode(letter, special=False)[0].item() for letter in "true")
    word = tokenizer.decode([*earlier, last]).strip()
    for words in ((), (word,)):
        sampling = Sampling(logit_bias={last: 1e6}, bad_words=words)
        request = Request(ids(5), len(earlier) + 1, sampling=sampling, answer_ids=earlier)
        (output,) = Engine(model).run([request])
        assert (output.token == last) == (not words)


def test_requests_that_are_swapped_out_come_back_with_the_same_bits(demo, monkeypatch):
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 16)
    requests = [Request(ids(60, seed), 100, argmax) for seed in range(4)]
    roomy = open_model(demo)
    alone = [with_logits(Engine(roomy, prefix_caching=False), request)[0] for request in requests]
    pool = roomy.tables.pool
    tight = open_model(demo, kv_bytes=9 * pool.page_nbytes)
    engine = Engine(tight, admission="optimistic")
    actual = with_logits(engine, *requests)
    assert engine.scheduler.num_swaps > 0
    for number in range(len(requests)):
        assert actual[number][0] == alone[number][0]
        np.testing.assert_array_equal(actual[number][1], alone[number][1])
    assert tight.tables.pool.num_available == 9


def test_prompts_that_are_swapped_out_half_way_never_lack_pages(demo, monkeypatch):
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 1)
    model = open_model(demo, max_seq_len=512)
    requests = [*(Request(ids(62, seed), 120, argmax) for seed in range(3)), Request(ids(450, 9), 3, argmax)]
    alone = [with_logits(Engine(model, prefix_caching=False), request)[0] for request in requests]
    pages = 3 * 1 + 8  # of rows of 64 and of 512 tokens: all are admitted, until the short ones outgrow theirs
    tight = open_model(demo, max_seq_len=512, kv_bytes=pages * model.tables.pool.page_nbytes)
    engine = Engine(tight, max_num_tokens=3 * 62 + CHUNK, prefix_caching=False, admission="optimistic")
    actual = with_logits(engine, *requests)
    assert engine.scheduler.num_swaps
    for number in range(len(requests)):
        assert actual[number][0] == alone[number][0]
        np.testing.assert_array_equal(actual[number][1], alone[number][1])
    assert tight.tables.pool.num_available == pages


def test_more_rows_than_memory_for_their_longest_share_what_there_is(demo):
    pool = open_model(demo).tables.pool
    model = open_model(demo, max_batch_size=64, kv_bytes=70 * pool.page_nbytes)  # 64 rows of 256 tokens are 256 pages
    engine = Engine(model)
    max_running = 0
    for number in range(100):
        engine.add(Request(ids(5 + number % 50, number), 3))
    while engine.has_work:
        engine.step()
        max_running = max(max_running, engine.scheduler.num_running)
    assert max_running == 64
    engine.scheduler.check()


@pytest.mark.parametrize("state", ["waiting", "in a prompt", "decoding", "swapped", "forking"])
def test_an_abort_frees_everything_in_every_state(demo, state, monkeypatch):
    monkeypatch.setattr(scheduler, "LOOKAHEAD", 64)
    page = open_model(demo).tables.pool.page_nbytes
    model = open_model(demo, kv_bytes=9 * page)
    engine = Engine(model, max_num_tokens=CHUNK + 3, admission="optimistic")
    expected = [output.token for output in Engine(model).run([Request(ids(30), 20)])]
    other = engine.add(Request(ids(30), 20))
    n = 2 if state == "forking" else 1
    length, new = {"waiting": (30, 9), "swapped": (60, 150), "decoding": (30, 100)}.get(state, (190, 30))
    index = engine.add(Request(ids(length, 1), new if n == 1 else 2, n=n))
    tokens = [] if state == "waiting" else engine.step()
    if state == "decoding":
        tokens += engine.step()
    if state == "swapped":
        for seed in range(2):
            engine.add(Request(ids(60, 7 + seed), 150))
        for _ in range(200):
            if engine.scheduler.num_swaps:
                break
            tokens += engine.step()
        index = next(i.index for i in engine.choices.values() if i.scheduled in engine.swapped)
    assert engine.abort(index) and not engine.abort(index) and not engine.abort(99)
    if state == "swapped":
        for choice in {choice.index for choice in engine.choices.values()} - {other}:
            engine.abort(choice)
    tokens += list(engine.run())
    assert [token.token for token in tokens if token.request == other] == expected
    engine.scheduler.check()
    assert model.tables.pool.num_available == 9 and not engine.has_work
    assert [model.length(slot) for slot in range(4)] == [0] * 4


def test_a_choice_of_a_request_that_waits_can_be_aborted(demo):
    model = open_model(demo)
    engine = Engine(model)
    sampling = Sampling(1.0, seed=4)
    expected = {}
    for output in Engine(model).run([Request(ids(20, 9), 5, sampling=sampling, n=3)]):
        expected.setdefault(output.choice, []).append(output.token)
    for seed in range(4):
        engine.add(Request(ids(20, seed), 6))
    index = engine.add(Request(ids(20, 9), 5, sampling=sampling, n=3))
    actual = {}
    engine.step()
    assert engine.abort(index, 1) and not engine.abort(index, 1) and engine.scheduler.num_waiting == 1
    for output in engine.run():
        actual.setdefault((output.request, output.choice), []).append(output.token)
    assert {choice: tokens for (request, choice), tokens in actual.items() if request == index} == {
        0: expected[0],
        2: expected[2],
    }
    engine.scheduler.check()
    assert engine.scheduler.num_waiting == 0


@pytest.mark.parametrize("state", ["waiting", "in a prompt", "held"])
@pytest.mark.parametrize("gone", some([((0, 2, 1),), ((0,),), ((0, 1),), ((1, 0),)]), ids=str)
def test_the_first_choice_can_be_aborted_before_the_prompt_is_computed(demo, state, gone):
    """The others go on, each with its own draws; the last one ends all."""
    model = open_model(demo)
    sampling = Sampling(1.0, seed=4)
    request = Request(ids(2 * CHUNK + 9, 9), 5, sampling=sampling, n=3)
    expected = {}
    for output in Engine(model, max_num_tokens=CHUNK + 3).run([request]):
        expected.setdefault(output.choice, []).append(output.token)
    compiler = Slow()
    engine = Engine(model, max_num_tokens=CHUNK + 3, grammars={"": compiler}, prefix_caching=False)
    if state == "waiting":
        for seed in range(4):
            engine.add(Request(ids(20, seed), 6))
    index = engine.add(replace(request, grammar=Grammar("regex", ".*")) if state == "held" else request)
    actual = {}
    engine.step()
    for number in gone:
        assert engine.abort(index, number) and not engine.abort(index, number)
    if state == "held":
        assert compiler.forgotten == ([index] if len(gone) == 3 else [])
        compiler.outcomes.append((index, Free()))
    for output in engine.run():
        actual.setdefault((output.request, output.choice), []).append(output.token)
    assert {choice: tokens for (request, choice), tokens in actual.items() if request == index} == {
        number: expected[number] for number in range(3) if number not in gone
    }
    engine.scheduler.check()
    assert not engine.has_work and engine.scheduler.num_waiting == engine.scheduler.num_running == 0


class Slow:
    """A compiler of grammars that is done when a test says so."""

    def __init__(self):
        self.outcomes = []
        self.forgotten = []
        self.forget = self.forgotten.append

    def submit(self, *arguments):
        pass

    def wait(self, seconds):
        pass

    def poll(self):
        outcomes = self.outcomes
        self.outcomes = []
        return outcomes


class Free:
    """A matcher that allows all."""

    def fork(self):
        return self

    def consume(self, token):
        pass

    def allowed(self, end_ids):
        return np.ones(768, bool)


def test_the_log_probabilities_of_a_prompt_come_though_its_first_choice_is_aborted(demo):
    model = open_model(demo)
    request = Request(ids(2 * CHUNK + 9, 9), 2, n=2, prompt_logprobs=1)
    results = []
    for gone in (False, True):
        engine = Engine(model, max_num_tokens=CHUNK + 1)
        rows = []
        index = engine.add(request)
        while engine.has_work:
            engine.step()
            for _, first, entries in engine.prompt_logprobs:
                rows += [(first, entry) for entry in entries]
            if gone and len(results) == 1:
                engine.abort(index, 0)
        results.append(rows)
    assert results[0] == results[1] and len(results[0]) == 2 * CHUNK + 8


HOW = [Sampling(), Sampling(1e-9), Sampling(1e-9, logprobs=0)]  # the executor chooses, draws; the host draws


@pytest.mark.parametrize("sampling", HOW, ids=["greedy", "drawn", "by-logits"])
def test_logits_that_are_not_finite_end_their_request_only(model, monkeypatch, sampling):
    run_step = HostExecutor.run_step

    def poisoned(self, advances):
        plan = run_step(self, advances)
        for row, advance in zip(plan.logits(), advances):
            if advance.start + len(advance.tokens) == 13:
                row[5] = np.nan
        return plan

    monkeypatch.setattr(HostExecutor, "run_step", poisoned)
    engine = Engine(model)
    good, bad = (list(ids(length, length)) for length in (20, 12))
    ended = list(engine.run([Request(prompt, 6, sampling=sampling) for prompt in (good, bad)]))
    assert [(output.request, output.token) for output in ended if output.finish == "error"] == [(1, -1)]
    assert [output.finish for output in ended if output.request == 0][-1] == "max_new_tokens"
    engine.scheduler.check()


def test_a_step_that_fails_ends_all_and_leaves_the_pool_whole(demo, monkeypatch):
    model = open_model(demo)
    engine = Engine(model)
    for length in (10, 100):
        engine.add(Request(ids(length), 5))
    engine.step()
    monkeypatch.setattr(model.executor, "run_step", lambda advances: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.scheduler.check()
    assert not engine.has_work and model.tables.pool.num_available == model.tables.pool.num_pages
    assert len(list(engine.run([Request(ids(10), 5)]))) == 5


def test_a_chooser_that_raises_ends_all_and_leaves_the_pool_whole(demo):
    """Else the others of its step would go on without the tokens that it gave them."""
    model = open_model(demo)
    engine = Engine(model)
    rows = []

    def choose(logits):
        rows.append(logits)
        return 1 // (3 - len(rows))

    for length, chooser in ((10, choose), (100, None)):
        engine.add(Request(ids(length), 12, chooser))
    with pytest.raises(ZeroDivisionError):
        for _ in range(9):
            engine.step()
    assert not engine.has_work and engine.step() == []
    engine.scheduler.check()
    assert model.tables.pool.num_available == model.tables.pool.num_pages
    assert len(list(engine.run([Request(ids(10), 5)]))) == 5


@pytest.mark.parametrize("method", ["store", "share"])
def test_a_prefix_that_cannot_be_copied_leaves_the_pool_whole(demo, method, monkeypatch):
    model = open_model(demo)
    engine = Engine(model)
    prompt = ids(3 * CHUNK + 9)
    if method == "share":
        list(engine.run([Request(prompt, 2)]))
    monkeypatch.setattr(model.executor, method, lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(engine.run([Request(prompt, 2), Request(prompt, 2)]))
    monkeypatch.undo()
    engine.scheduler.check()
    assert model.tables.pool.num_available == model.tables.pool.num_pages and not model.tables.pool.num_cached
    assert len(list(engine.run([Request(prompt, 2)]))) == 2


def test_salts_that_come_once_are_not_kept_for_ever(model, monkeypatch):
    monkeypatch.setattr(engine_core, "MAX_ROOT_KEYS", 3)
    engine = Engine(model)
    for number in range(9):
        list(engine.run([Request(ids(70), 1, cache_salt=str(number))]))
    assert engine.root_key.cache_info().currsize == 3


def test_a_prompt_of_just_the_longest_length_gives_one_token(model):
    (output,) = Engine(model).run([Request(ids(256), 9)])
    assert output.finish == "max_seq_len"
    (output,) = Engine(model).run([Request(ids(256), 1)])
    assert output.finish == "max_new_tokens"


def test_pages_that_are_short_are_one_line_before_the_step_and_change_nothing(demo):
    page = open_model(demo).tables.pool.page_nbytes
    model = open_model(demo, kv_bytes=2 * page + 5)
    (expected,) = model.step([Advance(0, ids(60), 0)])
    with pytest.raises(InputError, match=r"KV cache: expected 2 free pages of 64 tokens, found 1 of 2; raise kv_bytes"):
        model.step([Advance(1, ids(70), 0)])
    assert model.length(0) == 60 and model.length(1) == 0
    model.release(0)
    np.testing.assert_array_equal(model.step([Advance(1, ids(60), 0)]), [expected])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "^prompt_ids: expected 1 to 256 tokens"),
        ({"prompt_ids": [5, 768 * 9]}, "^prompt_ids: expected token ids 0 to [0-9]+, found 6912"),
        ({"n": 0}, "^n: expected 1 to 4 choices .max_batch_size., found 0"),
        ({"n": 5}, "n: expected 1 to 4 choices .max_batch_size., found 5"),
        ({"answer_ids": [1, 2, 3]}, "answer_ids: expected fewer than max_new_tokens .3., found 3"),
        ({"answer_ids": [-1]}, "answer_ids: expected token ids 0 to [0-9]+, found -1"),
        ({"prompt_ids": "text"}, "prompt_ids: expected a list of token ids, found 'text'"),
        ({"prompt_ids": None}, "prompt_ids: expected a list of token ids, found 'None'"),
        ({"prompt_ids": [1.5]}, "prompt_ids: expected a list of token ids, found '.1.5.'"),
        ({"prompt_ids": np.ones((2, 3), int)}, "prompt_ids: expected a list of token ids, found int64 .2, 3."),
        ({"prompt_ids": [2**64]}, "prompt_ids: expected token ids, found one of more than 64 bits"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number, found '2.5'"),
        ({"priority": None}, "priority: expected a whole number, found 'None'"),
        ({"choice": 2**64 - 1, "n": 2}, r"choice: expected 0 to 18446744073709551614, found 18446744073709551615"),
        ({"cache_salt": b"a"}, "cache_salt: expected text, found b'a'"),
        ({"sampling": Sampling(bad_words=((1, 99999),))}, "bad_words: expected token ids 0 to [0-9]+, found 99999"),
        ({"sampling": Sampling(logit_bias={99999: 1.0})}, "logit_bias: expected token ids 0 to [0-9]+, found 99999"),
    ],
)
def test_requests_that_cannot_be_are_refused_and_nothing_is_queued(model, arguments, message):
    engine = Engine(model)
    with pytest.raises(InputError, match=message):
        engine.add(Request(**({"prompt_ids": [1, 2], "max_new_tokens": 3} | arguments)))
    assert not engine.has_work and engine.scheduler.num_waiting == 0


def test_chunks_are_as_long_as_asked_for_where_a_step_has_room(demo):
    for chunk_size, budget, expected in ((512, 1024, 512), (512, 400, 384), (64, 1024, 64), (100, 60, 57)):
        model = open_model(demo, chunk_size=chunk_size)
        assert Engine(model, max_num_tokens=budget).scheduler.options.chunk_size == expected


def test_limits_that_cannot_be_are_refused(demo):
    with pytest.raises(InputError, match="kv_bytes: expected at least 1, found 0"):
        open_model(demo, kv_bytes=0)
    with pytest.raises(InputError, match="chunk_size: expected at least 1, found 0"):
        open_model(demo, chunk_size=0)
