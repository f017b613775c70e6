"""`speculation`: the gain of drafts: answers with n-gram drafts, or a draft target's, compared with plain ones.

In: targets of a finished run, whose chat template is ChatML. Out: of each the seconds of one request for each
task, plain and with drafts in turn, whose answers must be the same; and the seconds of a step that verifies some tokens
and of one that decodes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.measure import deliver, in_turn, ratios, spread, surroundings
from lockstep import Advance, CheckError, Engine, Model, ModelDrafter, NgramDrafter, Request, Sampling, Speculation
from lockstep.runtime.speculative import parse

OPTIONS = (
    options.option("--target", "A target of a finished run.", name="targets", many=True, required=True),
    options.option("--speculative", "Drafts, as for `lockstep serve`.", "ngram:4"),
    options.number("--new", 128, "New tokens of an answer."),
    options.THREADS, options.RESULTS, options.rounds(), options.WRITE,
)  # fmt: skip
PACKAGES = ("numpy", "onnxruntime")

_CODE = """def read_table(path):
    rows = []
    with open(path) as file:
        for line in file:
            fields = line.strip().split(",")
            if len(fields) < 3:
                continue
            rows.append({"name": fields[0], "count": int(fields[1]), "price": float(fields[2])})
    return rows


def total(rows):
    result = 0.0
    for row in rows:
        result += row["count"] * row["price"]
    return result
"""
_TEXT = """The lighthouse at Cape Arden was built in 1871 after three ships were lost in one winter. It is 38 metres
high, and its lamp was seen from 20 miles away. Oil was carried up 186 steps each night until 1934, when an electric
lamp was put in. The last keeper, Ruth Hallam, left in 1988, when the lighthouse became automatic. Today the Cape Arden
Trust opens it to visitors on Sundays from May to September, and the keeper's house is a small museum."""
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
_WRONG = _CODE.replace("rows.append", "rows.apend")
_STORY = "Write a short story about a fox who learns to swim."
# The question, the beginning of the answer, and its temperature.
TASKS = {
    "edit": (f"Correct the typing error in this code, and repeat the whole code:\n\n{_WRONG}", "```python\ndef", 0.0),
    "summary": (f"Summarize this text in three sentences, with its own words:\n\n{_TEXT}", "", 0.0),
    "open text": (_STORY, "", 0.0),
    "open text, drawn": (_STORY, "", 0.8),
}
_LONGEST = 512  # tokens of a prompt
_CONTEXT = 64  # tokens before those of a timed step


def main(targets: Sequence[str], speculative: str, write: Path | None, threads: int | None, **settings: Any) -> None:
    """Compare answers with drafts and plain ones, and steps that verify."""
    record = {
        "benchmark": "speculation",
        "speculative": speculative,
        "targets": {target: measure(target, speculative, threads=threads, **settings) for target in targets},
        **surroundings(*PACKAGES, threads=threads),
    }
    deliver(record, write)


def measure(target: str, speculative: str, new: int, threads: int | None, results: Path, rounds: int) -> dict[str, Any]:
    """Measure one target. Raises CheckError where an answer with drafts is not the plain one."""
    draft_settings = parse(speculative)
    limits = {"max_batch_size": 1, "max_seq_len": _LONGEST + new, "threads": threads}
    model = lockstep.open_model(target, results, **limits)
    tokenizer = lockstep.open_tokenizer(target, results)
    draft = draft_settings.target and lockstep.open_model(draft_settings.target, results, **limits, cut_of=model)

    def speculation() -> Speculation:
        return Speculation(ModelDrafter(draft) if draft else NgramDrafter(), draft_settings.num_tokens)

    tasks = {}
    for name, (text, begun, temperature) in TASKS.items():
        prompt = tokenizer.encode(_CHAT.format(text, begun))[:_LONGEST]
        sampling = Sampling(temperature, seed=1)
        stop_ids = frozenset(model.eos_token_ids)
        tasks[name] = _task(model, Request(prompt, new, None, stop_ids, sampling), speculation, rounds)
    return {"tasks": tasks, "verify": _steps(model, draft_settings.num_tokens, rounds)}


def _task(model: Model, request: Request, speculation: Callable[[], Speculation], rounds: int) -> dict[str, Any]:
    answers: dict[str, list[int]] = {}
    last: list[Speculation] = []

    def answer(name: str, drafts: Speculation | None) -> float:
        engine = Engine(model, speculation=drafts)
        began = time.perf_counter()
        answers[name] = [token.token for token in engine.run([request])]
        last[:] = [drafts] if drafts else last
        return time.perf_counter() - began

    times = in_turn({"plain": lambda: answer("plain", None), "drafts": lambda: answer("drafts", speculation())}, rounds)
    if answers["plain"] != answers["drafts"]:
        raise CheckError("speculation: expected the plain answer with drafts, found another one")
    return {
        "prompt_tokens": len(request.prompt_ids),
        "new_tokens": len(answers["plain"]),
        "draft_tokens": last[0].num_draft_tokens,
        "accepted_by_position": last[0].accepted,
        "seconds": {name: spread(values) for name, values in times.items()},
        "speed_of_drafts_relative_to": ratios(times, "drafts"),
    }


def _steps(model: Model, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step of one token, and of those that verify 2 to num_tokens + 1, and their ratios."""
    tokens = np.arange(3, 3 + _CONTEXT + num_tokens + 1)
    model.step_tokens([Advance(0, tokens[:_CONTEXT], 0)])

    def step(count: int) -> float:
        advance = Advance(0, tokens[_CONTEXT : _CONTEXT + count], _CONTEXT, verifies=count > 1)
        model.step_tokens([advance])
        model.keep(0, _CONTEXT)
        began = time.perf_counter()
        model.step_tokens([advance])
        seconds = time.perf_counter() - began
        model.keep(0, _CONTEXT)
        return seconds

    counts = range(1, num_tokens + 2)
    times = in_turn({str(count): lambda count=count: step(count) for count in counts}, 4 * rounds)  # type: ignore[misc]
    model.release(0)
    seconds = {}
    plain_steps = {}
    for name, values in times.items():
        seconds[name] = spread(values)
        plain_steps[name] = spread([a / b for a, b in zip(values, times["1"], strict=True)], 3)
    return {"seconds_by_tokens": seconds, "plain_steps_by_tokens": plain_steps}
