"""`certify`: how often `lockstep certify` is wrong, and how many requests it takes.

Recorded answers to all questions are drawn again, with replacement, thousands of times: those of endpoints as published
(servers of `--endpoint`, transformers in its own fp32, fp16 and bf16 kernels) for false alarms, those of planted faults
(servers of `--faulty`, transformers) for power. Each is judged by 20, 5 and 1 log-probabilities, and by tokens alone.
`--live` certifies servers, with the questions in another order each time, and through proxies that plant faults.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from benchmarks import options
from benchmarks.certify_proxy import CROSSED, DRAWN, FAULTS, PENALTY, SOMETIMES, Proxy
from benchmarks.measure import deliver, read_json, surroundings
from lockstep.artifacts.certificate import DIFFERS, LOOK_INTERVAL, Hypotheses, Question
from lockstep.artifacts.files import sha256_file, write_bytes
from lockstep.artifacts.places import FileEntry
from lockstep.certify.answers import as_answers, has_unknown_text, read_tables
from lockstep.certify.client import Endpoint, Form, Token, token_id
from lockstep.certify.likelihood import (
    EXCLUDED,
    LIMIT,
    PUBLISHED,
    RARE,
    Member,
    Tables,
    log_evidence,
    log_likelihoods,
    members,
    penalised,
    power,
    resampled,
)
from lockstep.certify.run import MIN_POWER, certify

LISTED = (20, 5, 1, 0)
REQUESTS = 300
ALONE = 272  # of these, at most; 25 are for company,
AT_ONCE = 64  # where answers alone decide, of 65 at once
DRAWS = 5_000
POWER_DRAWS = 500
PLANTED_RUNS = 2  # of each fault
OPTIONS = (
    options.option("--model", "The folder of a model in results, with reference and hypotheses.", "results/demo-llama"),
    options.option("--endpoint", "NAME=URL=MODEL of an endpoint as published.", (), many=True),
    options.option("--faulty", "FAULT=URL=MODEL of an endpoint with a fault.", (), many=True),
    options.number("--draws", DRAWS, "Resamplings for false alarms.", maximum=1_000_000),
    options.number("--live", 0, "Certificates of the endpoints, in turn.", minimum=0),
    options.WRITE,
)
HEADER = f"""\
# What `lockstep certify` sees

`python -m benchmarks certify --write records`: recorded answers, drawn again, {ALONE} each time ({AT_ONCE} of those at
once), that is of {REQUESTS} requests. "20", "5" and "1" are log-probabilities of each answer, "tokens" is their texts
alone; "bound" is the upper 95 % bound of the largest rate of false alarms, "requests" the median with 20, "unknown" of
all answers those with a text that no candidate has. The power that the command states is that of the way of each
hypothesis that shows least. With `--model FOLDER --endpoint NAME=URL=MODEL --faulty FAULT=URL=MODEL --live
20` servers are recorded and certified too, as they are and through proxies that plant faults. [Servers of
others](certify-peers.log) were certified by the command.
"""


@dataclass(frozen=True)
class Recording:
    """The answers of an endpoint to all questions. fault: "" for none. requests: that are judged."""

    endpoint: str
    fault: str
    tokens: Sequence[Token]
    requests: int = ALONE


def main(model: str, endpoint: Sequence[str], faulty: Sequence[str], draws: int, live: int, write: Path | None) -> None:
    """Measure the false alarms and the power of `lockstep certify`."""
    path = Path(model) / "hypotheses" / "all.json"
    hypotheses = Hypotheses.load(path)
    tables = read_tables(path, hypotheses)
    judge = Judge(hypotheses.questions, tables, members(tables))
    rows = []
    for recording in recordings(Path(model), hypotheses.questions, endpoint, faulty):
        rows.append(judge.measure(recording, POWER_DRAWS if recording.fault else draws))
        print(rows[-1], file=sys.stderr, flush=True)
    certificates = []
    for number in range(live):
        certificates.append(certified(path, endpoint[number % len(endpoint)], "", number))
        print(certificates[-1], file=sys.stderr, flush=True)
    if live:
        planted = [(endpoint[0], fault) for fault in FAULTS] + [(text, text.partition("=")[0]) for text in faulty]
        for number, (text, fault) in enumerate(planted * PLANTED_RUNS):
            certificates.append(certified(path, text, fault, number))
            print(certificates[-1], file=sys.stderr, flush=True)
    name = Path(model).name
    where = surroundings("torch", "transformers")
    record = {"benchmark": f"certify-{name}", **where, "model": name, "rows": rows, "live": certificates}
    deliver({**record, "power": judge.stated}, write)
    if write is not None:
        records = [read_json(path) for path in sorted((write / "bench").glob("certify-*.json"))]
        write_bytes(write / "certify.md", page(records).encode())


class Judge:
    """Judges recordings. stated: {log-probabilities: {hypothesis: power}} of the last recording as published."""

    def __init__(self, questions: Sequence[Question], tables: Tables, all_members: Sequence[Member]) -> None:
        self.stated: dict[str, dict[str, float]] = {}
        self._questions = questions
        self._tables = tables
        self._members = all_members

    def measure(self, recording: Recording, draws: int) -> dict[str, Any]:
        """Return the verdicts on `draws` resamplings of a recording, by log-probabilities of each answer."""
        alarms = {}
        passes = {}
        upper = None
        median_requests = None
        unknown_texts = 0
        for listed in LISTED:
            pairs = zip(recording.tokens, self._questions)
            tokens = [keep_likeliest(token, listed, question) for token, question in pairs]
            are_unknown = map(has_unknown_text, self._questions, tokens, self._tables.values[PUBLISHED])
            unknown_texts = max(unknown_texts, sum(are_unknown))
            likelihoods = log_likelihoods(self._members, as_answers(self._questions, tokens, self._tables))
            if not recording.fault:
                self.stated[str(listed)] = self._power(likelihoods, listed)
            alarm, decided = self._first_looks(likelihoods, listed, recording.requests, draws)
            is_alarm = (alarm > 0) & ((decided == 0) | (alarm <= decided))
            alarms[str(listed)] = int(is_alarm.sum())
            passes[str(listed)] = int(((decided > 0) & ~is_alarm).sum())
            if listed == LISTED[0] and is_alarm.any():
                median_requests = statistics.median(alarm[is_alarm].tolist())
        if not recording.fault:
            upper = upper_bound(max(alarms.values()), draws)
        return {
            "endpoint": recording.endpoint,
            "fault": recording.fault,
            "requests": recording.requests,
            "draws": draws,
            "alarms": alarms,
            "passes": passes,
            "upper": upper,
            "median_requests": median_requests,
            "unknown_texts": unknown_texts,
        }

    def _power(self, likelihoods: np.ndarray, listed: int) -> dict[str, float]:
        published = [number for number, member in enumerate(self._members) if member.hypothesis == PUBLISHED]
        best = self._members[int(likelihoods[published].sum(axis=1).argmax())]
        names = {member.hypothesis for member in self._members}
        return power(self._members, best, listed, ALONE, names)

    def _first_looks(
        self, likelihoods: np.ndarray, listed: int, requests: int, draws: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return after how many requests each draw is an alarm, and excludes what it must; 0: never."""
        stated = self.stated[str(listed)]
        testable = [name for name, chance in stated.items() if chance >= MIN_POWER and name != RARE]
        alarms = []
        decisions = []
        for batch in resampled(self._members, likelihoods, requests, draws):
            alarms.append(_first(log_evidence(batch) >= LIMIT))
            excluded = [batch[PUBLISHED] - batch[name] >= EXCLUDED for name in testable]
            # At once, answers are compared with those before, and nothing is excluded.
            is_judged = requests == ALONE and bool(testable)
            decisions.append(_first(np.all(excluded, axis=0) if is_judged else np.zeros(batch[PUBLISHED].shape)))
        return np.concatenate(alarms), np.concatenate(decisions)


def _first(holds: np.ndarray) -> np.ndarray:
    return np.where(holds.any(axis=1), LOOK_INTERVAL * (holds.argmax(axis=1) + 1), 0)


def certified(path: Path, endpoint: str, fault: str, seed: int) -> dict[str, Any]:
    """Certify an endpoint with the questions in an order of their own; return the verdict.

    fault: "" for none, one that a proxy plants, or the endpoint's own.
    """
    name, url, served_name = endpoint.split("=", 2)
    with contextlib.ExitStack() as stack:
        shuffled = shuffle(path, Path(stack.enter_context(tempfile.TemporaryDirectory())) / path.name, seed)
        if fault in FAULTS:
            url = stack.enter_context(Proxy(url, fault, Hypotheses.load(path).questions)).url
        certificate = certify(Endpoint(url, served_name, None, 300, 0, REQUESTS), shuffled)
    return {
        "endpoint": name,
        "fault": fault,
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


def recordings(
    model: Path, questions: Sequence[Question], endpoints: Sequence[str], faulty: Sequence[str]
) -> Iterator[Recording]:
    """Yield the answers of all endpoints: as published, then with faults."""
    for text in endpoints:
        yield Recording(text.partition("=")[0], "", asked(text, questions))
    from benchmarks import certify_faults  # loads torch

    for dtype in certify_faults.DTYPES:
        logits = certify_faults.logits_of(model, questions, dtype, "")
        published = tokens_of(questions, logits, "")
        yield Recording(f"transformers {dtype}", "", published)
    for fault, every in {CROSSED: 4, **SOMETIMES}.items():
        crossed = [*published]
        crossed[::every] = [*published[1:], published[0]][::every]
        yield Recording(f"transformers {dtype}", fault, crossed, AT_ONCE if fault == CROSSED else ALONE)
    for text in faulty:
        yield Recording("", text.partition("=")[0], asked(text, questions))
    for fault in certify_faults.FAULTS:
        logits = certify_faults.logits_of(model, questions, dtype, fault)
        tokens = tokens_of(questions, logits, fault)
        yield Recording(f"transformers {dtype}", fault, tokens)
        if fault == certify_faults.FAULTS[0]:
            yield Recording(f"transformers {dtype}", f"{fault}, at once", tokens, AT_ONCE)


def asked(endpoint: str, questions: Sequence[Question]) -> list[Token]:
    """Return an endpoint's answers."""
    _, url, served_name = endpoint.split("=", 2)
    server = Endpoint(url, served_name, None, 300, 0, len(questions))
    form = Form(echoes=False, names_ids=False)
    return [server.ask(question, form).token for question in questions]


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


def keep_likeliest(token: Token, count: int, question: Question) -> Token:
    """Return a token with fewer log-probabilities; the one that was chosen always has its own. 0: as text alone."""
    if count == 0:
        texts = dict(zip(question.tokens, question.texts))
        number = token_id(token.text)
        return Token(token.text if number is None else texts.get(number, ""), {})
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
    honest = [row for row in record["rows"] if not row["fault"]]
    for row in honest:
        alarms = [row["alarms"][str(listed)] for listed in LISTED]
        lines.append(_row(f"{row['endpoint']}, {row['draws']:,} draws", *alarms, f"{row['upper']:.1e}"))
    lines += ["", "| as published, and decided | 20 | 5 | 1 | tokens | unknown |", "|---|---:|---:|---:|---:|---:|"]
    lines += [_row(row["endpoint"], *_shares(row, "passes"), row["unknown_texts"]) for row in honest]
    lines += ["", "| fault, power | 20 | 5 | 1 | tokens | requests |", "|---|---:|---:|---:|---:|---:|"]
    for row in record["rows"]:
        if row["fault"]:
            lines.append(_row(row["fault"], *_shares(row, "alarms"), row["median_requests"] or ""))
    lines += ["", "| power that the command states, in bf16 | 20 | 5 | 1 | tokens |", "|---|---:|---:|---:|---:|"]
    for name in record["power"]["20"]:
        lines.append(_row(name, *(f"{record['power'][str(listed)][name]:.0%}" for listed in LISTED)))
    if record["live"]:
        lines += ["", "| live, the questions in another order each time | verdict | runs | requests |"]
        lines.append("|---|---|---:|---:|")
    runs: dict[tuple[str, str], list[int]] = {}
    for run in record["live"]:
        verdict = f"differs: {run['best']}" if run["verdict"] == DIFFERS else run["verdict"]
        runs.setdefault((run["fault"] or run["endpoint"], verdict), []).append(run["requests"])
    for (name, verdict), requests in runs.items():
        lines.append(_row(name, verdict, len(requests), f"{min(requests)} to {max(requests)}"))
    return "\n".join(lines) + "\n"


def _shares(row: Mapping[str, Any], kind: str) -> list[str]:
    return [f"{row[kind][str(listed)] / row['draws']:.1%}" for listed in LISTED]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
