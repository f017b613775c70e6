"""A file of prompts: all completed, resumed to the byte, and mistakes told by line."""

import json
import resource
import subprocess
import sys

import pytest
from engine_steps import open_model

from lockstep.errors import InputError
from lockstep.runtime import Engine, Request, Sampling, Tokenizer, batch_file
from lockstep.runtime.batch_file import Defaults, generate_file

LINES = [
    {"prompt": "San Francisco is a", "max_tokens": 9, "id": "a"},
    {"prompt": [45, 320, 78], "temperature": 0.9, "seed": 5, "n": 2, "logprobs": 2},
    {"prompt": "Ice floats because", "max_tokens": 50},
    {"prompt": "Light", "stop": ["a"], "max_tokens": 30},
    {"prompt": "Light", "ignore_eos": True, "bad_words": [" the"], "logit_bias": {"7": 1.5}, "min_p": 0.1},
]


@pytest.fixture(scope="module")
def model(demo):
    return open_model(demo, max_batch_size=2)


@pytest.fixture(scope="module")
def tokenizer(demo):
    return Tokenizer.open(demo.assembly("demo-llama", "fp32"))


def run(model, tokenizer, folder, lines=LINES, **options):
    source = folder / "in.jsonl"
    out = folder / "out.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    done = generate_file(model, tokenizer, source, out, Defaults(8), **options)
    records = {record["line"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert len(records) == done.lines
    return done, records


def test_each_line_is_completed_as_alone(model, tokenizer, tmp_path):
    done, records = run(model, tokenizer, tmp_path)
    assert (done.lines, done.failed) == (5, 0) and sorted(records) == [1, 2, 3, 4, 5]
    request = Request(tokenizer.encode("San Francisco is a"), 9, stop_ids=frozenset(model.eos_token_ids))
    tokens = [output.token for output in Engine(model).run([request])]
    (first,) = records[1]["choices"]
    assert first["token_ids"] == tokens and first["text"] == tokenizer.decode(tokens)
    assert records[1]["id"] == "a"
    assert records[1]["usage"] == {"prompt_tokens": request.prompt_ids.size, "completion_tokens": 9}
    first_choice, two = records[2]["choices"]
    assert (
        first_choice["token_ids"] != two["token_ids"]
        and len(first_choice["logprobs"]) == 8
        and len(first_choice["logprobs"][0]["top"]) == 2
    )
    assert records[3]["choices"][0]["finish_reason"] == "stop_id"
    assert "a" not in records[4]["choices"][0]["text"] and records[4]["choices"][0]["finish_reason"] == "stop_string"
    assert len(records[5]["choices"][0]["token_ids"]) == 8


def test_an_interrupted_run_goes_on(model, tokenizer, tmp_path):
    expected_lines, expected = run(model, tokenizer, tmp_path)
    out = tmp_path / "out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # killed while it wrote the third
    again, records = run(model, tokenizer, tmp_path)
    assert records == expected and again == expected_lines
    before = out.read_bytes()
    run(model, tokenizer, tmp_path)
    assert out.read_bytes() == before


def test_records_of_another_input_are_refused(model, tokenizer, tmp_path):
    run(model, tokenizer, tmp_path)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(InputError, match="expected records of this input, found one of another for line 1"):
        run(model, tokenizer, tmp_path, [{"prompt": "Other"}, *LINES[1:]])
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "out.jsonl").write_text("no record\n")
    with pytest.raises(InputError, match=r"out.jsonl:1: expected a record of an earlier run, found 'no record'"):
        run(model, tokenizer, tmp_path)


def test_a_line_that_is_wrong_is_told_and_the_others_are_completed(model, tokenizer, tmp_path):
    wrong = {
        "{": "expected a JSON record, found '{",
        "[1]": "expected a record with a prompt",
        '{"prompt": 5}': "prompt: expected text or a list of token ids, found 5",
        '{"prompt": "A", "tempratur": 1}': "found tempratur",
        '{"prompt": "A", "temperature": -1}': "temperature: expected 0 or more, found -1",
        '{"prompt": "A", "seed": 18446744073709551616}': "seed: expected 0 to 2**64-1",
        '{"prompt": "A", "n": 3}': ": n: expected 1 to 2 choices (max_batch_size), found 3",
        '{"prompt": "A", "n": 1000000000000}': "n: expected 1 to 2 choices",
        '{"prompt": "A", "max_tokens": "3"}': "max_tokens: expected a whole number, found '3'",
        '{"prompt": "A", "max_tokens": Infinity}': "max_tokens: expected a whole number, found inf",
        '{"prompt": "A", "max_tokens": 0}': "in.jsonl:11: max_new_tokens: expected at least 1, found 0",
        '{"prompt": "A", "priority": -Infinity}': "priority: expected a whole number, found -inf",
        '{"prompt": "A", "stop": null}': "stop: expected text or a list of texts, found None",
        '{"prompt": "A", "bad_words": "abc"}': "bad_words: expected a list of texts, found 'abc'",
        '{"prompt": "A", "ignore_eos": "false"}': "ignore_eos: expected true or false, found 'false'",
        '{"prompt": "A", "logprobs": "2"}': "logprobs: expected a whole number, or none, found 2",
        '{"prompt": "A", "logprobs": 2.5}': "logprobs: expected a whole number, or none, found 2.5",
        '{"prompt": "A", "logit_bias": {"a": 1}}': "logit_bias: expected numbers by token id, found {'a': 1}",
        '{"prompt": "A", "logit_bias": {"18446744073709551616": 1}}': "logit_bias: expected token ids 0 to 767",
        '{"prompt": "A", "logit_bias": {"' + "9" * 5000 + '": 1}}': "logit_bias: expected numbers by token id, found",
        '{"prompt": "A", "temperature": 1' + "0" * 400 + "}": "temperature: expected at most 3.4e+38, found 1000",
        '{"prompt": [18446744073709551616]}': "prompt_ids: expected token ids, found one of more than 64 bits",
        '{"prompt": [true]}': "prompt: expected text or a list of token ids, found [True]",
        "[" * 100000: "expected a JSON record, found '[[[[",
        json.dumps({"prompt": "A " * 300}): ": expected 1 to 256 tokens",
    }
    done, records = run(model, tokenizer, tmp_path, [*wrong, "", LINES[0]])
    assert (done.lines, done.failed) == (len(wrong) + 1, len(wrong))
    for number, message in enumerate(wrong.values(), 1):
        assert records[number]["error"].startswith(f"{tmp_path}/in.jsonl:{number}: ")
        assert message in records[number]["error"]
    assert done.first_error == records[1]["error"]
    assert records[len(wrong) + 2]["choices"][0]["finish_reason"] == "max_new_tokens"


def test_a_record_has_the_id_of_its_line_whatever_it_is(model, tokenizer, tmp_path):
    lines = ['{"prompt": "A", "id": "\\ud800", "max_tokens": 1}', {"prompt": "A", "id": [1], "n": "2"}]
    _, records = run(model, tokenizer, tmp_path, lines)
    assert records[1]["id"] == "\ud800" and records[1]["choices"]
    assert records[2]["id"] == [1] and "n: expected a whole number" in records[2]["error"]


def test_a_file_that_is_no_output_is_left_as_it_is(model, tokenizer, tmp_path):
    out = tmp_path / "out.jsonl"
    for text in ("notes without an end of line", '{"line": 1, "input": "x"}\nnotes', '{"prompt": "A"}'):
        out.write_text(text)
        with pytest.raises(InputError, match=r"out.jsonl:[12]: expected a record of an earlier run, found '"):
            run(model, tokenizer, tmp_path)
        assert out.read_text() == text
    for place in (tmp_path, tmp_path / "none/out.jsonl"):
        with pytest.raises(InputError, match="expected a file that completions can be written to: .*another --output"):
            generate_file(model, tokenizer, tmp_path / "in.jsonl", place)


def test_lines_can_be_added_behind_a_last_one_without_an_end(model, tokenizer, tmp_path):
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_text('{"prompt": "A", "max_tokens": 1}')
    generate_file(model, tokenizer, source, out)
    first = out.read_bytes()
    source.write_text('{"prompt": "A", "max_tokens": 1}\n{"prompt": "B", "max_tokens": 1}\n')
    assert generate_file(model, tokenizer, source, out).lines == 2
    assert out.read_bytes().startswith(first) and len(out.read_bytes().splitlines()) == 2


def test_a_source_that_is_not_there_is_one_line_and_makes_nothing(model, tokenizer, tmp_path):
    with pytest.raises(InputError, match="none.jsonl: expected a file of prompts, one JSON record a line: No such"):
        generate_file(model, tokenizer, tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_long_file_is_read_as_it_is_needed(model, tokenizer, tmp_path, monkeypatch):
    waiting = []
    lines = [{"prompt": "A", "max_tokens": 2}] * 40
    add = Engine.add

    def counted(self, request):
        waiting.append(self.scheduler.num_waiting)
        return add(self, request)

    monkeypatch.setattr(batch_file.Engine, "add", counted)
    run(model, tokenizer, tmp_path, lines)
    assert len(waiting) == 40 and max(waiting) < 2


@pytest.mark.parametrize("text", ['{"prompt": "a"}\n', '{"line": 1, "prompt": "a"}', "{", ""])
def test_the_source_is_no_output(model, tokenizer, tmp_path, text):
    """A start of a line without an end, as of a record, would be cut off as one that a run had not written whole."""
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link"):
        with pytest.raises(InputError, match="expected another file than the input, found the same"):
            generate_file(model, tokenizer, source, out)
        assert source.read_text() == text


def test_a_run_that_is_left_gives_the_slots_and_pages_of_the_model_back(model, tokenizer, tmp_path):
    def leave(done, speed):
        if speed.decode_tokens > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, tokenizer, tmp_path, progress=leave)
    assert model.tables.pool.num_available == model.tables.pool.num_pages
    assert [model.length(slot) for slot in range(2)] == [0, 0]
    assert run(model, tokenizer, tmp_path)[0].lines == 5


def test_a_disk_that_has_room_for_a_part_is_gone_on_with(model, tokenizer, tmp_path):
    _, expected = run(model, tokenizer, tmp_path)
    out = tmp_path / "out.jsonl"
    size = out.stat().st_size
    out.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (size // 3, size // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: '{out}'"):
                generate_file(model, tokenizer, tmp_path / "in.jsonl", out, Defaults(8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert out.stat().st_size == room
    assert run(model, tokenizer, tmp_path)[1] == expected


KILLED = """
import sys, time
from pathlib import Path
from lockstep.runtime import Model, ModelOptions, Tokenizer
from lockstep.runtime.batch_file import Defaults, generate_file
model = Model.open(*sys.argv[1:4], options=ModelOptions(max_batch_size=2, max_seq_len=256))
def say(done, speed):
    print(done.lines, flush=True)
    time.sleep(0.02)  # so that it can be killed in any step
generate_file(model, Tokenizer.open(sys.argv[2]), Path(sys.argv[4]), Path(sys.argv[5]), Defaults(8), progress=say)
"""


@pytest.mark.long
def test_a_process_that_is_killed_at_any_time_is_gone_on_with_by_one_other(demo, model, tokenizer, tmp_path):
    _, expected = run(model, tokenizer, tmp_path)
    source = tmp_path / "in.jsonl"
    out = tmp_path / "killed.jsonl"
    paths = [at("demo-llama", "fp32") for at in (demo.assembly, demo.weights)]
    command = [sys.executable, "-c", KILLED, demo.engines("demo-llama", "fp32", "onnxruntime"), *paths, source, out]
    for steps in (3, 12):
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as process:
            for _ in range(steps):
                process.stdout.readline()
            with pytest.raises(InputError, match="expected a file that no other run writes to, found one that does"):
                generate_file(model, tokenizer, source, out, Defaults(8))
            process.kill()
    generate_file(model, tokenizer, source, out, Defaults(8))
    records = list(map(json.loads, out.read_text().splitlines()))
    assert sorted(record["line"] for record in records) == sorted(expected)
    assert {record["line"]: record for record in records} == expected


def test_a_word_that_must_not_come_comes_with_no_space_before_it_either(model, tokenizer, tmp_path):
    lines = [{"prompt": "San Francisco is a", "bad_words": words} for words in ([], ["hilly"], [" hilly"], ["\ud800"])]
    _, records = run(model, tokenizer, tmp_path, lines)
    first = tokenizer.encode(" hilly", special=False)
    assert records[1]["choices"][0]["token_ids"][: len(first)] == first.tolist()
    assert records[2]["choices"] == records[3]["choices"] != records[1]["choices"]
    assert "bad_words: expected texts in UTF-8 that are not empty" in records[4]["error"]


def test_the_engine_completes_a_list(model, tokenizer):
    prompts = ["San Francisco is a", [45, 320, 78], "Light"]
    actual = Engine(model).generate(prompts, tokenizer, Sampling(0.8, seed=3), max_new_tokens=5, n=2)
    assert [len(item.choices) for item in actual] == [2, 2, 2] and all(item.done for item in actual)
    alone = Engine(model).generate(prompts[1:2], tokenizer, [Sampling(0.8, seed=3)], max_new_tokens=5)
    assert alone[0].choices[0].token_ids == actual[1].choices[0].token_ids
    with pytest.raises(InputError, match="sampling: expected one, or one for each of 3 prompts, found 2"):
        Engine(model).generate(prompts, tokenizer, [Sampling()] * 2)
    with pytest.raises(InputError, match=r"prompts: expected a list, found one text; give \['Light'\]"):
        Engine(model).generate("Light", tokenizer)
    (actual,) = Engine(model).generate(["San Francisco is a"], tokenizer, max_new_tokens=30, stop="hilly")
    assert actual.choices[0].text == " " and actual.choices[0].finish == "stop_string"
    engine = Engine(model)
    index = engine.add(Request([5, 6], 2))
    with pytest.raises(InputError, match="generate: expected an engine without requests, found some"):
        engine.generate(["A"], tokenizer)
    assert [output.request for output in engine.run()] == [index] * 2
    with pytest.raises(InputError, match="prompt 2: expected 1 to 256 tokens"):
        engine.generate(["A", []], tokenizer)
    assert not engine.has_work
