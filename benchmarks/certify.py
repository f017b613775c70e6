"""`certify`: how often `lockstep certify` is wrong, and how many requests it takes.

Recorded answers to all questions are drawn again, with replacement, thousands of times: those of endpoints as published
(servers of `--endpoint`, transformers in its own fp32, fp16 and bf16 kernels) for false alarms, those of planted faults
for power. Each is judged by 20, 5 and 1 log-probabilities, and by tokens alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from benchmarks.measure import deliver, surroundings
from lockstep.artifacts.certificate import Hypotheses, Question
from lockstep.artifacts.files import write_bytes
from lockstep.certify.client import Endpoint, Reply
from lockstep.certify.likelihood import PUBLISHED, alarms, log_likelihoods, members, penalised
from lockstep.certify.run import as_answers, read_tables

DRAWN = "drawn at temperature 1"
PENALTY = "a repetition penalty of 1.2"
LISTED = (20, 5, 1, 0)
REQUESTS = 200  # of 300, the others are for company
DRAWS = 5_000
POWER_DRAWS = 500
OPTIONS = (
    options.Option("--model", "The folder of a model in results, with reference and hypotheses.", "results/demo-llama"),
    options.Option("--endpoint", "NAME=URL=MODEL of an endpoint as published.", (), many=True),
    options.number("--draws", DRAWS, "Resamplings for false alarms.", maximum=1_000_000),
    options.WRITE,
)


def main(model: str, endpoint: Sequence[str], draws: int, write: Path | None) -> None:
    """Measure the false alarms and the power of `lockstep certify`."""
    path = Path(model) / "hypotheses" / "all.json"
    hypotheses = Hypotheses.load(path)
    tables = read_tables(path, hypotheses)
    questions = hypotheses.questions
    own = members(tables)
    rows = []
    for name, fault, replies in _recorded(Path(model), questions, endpoint):
        for listed in LISTED:
            cut = [_cut(reply, listed) for reply in replies]
            likelihoods = log_likelihoods(own, as_answers(questions, cut, tables))
            count = POWER_DRAWS if fault else draws
            first = alarms(own, likelihoods, REQUESTS, count)
            number = int(np.sum(first > 0))
            rows.append(
                {"endpoint": name, "fault": fault, "listed": listed, "draws": count, "alarms": number,
                 "upper": None if fault else upper_bound(number, count),
                 "median_requests": float(np.median(first[first > 0])) if number else None}
            )  # fmt: skip
            print(
                f"{name:<24} {fault or PUBLISHED:<30} {listed:>3} {number:>6} of {count}", file=sys.stderr, flush=True
            )
    if write is not None:
        write_bytes(write / "certify.md", page(rows).encode())
    where = surroundings("torch", "transformers")
    deliver({"benchmark": "certify", **where, "model": Path(model).name, "requests": REQUESTS, "rows": rows}, write)


def _recorded(
    model: Path, questions: Sequence[Question], endpoints: Sequence[str]
) -> Iterator[tuple[str, str, list[Reply]]]:
    """Yield the name of an endpoint, its fault or "", and its replies to all questions."""
    for text in endpoints:
        name, url, served = text.split("=", 2)
        server = Endpoint(url, served, None, 60, 0)
        yield name, "", [server.ask(question, LISTED[0]) for question in questions]
    from benchmarks import certify_faults  # loads torch

    dtypes = certify_faults.DTYPES
    for dtype, fault in (*((dtype, "") for dtype in dtypes), *((dtypes[-1], fault) for fault in certify_faults.FAULTS)):
        logits = certify_faults.logits_of(model, questions, dtype, fault)
        yield f"transformers {dtype}", fault, _replies(questions, logits, fault)


def _replies(questions: Sequence[Question], logits: np.ndarray, fault: str) -> list[Reply]:
    """Return what a server would answer by logits [questions, vocab_size]."""
    random = np.random.default_rng(0)
    replies = []
    for question, row in zip(questions, logits.astype(np.float64)):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        texts = dict(zip(question.tokens, question.texts))
        chosen = int(logprobs.argmax())
        if fault == PENALTY:
            chosen = int(penalised(row, question.prompt_ids, 1.2).argmax())
        if fault == DRAWN:
            chosen = int((logprobs + random.gumbel(size=len(row))).argmax())
        top = np.argsort(-logprobs)[: LISTED[0]].tolist()
        replies.append(Reply(texts.get(chosen, "?"), {texts.get(token, f"?{token}"): logprobs[token] for token in top}))
    return replies


def _cut(reply: Reply, listed: int) -> Reply:
    largest = sorted(reply.logprobs.items(), key=lambda item: -item[1])[:listed]
    return Reply(reply.text, dict(largest))


def upper_bound(alarms: int, draws: int) -> float:
    """Return the upper 95 % bound of a rate (Clopper and Pearson), by bisection."""
    counts = np.arange(alarms + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, draws + 1)))])
    log_ways = log_factorials[draws] - log_factorials[counts] - log_factorials[draws - counts]
    low = alarms / draws
    high = 1.0
    for _ in range(60):
        rate = (low + high) / 2
        log_chances = log_ways + counts * np.log(rate) + (draws - counts) * np.log1p(-rate)
        if np.exp(log_chances).sum() > 0.05:
            low = rate
        else:
            high = rate
    return high


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the record as a page."""
    lines = [
        "# What `lockstep certify` sees", "",
        "`python -m benchmarks certify --write records`: recorded answers of the demo, drawn again,",
        f"{REQUESTS} each time ([JSON](bench/certify.json)). Alarms of endpoints as published are false;",
        "\"bound\" is the upper 95 % bound of their rate. The demo knows its texts by heart: what draws or",
        "penalises tokens, or cuts its context, changes few answers.", "",
        "| endpoint | fault | log-probabilities | alarms | bound | median requests |", "|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        alarms = f"{row['alarms']} of {row['draws']}"
        bound = "" if row["fault"] else f"{row['upper']:.1e}"
        requests = f"{row['median_requests']:.0f}" if row["median_requests"] else ""
        words = row["fault"] or PUBLISHED
        lines.append(f"| {row['endpoint']} | {words} | {row['listed'] or 'tokens'} | {alarms} | {bound} | {requests} |")
    return "\n".join(lines) + "\n"
