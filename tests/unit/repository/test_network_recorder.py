"""Nothing is sent that the config does not ask for: what other packages do by default is off before they are
imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from lockstep.export.quiet import quiet
from network import TELEMETRY, Recorder
from some import some

SOURCES = str(Path(__file__).parents[3] / "src")
# Where one of these is set ONNX Runtime sends nothing by itself.
CI = (
    "CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL", "CODEBUILD_BUILD_ID",
    "BUILDKITE", "TEAMCITY_VERSION", "APPVEYOR", "BITBUCKET_BUILD_NUMBER",
)  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.make(tmp_path / "recorder")


def clean(recorder: Recorder, **variables: str) -> dict[str, str]:
    """The environment of a user who has set none of the switches, and whom ONNX Runtime does not take for CI."""
    environment = {name: value for name, value in os.environ.items() if name not in (*TELEMETRY, *CI)}
    return {**environment, **recorder.environment, "PYTHONPATH": SOURCES, **variables}


def run(code: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


CALLS = """
import socket
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return
    raise SystemExit(f"{call} {arguments} was not refused")
refused(socket.create_connection, ("192.0.2.1", 80))
refused(socket.create_connection, ("example.invalid", 80))
refused(socket.gethostbyname, "two.invalid")
refused(socket.gethostbyaddr, "192.0.2.3")
refused(socket.socket(socket.AF_INET).connect, ("192.0.2.4", 80))
refused(socket.socket(socket.AF_INET6).connect, ("2001:db8::5", 443))
refused(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b"x", ("192.0.2.6", 53))
refused(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendmsg, [b"x"], [], 0, ("192.0.2.7", 53))
one, other = socket.socketpair()
one.send(b"x")
assert other.recv(1) == b"x", "processes of one machine talk as before"
"""


def test_the_recorder_sees_and_refuses_each_call(recorder: Recorder) -> None:
    run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CALLS!r}], check=True)", clean(recorder))
    hosts = [line.split(": ")[0] for line in recorder.calls()]
    for host in ("192.0.2.1", "example.invalid", "two.invalid", "(an address)"):
        assert any(line.endswith(f" {host}") for line in hosts), hosts
    assert hosts[-4:] == [
        "connect 192.0.2.4 port 80",
        "connect 2001:db8::5 port 443",
        "sendto 192.0.2.6 port 53",
        "sendmsg 192.0.2.7 port 53",
    ]


def test_onnx_runtime_alone_leaves_what_the_tests_look_for(recorder: Recorder) -> None:
    """Without its switch: else a test that finds nothing would show nothing."""
    run("import onnxruntime", clean(recorder))
    assert [Path(path).name for path in recorder.traces()] == ["Microsoft", ".ses"]


@pytest.mark.parametrize(
    "module", some(["onnx_tools.sessions", "backends.onnxruntime.backend", "verify.validate.polygraphy_checks"])
)
def test_what_imports_onnx_runtime_switches_its_telemetry_off_first(recorder: Recorder, module: str) -> None:
    run(f"import lockstep.{module}, onnxruntime", clean(recorder))
    assert not recorder.traces()


def test_processes_that_lockstep_starts_inherit_the_switches_and_a_value_of_the_user_stands(recorder: Recorder) -> None:
    child = f"import os; print(*(os.environ.get(name) for name in {TELEMETRY}))"
    code = f"import subprocess, sys, lockstep; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(code, clean(recorder)) == "1 1\n"
    assert run(code, clean(recorder, ORT_DISABLE_TELEMETRY="", HF_HUB_DISABLE_TELEMETRY="0")) == "1 0\n"


def test_transformers_does_not_ask_the_hub() -> None:
    with quiet(), pytest.raises(OfflineModeIsEnabled):
        huggingface_hub.HfApi(endpoint="http://127.0.0.1:9").model_info("org/name")
    assert not huggingface_hub.is_offline_mode()
