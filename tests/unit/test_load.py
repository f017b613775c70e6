"""`lockstep load`: times count from the scheduled send, and what is printed is what the records add up to."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import DEMO

from lockstep.cli.main import main
from lockstep.errors import CheckError, InputError
from lockstep.load import arrivals, workload
from lockstep.load.figures import figures, goals
from lockstep.load.http import Client
from lockstep.load.measure import LoadSpec, measure
from lockstep.load.records import CANCELLED, COMPLETED, FAILED, REFUSED, Prompt, Record
from lockstep.load.report import LoadReport
from lockstep.load.wire import EventReader
from lockstep.runtime.tokenizer import Tokenizer
from scripted_server import ScriptedServer, Step, words
from some import some


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def prompts(number: int, tokens: int = 4) -> list[Prompt]:
    return [Prompt([17, 18, 19], tokens) for _ in range(number)]


def records_of(server: ScriptedServer, spec: LoadSpec) -> list[Record]:
    """The records of the spec's only run."""

    async def run() -> list[Record]:
        client = Client(server.url)
        async with client:
            _, found = await measure(client, spec, None, lambda line: None)
        (records,) = found.values()
        return records

    return asyncio.run(run())


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `lockstep load`."""
    capsys.readouterr()
    try:
        main(["load", *map(str, arguments)], prog_name="lockstep")
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


# --- arrivals


def test_exponential_arrivals_are_a_poisson_process() -> None:
    number = 2001
    rate = 8.0
    seeds = 400
    distances = []
    correlations = []
    for seed in range(seeds):
        gaps = np.diff(arrivals.schedule(number, rate, "exponential", seed))
        expected = 1 - np.exp(-rate * np.sort(gaps))
        ranks = np.arange(number) / (number - 1)
        above = (ranks[1:] - expected).max()
        below = (expected - ranks[:-1]).max()
        distances.append(max(above, below) * math.sqrt(number - 1))
        correlations.append(np.corrcoef(gaps[:-1], gaps[1:])[0, 1] * math.sqrt(number))
    # Kolmogorov and Smirnov: gaps of that distribution are further from it than 0.828 in half of all samples, and than
    # 1.358 in 5 % of them. The limits are four deviations of a count of 400: 10 and 4.4.
    assert abs(sum(distance > 0.828 for distance in distances) - 200) < 40
    assert abs(sum(distance > 1.358 for distance in distances) - 20) < 18
    # A gap tells nothing of the next: the correlation, so scaled, is normal with deviation 1; the mean of 400 is within
    # four deviations of 1/20, and their deviation within four of 1 / sqrt(800).
    assert abs(np.mean(correlations)) < 0.2 and abs(np.std(correlations) - 1) < 0.15


def test_a_schedule_is_the_same_for_a_seed_and_scales_with_the_rate() -> None:
    one = arrivals.schedule(50, 2.0, "exponential", 3)
    assert (one == arrivals.schedule(50, 2.0, "exponential", 3)).all() and one[0] == 0
    assert np.allclose(one, 2 * arrivals.schedule(50, 4.0, "exponential", 3))
    assert (one != arrivals.schedule(50, 2.0, "exponential", 4)).any()


def test_other_arrivals() -> None:
    assert arrivals.schedule(4, 2.0, "constant", 0).tolist() == [0, 0.5, 1, 1.5]
    assert arrivals.schedule(3, math.inf, "exponential", 0).tolist() == [0, 0, 0]
    for rate, kind in ((0.0, "constant"), (-2.0, "exponential"), (math.nan, "exponential"), (1.0, "gamma")):
        with pytest.raises(InputError, match="expected"):
            arrivals.schedule(3, rate, kind, 0)


# --- times


@pytest.mark.long
def test_a_stall_of_the_server_is_in_the_latency_of_all_that_were_due_meanwhile(server: ScriptedServer) -> None:
    spec = LoadSpec(prompts(20, 1), {}, rates=(20.0,), arrivals="constant", warmup=0)
    server.stall(0.3, 0.5)
    records = records_of(server, spec)
    latencies = [1000 * (record.latency or 0) for record in records]
    held = [latency for latency in latencies if latency > 50]
    # Ten are due in half a second, and each waits for what is left of it: the first for nearly all, the last for 50 ms.
    assert len(held) >= 8 and max(held) > 400
    assert all(record.status == COMPLETED for record in records)


def test_what_waits_for_its_turn_has_the_wait_in_its_latency(server: ScriptedServer) -> None:
    """A client that times from the send would show 50 ms for each of them (vllm#54101)."""

    def slow(body: dict[str, Any], number: int) -> Iterator[Step]:
        yield 0.05
        yield "w "

    server.script = slow
    records = records_of(server, LoadSpec(prompts(6, 1), {}, concurrency=1, warmup=0))
    for number, record in enumerate(records):
        assert record.scheduled == 0 and record.sent is not None and record.latency is not None
        assert record.sent >= 0.05 * number and record.latency >= 0.05 * (number + 1)
    assert records[5].ttft is not None and records[5].ttft >= 0.3


def test_the_first_token_is_the_first_text_and_not_the_role(server: ScriptedServer) -> None:
    server.script = lambda body, number: iter((0.1, "a ", 0.1, "b "))
    (record,) = records_of(server, LoadSpec([Prompt("hello there", 2)], {}, endpoint="chat", warmup=0))
    assert record.ttft is not None and record.ttft >= 0.1 and len(record.gaps) == 1 and record.gaps[0] > 0.05
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello there"}]


@pytest.mark.long
def test_connections_are_used_again_but_not_after_a_pause(server: ScriptedServer) -> None:
    """A server closes what is idle for long, and a request that meets the closing would fail."""
    due = [0.0, 0.1, 0.2, 1.5, 1.6]
    one_by_one = {"concurrency": 1, "warmup": 0}  # else a slow answer takes another one
    spec = LoadSpec([Prompt("a", 1, at) for at in due], {}, **one_by_one)
    records = records_of(server, spec)
    assert all(record.status == COMPLETED for record in records) and server.connections == 2


# In a process of its own: the server would take the other half of the files of this one, and could accept no more.
SEVERAL_RUNS = """
import resource, sys
from lockstep.cli.main import main

resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for lengths, *options in ("4,0,40,0", "--requests", "200", "-c", "90"), ("4,0,1,0", "--requests", "300"):
    try:
        main(["load", sys.argv[1], "--token-norm-dist", lengths, *options])
        code = 0
    except SystemExit as ended:
        code = ended.code
    print("ended:", code, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.long
def test_more_requests_at_once_than_a_process_may_have_files(server: ScriptedServer) -> None:
    done = subprocess.run([sys.executable, "-c", SEVERAL_RUNS, server.url], capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert ended == ["ended: 0 256", "ended: 0 364"], done.stdout + done.stderr


def test_without_httptools_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    code, _, err = told(capsys, "http://127.0.0.1:1", "--token-norm-dist", "4,1,4,1")
    assert (
        code == 2 and err.endswith('pip install ".[load]" in a clone of this project\n') and len(err.splitlines()) == 1
    )


# --- cancel


def test_cancelled_requests_leave_and_are_in_no_time(server: ScriptedServer) -> None:
    spec = LoadSpec(prompts(40, 200), {}, cancel=0.5, cancel_within=0.05, warmup=0)
    records = records_of(server, spec)
    cancelled = [record for record in records if record.status == CANCELLED]
    expected = [after is not None for after in arrivals.cancellations(40, 0.5, 0.05, 0)]
    assert [record.status == CANCELLED for record in records] == expected and 10 < len(cancelled) < 30
    assert all(record.sent is not None and record.end and len(record.chunks) < 200 for record in cancelled)
    found = figures(records)
    assert found["completed"] == 40 - len(cancelled) and found["cancelled"] == len(cancelled)
    assert (found["latency_mean_ms"] or 0) >= 400  # 200 pieces, 2 ms apart: only those that ran to their end
    # The server saw each of them go that it had begun; the last ones it sees with its next piece.
    until = time.monotonic() + 10
    while len(server.bodies) - len(server.gone) > 40 - len(cancelled) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(server.bodies) - len(server.gone) == 40 - len(cancelled)


# --- what a server may do


@pytest.mark.parametrize(("steps", "said"), some([
    ((b"",), "closed before the answer was whole"),
    (("a ", {"error": {"message": "engine\ndied"}}), "engine died"),
    (("a ", {"choices": [7]}), "expected an event of OpenAI's format"),
    ((b"0\r\n\r\n",), r"ends in \[DONE\]"),
    ((b"zz\r\n",), "expected an answer in HTTP"),
]))  # fmt: skip
def test_an_answer_that_is_not_whole_is_a_failure(server: ScriptedServer, steps: tuple[Step, ...], said: str) -> None:
    server.script = lambda body, number: iter(steps if number == 1 else ("a ",))
    records = records_of(server, LoadSpec(prompts(3, 1), {}, concurrency=1, warmup=0))
    assert [record.status for record in records] == [COMPLETED, FAILED, COMPLETED]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(records[1].error)


def test_an_answer_without_usage_is_a_failure(server: ScriptedServer) -> None:
    server.usage = lambda body: {}
    (record,) = records_of(server, LoadSpec(prompts(1), {}, warmup=0))
    assert record.status == FAILED and "usage" in (record.error or "")


def test_refusals_are_counted_apart_from_failures(server: ScriptedServer) -> None:
    server.refusal = lambda number: {0: (429, "queue full"), 1: (503, "draining"), 2: (500, "no")}.get(number)
    records = records_of(server, LoadSpec(prompts(4), {}, concurrency=1, warmup=0))
    assert [record.status for record in records] == [REFUSED, REFUSED, FAILED, COMPLETED]
    assert records[0].error == "HTTP 429: queue full" and records[2].http_status == 500


def test_a_request_that_takes_too_long_is_a_failure(server: ScriptedServer) -> None:
    server.script = lambda body, number: iter((5.0, "a "))
    (record,) = records_of(server, LoadSpec(prompts(1), {}, timeout=0.1, warmup=0))
    assert record.status == FAILED and "within 0.1 s" in (record.error or "")


def test_events_are_the_same_however_the_stream_is_cut() -> None:
    stream = b': ping\r\ndata: {"a":\r\ndata: 1}\r\n\r\nevent: x\ndata:two\n\n\ndata: [DONE]\n\n'
    for first in range(len(stream)):
        reader = EventReader()
        assert [*reader.feed(stream[:first]), *reader.feed(stream[first:])] == [b'{"a":\n1}', b"two", b"[DONE]"]


# --- figures


def test_figures_are_those_that_records_add_up_to_by_hand() -> None:
    records = [
        Record(0, 0.0, 0.0, [0.1, 0.2, 0.4], 0.5, COMPLETED, input_tokens=10, output_tokens=3),
        Record(1, 1.0, 1.1, [1.3], 1.4, COMPLETED, input_tokens=20, output_tokens=1),
        Record(2, 1.0, 1.0, [1.2], 1.25, CANCELLED),
        Record(3, 1.5, 1.5, [], 2.0, REFUSED),
    ]
    found = figures(records, goals("ttft:250 tpot:140"))
    expected = {
        "requests": 4, "completed": 2, "cancelled": 1, "refused": 1, "failed": 0, "duration_s": 2.0,
        "requests_per_s": 1.0, "output_tokens_per_s": 2.0, "input_tokens_mean": 15, "output_tokens_mean": 2,
        "tokens_per_chunk": 1.0, "latency_mean_ms": 450, "latency_p50_ms": 450, "latency_p90_ms": 490,
        "latency_max_ms": 500, "ttft_mean_ms": 200, "ttft_max_ms": 300, "tpot_mean_ms": 150, "itl_mean_ms": 150,
        "itl_p50_ms": 150, "itl_max_ms": 200, "send_delay_max_ms": 100, "goodput": 0.0,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    # The first is over in tpot (150 ms), the second in ttft (300 ms); with 160 the first is good.
    assert figures(records, goals("ttft:250,tpot:160"))["goodput"] == pytest.approx(0.5)
    assert figures(records, goals("e2el:450"))["goodput"] == pytest.approx(0.5)


def test_figures_of_nothing_are_none() -> None:
    found = figures([Record(0, 0.0, end=1.0)])
    assert found["failed"] == 1 and found["latency_mean_ms"] is None and found["requests_per_s"] == 0


def test_what_is_printed_and_written_is_what_the_records_say(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--token-norm-dist", "8,2,6,1", "--requests", 12, "--rate", "100,200")
    code, out, _ = told(capsys, server.url, *sizes, "--out", tmp_path)
    assert code == 0
    report = LoadReport.load(tmp_path / "load.json")
    records = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 24 and [run.rate for run in report.runs] == [100, 200]
    for column, run in enumerate(report.runs):
        mine = [record for record in records if record["rate"] == run.rate]
        latencies = [1000 * (record["end"] - record["scheduled"]) for record in mine]
        tokens = sum(record["output_tokens"] for record in mine)
        seconds = max(record["end"] for record in mine)
        lines = {" ".join(line.split()[:-2]): line.split()[-2:][column] for line in out.splitlines()}
        assert lines["Total requests"] == lines["Completed"] == "12"
        assert lines["Avg. latency (ms)"] == f"{np.mean(latencies):.1f}"
        assert lines["P99 latency (ms)"] == f"{np.percentile(latencies, 99):.1f}"
        assert lines["OP tokens/sec"] == f"{tokens / seconds:.1f}"
        assert lines["Total latency (ms)"] == f"{1000 * seconds:.1f}"
    assert len({body["max_tokens"] for body in server.bodies}) > 1  # the lengths were drawn
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in server.bodies)
    for name in ("latency", "throughput", "timeline"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")


# --- workloads


def test_lengths_of_a_normal_distribution() -> None:
    made = workload.normal(2000, [100, 10, 20, 4], 1)
    inputs = [len(prompt.content) for prompt in made]
    outputs = [prompt.max_tokens for prompt in made]
    # Means of 2,000 draws lie within four of their deviations, 10 / sqrt(2000) and 4 / sqrt(2000); seeds are fixed.
    assert abs(np.mean(inputs) - 100) < 0.9 and abs(np.mean(outputs) - 20) < 0.36
    assert abs(np.std(inputs) - 10) < 1 and min(outputs) >= 1
    assert made == workload.normal(2000, [100, 10, 20, 4], 1) != workload.normal(2000, [100, 10, 20, 4], 2)


def test_lengths_of_a_histogram(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    given = {"buckets": [4, 32], "freqs": [3, 1]}
    path.write_text(
        json.dumps({"input": given, "output": given, "x_ip": {"buckets": [7], "freqs": [1]}, "x_op": given})
    )
    made = workload.histogram(1000, path, None, 0)
    assert {len(prompt.content) for prompt in made} == {prompt.max_tokens for prompt in made} == {4, 32}
    # of 1,000 draws at 3 in 4, four deviations of sqrt(1000 * 3/16) = 13.7
    assert abs(sum(len(prompt.content) == 4 for prompt in made) - 750) < 55
    assert {len(prompt.content) for prompt in workload.histogram(50, path, "x", 0)} == {7}


def test_requests_of_a_trace_are_sent_at_its_times_and_share_its_prefixes(
    server: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5200, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]},
        {"timestamp": 5000, "input_length": 520, "output_length": 2, "hash_ids": [4, 8]},
        {"timestamp": 5100, "prompt": "a text", "max_tokens": 1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = workload.trace(path, None, 64, 0)
    records = records_of(server, LoadSpec(made, {}, warmup=0))
    assert [round(record.scheduled, 9) for record in records] == [0, 0.1, 0.2]
    assert all(record.sent is not None and record.sent >= record.scheduled for record in records)
    one, text, two = (body["prompt"] for body in server.bodies)
    assert (len(one), text, len(two)) == (520, "a text", 600)
    assert one[:512] == two[:512] and one[512:] != two[512:520]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    chat = [{"role": "user", "content": "hi"}]
    records = [
        {"input": "Say", "instruction": "it all.", "output": "one two three"},
        {"prompt": [5, 6], "max_tokens": 2},
        {"messages": chat},
    ]
    expected = [
        Prompt("Say it all.", 3),
        Prompt([5, 6], 2),
        Prompt(chat, 64),
    ]  # 1.3 tokens a word, as it is cut off there
    path.write_text(json.dumps(records))
    assert workload.dataset(path, None, 64) == expected
    path.write_text("\n".join(map(json.dumps, records)))
    assert workload.dataset(path, 2, 64) == expected[:2]


# --- check


@pytest.mark.long
def test_check_passes_on_the_same_and_fails_on_worse(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (server.url, "--token-norm-dist", "8,0,5,0", "--requests", 6, "--rate", 50)
    assert told(capsys, *asked, "--out", tmp_path)[0] == 0
    base = tmp_path / "load.json"
    # The machine is shared with other tests: a factor of 100 is not passed by its noise, and ten times as long is seen.
    assert told(capsys, *asked, "--check", base, "--rtol", 100)[0] == 0
    longer = max(0.2, 10 * (LoadReport.load(base).runs[0].figures["latency_p50_ms"] or 0) / 1000)
    server.script = lambda body, number: iter((longer, *words(body, number)))
    code, _, said = told(capsys, *asked, "--check", base, "--rtol", 4)
    assert code == 1 and said.splitlines()[-1].startswith(f"lockstep: error: {base}: 50/s: ") and "expected" in said
    assert any("latency_p50_ms" in line for line in said.splitlines())
    code, _, said = told(capsys, *asked, "--seed", 1, "--check", base)
    assert code == 2 and "seed 0, found 1" in said


def test_a_failure_is_worse_than_any_base() -> None:
    from lockstep.load.report import Run, worse

    good = figures([Record(0, 0.0, 0.0, [0.1], 0.2, COMPLETED, output_tokens=1)])
    bad = {**good, "failed": 1}
    base, found = (LoadReport("u", "m", {}, (Run(2.0, each),)) for each in (good, bad))
    assert worse(base, base, 0) == worse(base, found, 0) == []
    assert worse(found, base, 1e9) == ["2/s: failed: expected 0 within 100000000000%, found 1"]
    with pytest.raises(InputError, match="at 2/s"):
        worse(LoadReport("u", "m", {}, ()), base, 0)


# --- functional


FEW = ("--functional", "--token-norm-dist", "6,1,4,1", "--requests", 3)


@pytest.mark.long
def test_functional_finds_what_is_wrong(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda body, number: iter(("other ",) if number == 3 else ("same ",))
    code, _, said = told(capsys, server.url, *FEW)
    assert code == 1 and "prompt 1: expected the text of the whole answer when it is streamed, 'same '" in said
    server.bodies.clear()
    server.script = lambda body, number: iter(("other ",) if number == 8 else ("same ",))
    assert told(capsys, server.url, *FEW)[0] == 0
    server.bodies.clear()
    code, _, said = told(capsys, server.url, *FEW, "--exact")
    assert code == 1 and "beside the others, as alone" in said
    server.usage = lambda body: {"prompt_tokens": 1, "completion_tokens": 1}
    code, _, said = told(capsys, server.url, *FEW)
    assert code == 1 and "prompt tokens, found 1" in said


# --- the command


@pytest.mark.long
def test_the_spellings_of_tensorrt_llms_benchmark(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--input_mean 12 --input_stdev 5 --output_mean 3 --output_stdev 1 --num_requests 5"
    rate = ("--request_rate", 100, "--time-delay-dist", "exponential_dist")
    code, out, _ = told(capsys, server.url, *rate, "token_norm_dist", *options.split())
    assert code == 0 and out.splitlines()[1].startswith("Requests/Sec") and "Total requests" in out
    code, out, _ = told(capsys, server.url, *rate, "--token-norm-dist", "12,5,3,1", "--requests", 5, "--json")
    assert code == 0 and json.loads(out)["settings"]["requests"] == 5
    prompts_sent = [body["prompt"] for body in server.bodies]
    assert prompts_sent[:6] == prompts_sent[6:]  # the warm-up's and five: both spellings ask the same


def test_a_dataset_is_sent_as_token_ids(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([{"input": text, "instruction": "", "output": "a b"} for text in ("Hello", "H" * 99)]))
    options = ("-i", "http", "dataset", "--dataset", path, "--tokenizer_dir", DEMO, "--tokenizer_type", "llama")
    assert told(capsys, server.url, *options, "--max_input_len", 20, "--num_requests", 5000)[0] == 0
    expected = Tokenizer(DEMO / "tokenizer.json").encode("Hello")
    assert {tuple(body["prompt"]) for body in server.bodies} == {tuple(expected)}


BAD = {
    "no workload": ((), "expected one of --dataset, --token-norm-dist, --histogram, --trace, found none"),
    "two workloads": (("--token-norm-dist", "4,1,4,1", "--trace", "x"), "found --token-norm-dist and --trace"),
    "unknown workload": (("token_dist",), "expected a workload of dataset"),
    "another workload": (("dataset", "--token-norm-dist", "4,1,4,1"), "expected --dataset, found --token-norm-dist"),
    "three numbers": (("--token-norm-dist", "4,1,4"), "expected IN_MEAN,IN_STDEV,OUT_MEAN,OUT_STDEV"),
    "not numbers": (("--token-norm-dist", "4,1,a,1"), "expected IN_MEAN,IN_STDEV,OUT_MEAN,OUT_STDEV"),
    "no file": (("--dataset", "absent.json"), "absent.json: expected a file of JSON"),
    "half of the means": (("--input_mean", "4"), "both --input-mean and --output-mean"),
    "goodput": (("--token-norm-dist", "4,1,4,1", "--goodput", "ttft=5"), "--goodput: expected NAME:MILLISECONDS"),
    "arrivals": (("--token-norm-dist", "4,1,4,1", "--rate", "5", "--arrivals", "gamma"), "--arrivals: expected"),
    "cancel": (("--token-norm-dist", "4,1,4,1", "--cancel", "2"), "--cancel: expected a share"),
    "body": (("--token-norm-dist", "4,1,4,1", "--body", "[1]"), "--body: expected a JSON object"),
    "body of ours": (("--token-norm-dist", "4,1,4,1", "--body", '{"stream": false}'), "other than stream"),
    "exact alone": (("--token-norm-dist", "4,1,4,1", "--exact"), "--exact with --functional"),
    "ids to a chat": (("--token-norm-dist", "4,1,4,1", "--endpoint", "chat"), "found token ids"),
}


@pytest.mark.parametrize(("arguments", "said"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(
    server: ScriptedServer, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(capsys, server.url, *arguments)
    assert code == 2 and not out and said in err and not server.bodies
    assert len(err.splitlines()) == 1 and err.startswith("lockstep: error: ")


@pytest.mark.parametrize("rate", ["0", "-2", "fast", "2,2", "nan"])
def test_a_rate_that_is_none(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told(capsys, "http://127.0.0.1:1", "--token-norm-dist", "4,1,4,1", "--rate", rate)
    assert code == 2 and "expected different numbers above 0" in err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://a:99999", "http://a/?q=1", "http://me@a"])
def test_a_url_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told(capsys, url, "--token-norm-dist", "4,1,4,1")
    assert code == 2 and f"{url}: expected a URL" in err


def test_where_no_server_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = told(capsys, "http://127.0.0.1:1", "--token-norm-dist", "4,1,4,1")
    assert code == 2 and "expected a server, found no connection: Connection refused; start one with" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found none"),
        ("{", "line 1: expected JSON"),
        ("[1]", "record 1: expected an object"),
        ('{"prompt": ""}', "record 1: expected `prompt`"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: expected a whole number of at least 1, found 0"),
        ('{"prompt": "a"}\n{"prompt": [true]}', "record 2: expected `prompt`"),
    ],
)
def test_a_dataset_that_is_none(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        workload.dataset(path, None, 64)


def test_failed_requests_end_with_exit_code_1(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refusal = lambda number: (500, "broken") if number == 2 else None
    code, out, err = told(capsys, server.url, "--token-norm-dist", "4,1,4,1", "--requests", 3, "--concurrency", 1)
    assert code == 1 and "Failed" in out and "1 requests failed, the first, 1: HTTP 500: broken" in err
    with pytest.raises(CheckError, match="warm-up's request 0 to be completed, found HTTP 500: broken"):
        server.refusal = lambda number: (500, "broken")
        records_of(server, LoadSpec(prompts(1), {}))


def test_the_key_of_a_file_is_sent(server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("one\ntwo\n")
    code, _, err = told(capsys, server.url, "--token-norm-dist", "4,1,4,1", "--api-key-file", key)
    assert code == 2 and "API key: expected printable ASCII characters on one line" in err
    assert b"Authorization: Bearer secret\r\n" in Client(server.url, "secret").request("GET", "/v1/models")
