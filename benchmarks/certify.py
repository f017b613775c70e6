"""`certify`: how often `lockstep certify` is wrong, and how many requests it takes.

Recorded answers to all questions are drawn again, with replacement, thousands of times: those of endpoints as published
(servers of `--endpoint`, transformers in its own fp32, fp16 and bf16 kernels) for false alarms, those of planted faults
for power. Each is judged by 20, 5 and 1 log-probabilities, and by tokens alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from benchmarks.measure import deliver, surroundings
from lockstep.artifacts.certificate import Hypotheses, Question
from lockstep.artifacts.files import write_bytes
from lockstep.certify.answers import as_answers, read_tables
from lockstep.certify.client import Endpoint, Form, Token
from lockstep.certify.likelihood import PUBLISHED, Member, Tables, alarms, log_likelihoods, members, penalised

DRAWN = "drawn at temperature 1"
PENALTY = "a repetition penalty of 1.2"
LISTED = (20, 5, 1, 0)
REQUESTS = 200  # of 300, the others are for company
DRAWS = 5_000
POWER_DRAWS = 500
OPTIONS = (
    options.option("--model", "The folder of a model in results, with reference and hypotheses.", "results/demo-llama"),
    options.option("--endpoint", "NAME=URL=MODEL of an endpoint as published.", (), many=True),
    options.number("--draws", DRAWS, "Resamplings for false alarms.", maximum=1_000_000),
    options.WRITE,
)
HEADER = f"""\
# What `lockstep certify` sees

`python -m benchmarks certify --write records`: recorded answers of the demo, drawn again,
{REQUESTS} each time ([JSON](bench/certify.json)). Alarms of endpoints as published are false;
"bound" is the upper 95 % bound of their rate.

| endpoint | fault | log-probabilities | alarms | bound | median requests |
|---|---|---:|---:|---:|---:|
"""


@dataclass(frozen=True)
class Recording:
    """The answers of an endpoint to all questions. fault: "" for none."""

    endpoint: str
    fault: str
    tokens: Sequence[Token]


def main(model: str, endpoint: Sequence[str], draws: int, write: Path | None) -> None:
    """Measure the false alarms and the power of `lockstep certify`."""
    path = Path(model) / "hypotheses" / "all.json"
    hypotheses = Hypotheses.load(path)
    tables = read_tables(path, hypotheses)
    all_members = members(tables)
    rows = []
    for recording in recordings(Path(model), hypotheses.questions, endpoint):
        count = POWER_DRAWS if recording.fault else draws
        for listed in LISTED:
            row = measure(recording, listed, count, hypotheses.questions, tables, all_members)
            print(markdown(row), file=sys.stderr, end="", flush=True)
            rows.append(row)
    if write is not None:
        write_bytes(write / "certify.md", page(rows).encode())
    where = surroundings("torch", "transformers")
    deliver({"benchmark": "certify", **where, "model": Path(model).name, "requests": REQUESTS, "rows": rows}, write)


def measure(
    recording: Recording,
    listed: int,
    draws: int,
    questions: Sequence[Question],
    tables: Tables,
    all_members: Sequence[Member],
) -> dict[str, Any]:
    """Return how many of `draws` resamplings of a recording are alarms. listed: log-probabilities of each answer."""
    answers = as_answers(questions, [keep_likeliest(token, listed) for token in recording.tokens], tables)
    first = alarms(all_members, log_likelihoods(all_members, answers), REQUESTS, draws)
    requests = first[first > 0]
    upper = None
    if not recording.fault:
        upper = upper_bound(len(requests), draws)
    median_requests = None
    if len(requests):
        median_requests = float(np.median(requests))
    return {
        "endpoint": recording.endpoint,
        "fault": recording.fault,
        "listed": listed,
        "draws": draws,
        "alarms": len(requests),
        "upper": upper,
        "median_requests": median_requests,
    }


def recordings(model: Path, questions: Sequence[Question], endpoints: Sequence[str]) -> Iterator[Recording]:
    """Yield the answers of all endpoints: as published, then with faults."""
    for text in endpoints:
        name, url, served_name = text.split("=", 2)
        server = Endpoint(url, served_name, None, 60, 0, len(questions))
        form = Form(echoes=False, names_ids=False)
        yield Recording(name, "", [server.ask(question, form).token for question in questions])
    from benchmarks import certify_faults  # loads torch

    for dtype in certify_faults.DTYPES:
        logits = certify_faults.logits_of(model, questions, dtype, "")
        yield Recording(f"transformers {dtype}", "", tokens_of(questions, logits, ""))
    dtype = certify_faults.DTYPES[-1]
    for fault in certify_faults.FAULTS:
        logits = certify_faults.logits_of(model, questions, dtype, fault)
        yield Recording(f"transformers {dtype}", fault, tokens_of(questions, logits, fault))


def tokens_of(questions: Sequence[Question], logits: np.ndarray, fault: str) -> list[Token]:
    """Return what a server would answer by logits [questions, vocab_size]."""
    random = np.random.default_rng(0)
    tokens = []
    for question, row in zip(questions, logits.astype(np.float64)):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        scores = logprobs
        if fault == PENALTY:
            scores = penalised(row, question.prompt_ids, 1.2)
        if fault == DRAWN:
            scores = logprobs + random.gumbel(size=len(row))
        chosen = int(scores.argmax())
        likeliest = [*np.argsort(-logprobs)[: LISTED[0]].tolist(), chosen]
        by_id = {f"token_id:{token}": float(logprobs[token]) for token in likeliest}
        tokens.append(Token(f"token_id:{chosen}", by_id))
    return tokens


def keep_likeliest(token: Token, count: int) -> Token:
    """Return a token with fewer log-probabilities; the one that was chosen always has its own."""
    if count == 0:
        return Token(token.text, {})
    by_logprob = sorted(token.logprobs.items(), key=lambda item: -item[1])
    return Token(token.text, {**dict(by_logprob[:count]), token.text: token.logprobs[token.text]})


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
    return HEADER + "".join(markdown(row) for row in rows)


def markdown(row: dict[str, Any]) -> str:
    """Return a row of the page's table."""
    bound = ""
    if row["upper"] is not None:
        bound = f"{row['upper']:.1e}"
    requests = ""
    if row["median_requests"] is not None:
        requests = f"{row['median_requests']:.0f}"
    fault = row["fault"] or PUBLISHED
    listed = row["listed"] or "tokens"
    return f"| {row['endpoint']} | {fault} | {listed} | {row['alarms']} of {row['draws']} | {bound} | {requests} |\n"
