"""Generation on the demo checkpoint: its known texts, alone and together, in chunks, with stops, limits and samples."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import engine_steps
import numpy as np
import pytest
from engine_steps import argmax

from lockstep.errors import InputError
from lockstep.runtime import Decoding, Engine, Request, Sampling, Tokenizer, command, generate
from lockstep.targets import Limits, Results
from some import some

EXPECTED = json.loads((Path(__file__).parents[3] / "resources" / "demo-llama" / "expected.json").read_text())
PROMPTS = [entry["text"] for entry in EXPECTED]


def open_model(demo, precision="fp32", layers="all", **limits):
    return engine_steps.open_model(demo, precision, layers, **{"max_batch_size": 3} | limits)


@pytest.fixture(scope="module")
def model(demo):
    return open_model(demo)


@pytest.fixture(scope="module")
def tokenizer(demo):
    return Tokenizer.open(demo.assembly("demo-llama", "fp32"))


def texts(generation, count):
    """(texts, finish reasons) by prompt."""
    out = [""] * count
    finish = [None] * count
    for piece in generation:
        assert finish[piece.prompt] is None  # nothing follows the end
        out[piece.prompt] += piece.text
        finish[piece.prompt] = piece.finish
    return out, finish


@pytest.mark.parametrize("precision", some(["fp32", "fp16"]))
@pytest.mark.parametrize("layers", some(["all", 2]))
def test_known_texts_come_from_more_prompts_than_slots_in_any_chunks(demo, tokenizer, precision, layers):
    expected = [entry[str(layers)]["new_text"] for entry in EXPECTED]
    model = open_model(demo, precision, layers)
    for max_num_tokens in (None, 7, 3):
        generation = generate(model, tokenizer, PROMPTS, 16, max_num_tokens=max_num_tokens)
        actual, finish = texts(generation, len(PROMPTS))
        assert [text[: len(want)] for text, want in zip(actual, expected)] == [
            want[: len(text)] for text, want in zip(actual, expected)
        ]
        assert actual == [tokenizer.decode(tokens) for tokens in generation.tokens]
        assert set(finish) <= {"max_new_tokens", "stop_id"}
        assert generation.speed.prefill_tokens == sum(len(tokenizer.encode(prompt)) for prompt in PROMPTS)
        assert generation.speed.decode_tokens_per_second > 0


def test_each_prompt_gives_together_what_it_gives_alone(model, tokenizer):
    sampling = Sampling(temperature=0.0)
    together, _ = texts(generate(model, tokenizer, PROMPTS, 12, sampling), len(PROMPTS))
    alone = [texts(generate(model, tokenizer, [prompt], 12, sampling), 1)[0][0] for prompt in PROMPTS]
    assert together == alone


def test_samples_are_seeded(model, tokenizer):
    def run(seed):
        return texts(generate(model, tokenizer, ["A"] * 3, 8, Sampling(temperature=8.0, seed=seed)), 3)[0]

    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) == 3  # each request draws for itself


def test_end_of_sequence_ends_and_is_not_text(model, tokenizer):
    generation = generate(model, tokenizer, ["Ice floats because"], 50)
    assert texts(generation, 1) == ([" it is lighter than water."], ["stop_id"])
    assert generation.tokens[0][-1] in model.eos_token_ids


def test_text_after_a_stop_string_is_not_given_out(model, tokenizer):
    full = texts(generate(model, tokenizer, PROMPTS[:2], 14), 2)[0]
    generation = generate(model, tokenizer, PROMPTS[:2], 14, stop=["the coast"])  # spans tokens
    actual, finish = texts(generation, 2)
    assert actual == [full[0][: full[0].index("the coast")], full[1]]
    assert finish == ["stop_string", "max_new_tokens"]
    assert len(generation.tokens[0]) < 14  # it stopped when it was said


def test_stop_strings_wait_for_the_least_number_of_tokens(model, tokenizer):
    """As in vLLM. `generate`, lists of prompts and files of prompts take it alike."""
    full = texts(generate(model, tokenizer, PROMPTS[:1], 14), 1)[0]
    count = 14
    for min_tokens, expected in ((0, [full[0][: full[0].index("the coast")]]), (count, full)):
        sampling = Sampling(min_tokens=min_tokens)
        assert texts(generate(model, tokenizer, PROMPTS[:1], count, sampling, stop=["the coast"]), 1)[0] == expected
        (actual,) = Engine(model).generate(PROMPTS[:1], tokenizer, sampling, count, ["the coast"])
        assert [choice.text for choice in actual.choices] == expected


def test_a_full_slot_ends_the_request(demo, tokenizer):
    model = open_model(demo, max_seq_len=10)
    count = len(tokenizer.encode(PROMPTS[0]))
    generation = generate(model, tokenizer, PROMPTS[:1], 50)
    assert texts(generation, 1)[1] == ["max_seq_len"]
    assert len(generation.tokens[0]) == 10 - count + 1  # the last one is not written to the cache


@pytest.mark.parametrize(("arguments", "message"), [
    ({"prompts": ["fine", ""]}, r"prompt 2: expected 1 to 256 tokens, found 0; give it a text"),
    ({"prompts": ["A " * 300]}, "prompt 1: expected 1 to 256 tokens"),
    ({"prompts": ["San Francisco is a"], "max_input_len": 4},
        "prompt 1: expected 1 to 4 tokens, found 8; shorten it or raise the limits"),
    ({"prompts": ["A"], "max_new_tokens": 0}, "max_new_tokens: expected at least 1, found 0"),
    ({"prompts": ["A"], "max_num_tokens": 2}, r"max_num_tokens: expected at least max_batch_size \(3\), found 2"),
    ({"prompts": ["A"], "stop": [""]}, "found an empty one"),
])  # fmt: skip
def test_prompts_and_limits_that_do_not_fit_are_refused_before_any_step(model, tokenizer, arguments, message):
    with pytest.raises(InputError, match=message):
        generate(model, tokenizer, **({"max_new_tokens": 4} | arguments))


def test_a_run_left_early_leaves_its_slots_free(model, tokenizer):
    run = iter(generate(model, tokenizer, PROMPTS, 16))
    next(run)
    run.close()
    del run
    assert [model.length(slot) for slot in range(3)] == [0, 0, 0]


def test_tokens_come_with_their_logits_and_can_be_forced(model, tokenizer):
    prompt = tokenizer.encode(PROMPTS[0])
    forced = iter([5, 6, 7])
    tokens = list(Decoding(model, [Request(prompt, 3, lambda logits: next(forced)), Request(prompt, 2, argmax)]))
    assert [token.token for token in tokens if token.request == 0] == [5, 6, 7]
    assert [token.finish for token in tokens if token.request == 1] == [None, "max_new_tokens"]
    first = [token.logits for token in tokens[:2]]
    assert all(logits.shape == (model.vocab_size,) and logits.dtype == np.float32 for logits in first)
    np.testing.assert_array_equal(*first)


def test_where_all_take_the_most_likely_token_only_tokens_come_back(model, tokenizer):
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    alone = list(Decoding(model, [Request(prompt, 6) for prompt in prompts]))
    chosen = list(Decoding(model, [Request(prompt, 6, argmax) for prompt in prompts]))
    assert [(output.request, output.token, output.finish) for output in alone] == [
        (output.request, output.token, output.finish) for output in chosen
    ]
    assert all(token.logits is None for token in alone) and all(token.logits is not None for token in chosen)


def test_json_is_one_document_with_what_the_text_has(demo, capsys):
    engines = demo.engines("demo-llama", "fp16", "onnxruntime")
    assembly = demo.assembly("demo-llama", "fp16")
    limits = Limits(max_seq_len=64, max_num_tokens=64, max_input_len=32)
    job = command.Job(engines, assembly, demo.weights("demo-llama", "fp16"), "all", limits, 8, Sampling())
    command.generate(job, PROMPTS[2])
    text = capsys.readouterr().out
    command.generate(job, PROMPTS[2], as_json=True)
    printed = capsys.readouterr()
    actual = json.loads(printed.out)
    (choice,) = actual["choices"]
    assert not printed.err and choice["text"] + "\n" == text and choice["finish_reason"] == "max_new_tokens"
    prompt = Tokenizer.open(assembly).encode(PROMPTS[2])
    assert actual["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 8}
    assert len(choice["token_ids"]) == 8 and actual["speed"]["decode_tokens_per_s"] > 0


def test_weights_may_lie_below_a_name_that_is_no_utf_8(demo, model, tokenizer, tmp_path):
    folder = tmp_path / os.fsdecode(b"Z\xfcrich")
    moved = open_model(Results(shutil.copytree(demo.root, folder, copy_function=os.link)))
    assert texts(generate(moved, tokenizer, PROMPTS[:1], 4), 1) == texts(generate(model, tokenizer, PROMPTS[:1], 4), 1)


def test_generating_loads_no_torch(demo):
    assembly = demo.assembly("demo-llama", "fp16")
    paths = [str(demo.engines("demo-llama", "fp16", "onnxruntime")), str(assembly)]
    paths.append(str(demo.weights("demo-llama", "fp16")))
    script = f"""
import sys
from lockstep.runtime import Model, Tokenizer, generate
print("".join(piece.text for piece in generate(Model.open(*{paths}), Tokenizer.open({paths[1]!r}), ["Light"], 8)))
print(*sorted({{"torch", "transformers", "snakemake", "pydantic", "yaml", "polygraphy", "onnxscript"}} & set(sys.modules)))
"""  # noqa: E501
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert out.startswith(EXPECTED[2]["all"]["new_text"][:20]) and out.splitlines()[1:] == [""]
