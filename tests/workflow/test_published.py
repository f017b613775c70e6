"""A stranger's machine: from the built wheel to a model that is served elsewhere, all by real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from checkout import REPOSITORY
from test_wheel import wheel

import registry
from lockstep.bundle.archive import read_archive

assert wheel  # a fixture
LOCK = "locks/demo-llama.lock.json"
pytestmark = [pytest.mark.long, pytest.mark.workflow, pytest.mark.exports]


@pytest.fixture(scope="module")
def program(wheel: Path) -> Path:
    """`lockstep` of a new environment that has the wheel; its dependencies are this interpreter's."""
    venv = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    site = next(venv.glob("lib/*/site-packages"))
    # A folder that a .pth names is not searched for others: this checkout's package stays out.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run([venv / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    return venv / "bin" / "lockstep"


class Stranger:
    """Someone with their own folder, who has the wheel."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder
        folder.mkdir()
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run a command; return its output, or its error line."""
        done = subprocess.run(
            [self.program, *arguments], cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1] if code else done.stdout

    def serves(self, bundle: str) -> str:
        """Serve a bundle, and return what the model says."""
        command = [self.program, "serve", bundle, "--port", "0"]
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert server.stdout is not None
            address = next(matches[0] for line in server.stdout if (matches := re.findall(r"http://[\d.]+:\d+", line)))
            body = {"model": "demo-llama", "prompt": "San Francisco is a", "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def change_payload(path: Path) -> str:
    """Change a character of the signed part of a file; return the file's text before."""
    text = path.read_text()
    envelope = json.loads(text)
    payload = (envelope.get("dsseEnvelope") or envelope)["payload"]
    path.write_text(text.replace(payload, payload[:-20] + ("B" if payload[-20] == "A" else "A") + payload[-19:]))
    return text


def make_keys(path: Path) -> None:
    """Make a private key, `path`.key, and its public key, `path`.pub."""
    for arguments in (
        ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{path}.key"],
        ["ec", "-in", f"{path}.key", "-pubout", "-out", f"{path}.pub"],
    ):
        subprocess.run(["openssl", *arguments], check=True)


@pytest.fixture(scope="module")
def publisher(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """Who made the demo's checkpoint a target in an empty folder, and locked it."""
    publisher = Stranger(program, tmp_path_factory.mktemp("strangers") / "one")
    shutil.copytree(REPOSITORY / "resources" / "demo-llama", publisher.folder / "demo-llama")
    make_keys(publisher.folder / "signer")
    publisher("init", "demo-llama")
    publisher("run", "demo-llama.yaml", "--cores", "2")
    publisher("lock")
    return publisher


def test_from_the_wheel_to_a_server_elsewhere(publisher: Stranger, tmp_path: Path) -> None:
    two = Stranger(publisher.program, tmp_path / "two")
    (publisher.folder / "store").mkdir()
    shutil.copy2(publisher.folder / "signer.pub", two.folder)
    publisher("bundle", "demo-llama/fp32", "--weights", "--out", "demo.tar", "--sign-key", "signer.key")
    bundle = publisher.folder / "demo.tar"
    file, engine = next(item for item in read_archive(bundle).members.items() if item[0].endswith(".onnx"))

    with registry.running(publisher.folder / "store") as server:
        place = f"{server.host}/team/demo:1"
        flip(bundle, engine.offset)
        assert f"demo.tar: {file}: expected sha256" in publisher("push", "demo.tar", place, code=2)
        flip(bundle, engine.offset)
        digest = publisher("push", "demo.tar", place, "--lock", LOCK).strip().partition("@")[2]

        manifest = json.loads(server.blob(digest).read_bytes())
        for layer in manifest["layers"]:
            name = layer["annotations"]["org.cncf.model.filepath"]
            flip(server.blob(layer["digest"]), 0)
            assert f"{place}: {name}: expected" in two("pull", place, "demo.tar", code=1)
            flip(server.blob(layer["digest"]), 0)
        assert list(two.folder.iterdir()) == [two.folder / "signer.pub"], "nothing half-written"
        two("pull", place, "demo.tar")
        shutil.copytree(publisher.folder / "locks", two.folder / "locks")
        two("pull", place, "again.tar", "--lock", LOCK)

    pulled = two.folder / "demo.tar"
    assert pulled.read_bytes() == bundle.read_bytes() == (two.folder / "again.tar").read_bytes()
    flip(pulled, engine.offset)
    for arguments in (
        ("verify", "demo.tar", "--signature", "--key", "signer.pub"),
        ("serve", "demo.tar", "--port", "0"),
    ):
        assert f"demo.tar: {file}: expected sha256" in two(*arguments, code=2)
    flip(pulled, engine.offset)
    signature = two.folder / "demo.tar.sig"
    signed = change_payload(signature)
    line = two("verify", "demo.tar", "--signature", "--key", "signer.pub", code=1)
    assert "demo.tar.sig: expected the signature of demo.tar" in line
    signature.write_text(signed)
    assert "signed by key" in two("verify", "demo.tar", "--signature", "--key", "signer.pub")
    assert two.serves("demo.tar").startswith(" hilly city")
