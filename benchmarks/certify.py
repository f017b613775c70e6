"""`certify`: how often `lockstep certify` is wrong, and how many requests it takes.

Recorded answers to all questions are drawn again, with replacement, thousands of times: those of endpoints as published
(servers of `--endpoint`, transformers in its own fp32, fp16 and bf16 kernels) for false alarms, those of planted faults
for power. Each is judged by 20, 5 and 1 log-probabilities, and by tokens alone. `--live` certifies servers, with the
questions in another order each time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from benchmarks import options
from benchmarks.measure import deliver, read_json, surroundings
from lockstep.artifacts.certificate import Hypotheses, Question
from lockstep.artifacts.files import sha256_file, write_bytes
from lockstep.artifacts.places import FileEntry
from lockstep.certify.answers import as_answers, read_tables
from lockstep.certify.client import Endpoint, Form, Token
from lockstep.certify.likelihood import Member, Tables, alarms, log_likelihoods, members, penalised
from lockstep.certify.run import certify

DRAWN = "drawn at temperature 1"
PENALTY = "a repetition penalty of 1.2"
CROSSED = "another request's answer, 1 in 4, at once"
LISTED = (20, 5, 1, 0)
REQUESTS = 300
ALONE = 272  # of these, at most; 25 are for company,
AT_ONCE = 64  # where answers alone decide, of 65 at once
DRAWS = 5_000
POWER_DRAWS = 500
OPTIONS = (
    options.option("--model", "The folder of a model in results, with reference and hypotheses.", "results/demo-llama"),
    options.option("--endpoint", "NAME=URL=MODEL of an endpoint as published.", (), many=True),
    options.number("--draws", DRAWS, "Resamplings for false alarms.", maximum=1_000_000),
    options.number("--live", 0, "Certificates of the endpoints, in turn.", minimum=0),
    options.WRITE,
)
HEADER = f"""\
# What `lockstep certify` sees

`python -m benchmarks certify --write records`: recorded answers, drawn again, {ALONE} each time ({AT_ONCE} of those at
once), that is of {REQUESTS} requests. "20", "5" and "1" are log-probabilities of each answer, "tokens" is their texts
alone; "bound" is the upper 95 % bound of the largest rate of false alarms, "requests" the median with 20. With
`--model FOLDER --endpoint NAME=URL=MODEL --live 20` servers are recorded and certified too. [Servers of
others](certify-peers.log) were certified by the command.
"""


@dataclass(frozen=True)
class Recording:
    """The answers of an endpoint to all questions. fault: "" for none. requests: that are judged."""

    endpoint: str
    fault: str
    tokens: Sequence[Token]
    requests: int = ALONE


def main(model: str, endpoint: Sequence[str], draws: int, live: int, write: Path | None) -> None:
    """Measure the false alarms and the power of `lockstep certify`."""
    path = Path(model) / "hypotheses" / "all.json"
    hypotheses = Hypotheses.load(path)
    tables = read_tables(path, hypotheses)
    all_members = members(tables)
    rows = []
    for recording in recordings(Path(model), hypotheses.questions, endpoint):
        count = POWER_DRAWS if recording.fault else draws
        rows.append(measure(recording, count, hypotheses.questions, tables, all_members))
        print(rows[-1], file=sys.stderr, flush=True)
    certificates = []
    for number in range(live):
        certificates.append(certified(path, endpoint[number % len(endpoint)], number))
        print(certificates[-1], file=sys.stderr, flush=True)
    name = Path(model).name
    where = surroundings("torch", "transformers")
    record = {"benchmark": f"certify-{name}", **where, "model": name, "rows": rows, "live": certificates}
    deliver(record, write)
    if write is not None:
        records = [read_json(path) for path in sorted((write / "bench").glob("certify-*.json"))]
        write_bytes(write / "certify.md", page(records).encode())


def measure(
    recording: Recording, draws: int, questions: Sequence[Question], tables: Tables, all_members: Sequence[Member]
) -> dict[str, Any]:
    """Return how many of `draws` resamplings of a recording are alarms, by log-probabilities of each answer."""
    counts = {}
    upper = None
    median_requests = None
    for listed in LISTED:
        answers = as_answers(questions, [keep_likeliest(token, listed) for token in recording.tokens], tables)
        first = alarms(all_members, log_likelihoods(all_members, answers), recording.requests, draws)
        requests = first[first > 0].tolist()
        counts[str(listed)] = len(requests)
        if listed == LISTED[0] and requests:
            median_requests = statistics.median(requests)
    if not recording.fault:
        upper = upper_bound(max(counts.values()), draws)
    return {
        "endpoint": recording.endpoint,
        "fault": recording.fault,
        "requests": recording.requests,
        "draws": draws,
        "alarms": counts,
        "upper": upper,
        "median_requests": median_requests,
    }


def certified(path: Path, endpoint: str, seed: int) -> dict[str, Any]:
    """Certify an endpoint with the questions in an order of their own; return the verdict."""
    name, url, served_name = endpoint.split("=", 2)
    with tempfile.TemporaryDirectory() as folder:
        shuffled = shuffle(path, Path(folder) / path.name, seed)
        certificate = certify(Endpoint(url, served_name, None, 300, 0, REQUESTS), shuffled)
    return {
        "endpoint": name,
        "verdict": certificate.verdict,
        "best": certificate.best,
        "requests": certificate.requests,
        "log_evidence": round(certificate.log_evidence, 1),
    }


def shuffle(path: Path, out: Path, seed: int) -> Path:
    """Write hypotheses with the questions in another order to `out`; return it."""
    hypotheses = Hypotheses.load(path)
    order = np.random.default_rng(seed).permutation(len(hypotheses.questions))
    arrays = load_file(path.parent / hypotheses.tables.file)
    tables = out.with_suffix(".safetensors")
    write_bytes(tables, save({name: np.ascontiguousarray(array[order]) for name, array in arrays.items()}))
    questions = tuple(hypotheses.questions[number] for number in order.tolist())
    entry = FileEntry(tables.name, sha256_file(tables))
    replace(hypotheses, questions=questions, tables=entry).save(out)
    return out


def recordings(model: Path, questions: Sequence[Question], endpoints: Sequence[str]) -> Iterator[Recording]:
    """Yield the answers of all endpoints: as published, then with faults."""
    for text in endpoints:
        name, url, served_name = text.split("=", 2)
        server = Endpoint(url, served_name, None, 300, 0, len(questions))
        form = Form(echoes=False, names_ids=False)
        yield Recording(name, "", [server.ask(question, form).token for question in questions])
    from benchmarks import certify_faults  # loads torch

    for dtype in certify_faults.DTYPES:
        logits = certify_faults.logits_of(model, questions, dtype, "")
        published = tokens_of(questions, logits, "")
        yield Recording(f"transformers {dtype}", "", published)
    crossed = [*published]
    crossed[::4] = [*published[1:], published[0]][::4]
    yield Recording(f"transformers {dtype}", CROSSED, crossed, AT_ONCE)
    for fault in certify_faults.FAULTS:
        logits = certify_faults.logits_of(model, questions, dtype, fault)
        tokens = tokens_of(questions, logits, fault)
        yield Recording(f"transformers {dtype}", fault, tokens)
        if fault == certify_faults.FAULTS[0]:
            yield Recording(f"transformers {dtype}", f"{fault}, at once", tokens, AT_ONCE)


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


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records of all models as a page."""
    return HEADER + "".join(_section(record) for record in records)


def _section(record: Mapping[str, Any]) -> str:
    lines = [f"\n## {record['model']}\n"]
    lines += ["| as published, false alarms of | 20 | 5 | 1 | tokens | bound |", "|---|---:|---:|---:|---:|---:|"]
    for row in record["rows"]:
        alarms = [row["alarms"][str(listed)] for listed in LISTED]
        if not row["fault"]:
            lines.append(_row(f"{row['endpoint']}, {row['draws']:,} draws", *alarms, f"{row['upper']:.1e}"))
    lines += ["", "| fault, power | 20 | 5 | 1 | tokens | requests |", "|---|---:|---:|---:|---:|---:|"]
    for row in record["rows"]:
        powers = [f"{row['alarms'][str(listed)] / row['draws']:.1%}" for listed in LISTED]
        if row["fault"]:
            lines.append(_row(row["fault"], *powers, row["median_requests"] or ""))
    live = record["live"]
    if live:
        lines += ["", "| live, the questions in another order each time | verdict | runs | requests |"]
        lines.append("|---|---|---:|---:|")
    for (endpoint, verdict), runs in Counter((run["endpoint"], run["verdict"]) for run in live).items():
        requests = [run["requests"] for run in live if (run["endpoint"], run["verdict"]) == (endpoint, verdict)]
        lines.append(_row(endpoint, verdict, runs, f"{min(requests)} to {max(requests)}"))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
