"""lm-eval's `local-completions` and `local-chat-completions`, unchanged, against `lockstep serve`, with tasks of our
own (tasks/): its scores are those that transformers gives for the demo checkpoint."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client import run_client
from demo_model import DEMO

from lockstep.runtime import Tokenizer
from real_server import RealServer

TASKS = Path(__file__).parent / "tasks"
CHOICES = "lockstep_choices"
CONTINUATIONS = "lockstep_continuations"
PERPLEXITY = "lockstep_perplexity"
# A token's log-probability: fp32 on both sides, with sums of some hundred products in another order, and logits up to
# 20. As in tests/unit/runtime/test_prompt_logprobs.py.
TOLERANCE = 2e-4
# Whose tokenizer it is: the demo's folder, or the server, which `auto` finds by itself.
FOLDER = f"tokenizer={DEMO},tokenizer_backend=huggingface"
REMOTE = "tokenizer_backend=remote"
AUTO = "tokenizer_backend=auto"
# How requests are sent: prompts as token ids or as text; one after the other, or four at once with two prompts each.
REQUESTS = {
    "tokens": (f"{FOLDER},tokenized_requests=True", 1),
    "text": (f"{FOLDER},tokenized_requests=False", 1),
    "tokens-at-once": (f"{FOLDER},tokenized_requests=True,num_concurrent=4", 2),
    "text-at-once": (f"{FOLDER},tokenized_requests=False,num_concurrent=4", 2),
    "tokens-of-the-server": (f"{REMOTE},tokenized_requests=True", 1),
    "text-of-the-server": (f"{AUTO},tokenized_requests=False", 1),
}


def documents(task: str) -> list[Any]:
    lines = (TASKS / f"{task.removeprefix('lockstep_')}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class Evaluation:
    """What a run of lm-eval wrote: `results` by task, `samples` by task in the order of the documents."""

    def __init__(self, folder: Path):
        (results,) = folder.rglob("results_*.json")
        self.document = json.loads(results.read_text())
        self.results = self.document["results"]
        self.samples = {task: self._samples(folder, task) for task in self.results}

    @staticmethod
    def _samples(folder: Path, task: str) -> list[Any]:
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return sorted(samples, key=lambda sample: sample["doc_id"])


def evaluate(work: Path, model: str, model_args: str, *options: str, tasks: tuple[str, ...]) -> Evaluation:
    """Run lm-eval offline in the folder of the tasks, for that is where it looks for their data."""
    arguments = ["--model", model, "--model_args", model_args, "--tasks", ",".join(tasks), "--include_path", TASKS]
    arguments += ["--output_path", work / "out", "--log_samples", *options]
    run_client("lm-eval", "lm_eval", "run", *arguments, work=work, cwd=TASKS, HF_HUB_OFFLINE="1")
    return Evaluation(work / "out")


@pytest.fixture(scope="module", params=REQUESTS)
def completions(
    server: RealServer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Evaluation:
    """All tasks by `local-completions`."""
    where = f"model=demo-llama,base_url={server.url}/v1/completions,max_length=128"
    work = tmp_path_factory.mktemp("lm-eval")
    tasks = (CHOICES, CONTINUATIONS, PERPLEXITY)
    sent, batch = REQUESTS[request.param]
    results = evaluate(work, "local-completions", f"{where},{sent}", "--batch_size", str(batch), tasks=tasks)
    server.wait_idle()
    return results


@cache
def torch_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "tokenizer.json")


def scores(context: str, continuation: str) -> tuple[float, bool, int]:
    """Return a continuation's log-probability by transformers, whether it is greedy, and its number of tokens.

    A context of no characters is the end token, as the demo has no token of the beginning.
    """
    import torch

    context_ids = tokenizer().encode(context).tolist() if context else [torch_model().config.eos_token_id]
    all_ids = tokenizer().encode(context + continuation).tolist()
    tokens = all_ids if context else context_ids + all_ids
    assert tokens[: len(context_ids)] == context_ids
    with torch.no_grad():
        logits = torch_model()(torch.tensor([tokens])).logits[0, len(context_ids) - 1 : -1]
    rows = torch.log_softmax(logits.double(), -1).numpy()
    chosen = tokens[len(context_ids) :]
    greedy = rows.argmax(-1).tolist() == chosen
    return float(rows[np.arange(len(chosen)), chosen].sum()), greedy, len(chosen)


def continued(context: str, num_tokens: int) -> str:
    """Return the greedy continuation by transformers up to the first full stop."""
    import torch

    context_ids = torch.tensor([tokenizer().encode(context).tolist()])
    with torch.no_grad():
        output_ids = torch_model().generate(context_ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    text = tokenizer().decode(output_ids[0].numpy())
    assert text.startswith(context)
    return text.removeprefix(context).partition(".")[0]


def test_choices_have_the_log_probabilities_of_transformers(completions: Evaluation) -> None:
    right = 0
    num_greedy = 0
    for sample, doc in zip(completions.samples[CHOICES], documents(CHOICES), strict=True):
        expected = [scores(doc["context"], choice) for choice in doc["choices"]]
        actual = [(float(value), greedy == "True") for value, greedy in sample["filtered_resps"]]
        for (value, greedy), (sum_expected, greedy_expected, count) in zip(actual, expected, strict=True):
            assert abs(value - sum_expected) < TOLERANCE * count
            assert greedy == greedy_expected
            num_greedy += greedy
        best = max(range(len(expected)), key=lambda choice: expected[choice][0])
        assert sample["acc"] == (best == doc["answer"])
        right += best == doc["answer"]
    assert num_greedy
    assert completions.results[CHOICES]["acc,none"] == right / len(documents(CHOICES)) == 1


def test_bits_per_byte_are_those_of_transformers(completions: Evaluation) -> None:
    total = number = 0.0
    for sample, doc in zip(completions.samples[PERPLEXITY], documents(PERPLEXITY), strict=True):
        expected, _, count = scores("", doc["text"])
        (value,) = sample["filtered_resps"]
        assert abs(float(value) - expected) < TOLERANCE * count
        total = total - expected
        number = number + len(doc["text"].encode())
    # A byte has less than one token's error, as each token has a byte or more.
    actual = completions.results[PERPLEXITY]["bits_per_byte,none"]
    assert abs(actual - total / number / math.log(2)) < TOLERANCE / math.log(2)


def assert_continued(evaluation: Evaluation) -> None:
    for sample, doc in zip(evaluation.samples[CONTINUATIONS], documents(CONTINUATIONS), strict=True):
        assert sample["filtered_resps"] == [doc["answer"]] == [continued(doc["context"], 64)]
    assert evaluation.results[CONTINUATIONS]["exact_match,none"] == 1
    assert evaluation.document["n-samples"][CONTINUATIONS]["effective"] == len(documents(CONTINUATIONS))


def test_completions_are_the_greedy_ones_of_transformers(completions: Evaluation) -> None:
    assert_continued(completions)


@pytest.mark.parametrize("requests", ["num_concurrent=1", "num_concurrent=4"])
def test_chats_are_the_greedy_ones_of_transformers(server: RealServer, tmp_path: Path, requests: str) -> None:
    """The demo's chat template makes of one message of a user its text."""
    where = f"model=demo-llama,base_url={server.url}/v1/chat/completions,eos_string=<eos>,{requests}"
    results = evaluate(tmp_path, "local-chat-completions", where, "--apply_chat_template", tasks=(CONTINUATIONS,))
    assert_continued(results)
    server.wait_idle()
