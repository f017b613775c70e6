"""`lockstep certify` asks real servers."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.certify_proxy import CROSSED, MANY, UNKNOWN_TEXT, Proxy
from click.testing import CliRunner

from lockstep.artifacts.certificate import AS_PUBLISHED, CHAT, DIFFERS, UNDECIDED, Certificate, Hypotheses
from lockstep.certify import run
from lockstep.certify.answers import read_tables
from lockstep.certify.client import Endpoint, Form
from lockstep.certify.likelihood import PUBLISHED, RARE, SOME, members
from lockstep.certify.run import COMPANY, certify
from lockstep.cli.main import main
from lockstep.errors import InputError
from real_server import RealServer

pytestmark = pytest.mark.exports


def endpoint(server: RealServer, requests: int, path: str = "/v1", model: str = "demo-llama") -> Endpoint:
    return Endpoint(f"{server.url}{path}", model, None, 60, 0, requests)


def test_a_server_of_the_model_is_as_published(server: RealServer, hypotheses: Path, tmp_path: Path) -> None:
    certificate = certify(endpoint(server, 200), hypotheses / "hypotheses" / "all.json")
    assert (certificate.verdict, certificate.best) == (AS_PUBLISHED, PUBLISHED), certificate.line
    assert {"int4", "fp8", "truncated context", "another revision or model"} <= {*certificate.excluded}
    assert certificate.evidence == "log-probabilities of up to 20 tokens, of prompts too"
    assert certificate.requests <= 200
    assert certificate.holds == "bits hold"
    certificate.save(tmp_path / "certificate.json")
    assert Certificate.load(tmp_path / "certificate.json") == certificate


@pytest.mark.parametrize(
    ("fault", "verdict", "names"),
    [(MANY, DIFFERS, (SOME, RARE)), (CROSSED, DIFFERS, (COMPANY,)), (UNKNOWN_TEXT, UNDECIDED, (PUBLISHED,))],
)
def test_faults_in_some_answers_are_found(
    server: RealServer, hypotheses: Path, fault: str, verdict: str, names: tuple[str, ...]
) -> None:
    path = hypotheses / "hypotheses" / "all.json"
    with Proxy(server.url, fault, Hypotheses.load(path).questions) as proxy:
        certificate = certify(Endpoint(f"{proxy.url}/v1", "demo-llama", None, 60, 0, 180), path)
    assert certificate.verdict == verdict and certificate.best in names, certificate.line
    assert certificate.holds != "bits hold"
    assert fault != UNKNOWN_TEXT or "unknown texts" in certificate.line


def test_tokens_alone_decide_less_and_the_power_says_so(
    server: RealServer, hypotheses: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Form", functools.partial(Form, listed=0))  # asked for none, the server gives none
    certificate = certify(endpoint(server, 60), hypotheses / "hypotheses" / "all.json", company=False)
    assert certificate.evidence == "tokens alone"
    assert certificate.power["int8"] < 0.5 < certificate.power["tokens drawn, not greedy"]
    assert "int8" not in certificate.excluded
    assert re.search(r"not excluded: .*\bint8\b.*, tokens alone", certificate.line)


def test_the_command_writes_a_page_and_a_signed_statement(server: RealServer, hypotheses: Path, tmp_path: Path) -> None:
    out = tmp_path / "certificate.json"
    page = tmp_path / "certificate.html"
    private = tmp_path / "signer.key"
    public = tmp_path / "signer.pub"
    make = "openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", private
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    asked = "certify", f"{server.url}/v1", "--model", "demo-llama", "--no-company", "--requests", 60
    options = (*asked, "--golden", hypotheses / "reference")
    written = "--out", out, "--page", page, "--sign-key", private
    result = CliRunner().invoke(main, [*map(str, (*options, *written))])
    assert result.exit_code == 0, result.output
    assert "demo-llama: as published" in page.read_text()
    read = ["verify", str(out), "--signature", "--key", str(public)]
    result = CliRunner().invoke(main, read)
    assert "as published, signed by key" in result.output
    out.write_bytes(replace(Certificate.load(out), requests=1).to_bytes())
    result = CliRunner().invoke(main, read)
    assert result.exit_code == 1
    assert "expected the certificate that was signed, found another" in result.output


def test_the_workflow_makes_what_a_checkpoint_needs(
    server: RealServer, hypotheses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A long test of the workflow's makes them; here it finds them, and has nothing to do.
    made = tmp_path / "certify-demo-llama" / "results" / "demo-llama"
    shutil.copytree(hypotheses, made, copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    options = f"{server.url}/v1", "--model", "demo-llama", "--no-company", "--requests", "40"
    result = CliRunner().invoke(main, ["certify", *options, "--checkpoint", "resources/demo-llama"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "certify-demo-llama" / "demo-llama.yaml").is_file()
    for sources in (["--checkpoint", str(tmp_path)], ["--checkpoint", "x", "--golden", "y"], []):
        result = CliRunner().invoke(main, ["certify", *options, *sources])
        assert result.exit_code == 2
        assert "checkpoint: expected" in result.output or "expected --golden or --checkpoint" in result.output
    shutil.rmtree("certify-demo-llama")
    Path("certify-demo-llama").touch()
    result = CliRunner().invoke(main, ["certify", *options, "--checkpoint", "resources/demo-llama"])
    assert result.exit_code == 2 and "expected a folder for the reference, found a file" in result.output


def test_questions_are_prompts_of_golden_and_chats(hypotheses: Path) -> None:
    path = hypotheses / "hypotheses" / "all.json"
    document = Hypotheses.load(path)
    tables = read_tables(path, document)
    assert {question.kind for question in document.questions} == {"completion", CHAT}
    assert len(tables.values[PUBLISHED]) == len(document.questions)
    assert {"int8", "int4", "fp8", "another template"} <= {member.hypothesis for member in members(tables)}


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        ("/v2/none", "demo-llama", "expected an answer, found no such path"),
        ("/v1", "demo", "expected status 200, found 404"),
    ],
)
def test_a_wrong_name_is_one_line(server: RealServer, hypotheses: Path, path: str, model: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        certify(endpoint(server, 10, path, model), hypotheses / "hypotheses" / "all.json")
