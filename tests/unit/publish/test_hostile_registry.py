"""Pulls and pushes with a malicious registry: one line each, and no file stays."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.bundle.archive import About, BundledLimits, BundledTarget, Entry, write_archive
from lockstep.errors import CheckError, InputError
from lockstep.publish import artifact
from lockstep.publish.registry import Descriptor, Index, Manifest, Reference, Repository, sha256_digest
from lockstep.publish.signature import signature_path

SECRET = "a-secret-of-this-machine"
Answer = tuple[int, dict[str, str], bytes]


class Registry:
    """A registry in memory. answers: overrides, keyed by a request's method and a part of its path."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.answers: dict[tuple[str, str], Answer] = {}
        self.seen: list[str] = []  # headers of authorization
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.paths.append(f"{self.command} {self.path}")
                outer.seen.append(self.headers.get("Authorization", ""))
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, body = outer.answer(self.command, self.path, data)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def answer(self, method: str, path: str, data: bytes) -> Answer:
        for (of, part), answer in self.answers.items():
            if of == method and part in path:
                return answer
        name = path.rpartition("/")[2]
        if "/referrers/" in path:  # a registry of before OCI 1.1
            return 404, {}, b""
        if method == "POST":
            return 202, {"Location": "/upload/here"}, b""
        if method == "PUT":
            name = path.partition("digest=")[2].replace("%3A", ":") or name
            self.stored[name] = self.stored[sha256_digest(data)] = data
            return 201, {}, b""
        return (200, {}, self.stored[name]) if name in self.stored else (404, {}, b"")


@pytest.fixture
def server() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.server.shutdown()
    registry.server.server_close()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    about = About(BundledTarget("m", "fp32", "all", "onnxruntime"), BundledLimits(1, 8, 8, 8), "apart")
    files = [Entry.of_bytes("engines/a.onnx", b"engine"), Entry.of_bytes("engines/engines.statement.json", b"{}")]
    (tmp_path / "from").mkdir()
    return write_archive(tmp_path / "from" / "b.tar", about, files)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises((InputError, CheckError)) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def place(server: Registry) -> Reference:
    return Reference.parse(f"{server.host}/team/demo:1")


def test_a_bundle_comes_back_as_it_was(server: Registry, bundle: Path, tmp_path: Path) -> None:
    signature_path(bundle).write_bytes(b"signed")
    pushed = artifact.push(bundle, place(server))
    assert artifact.pull(place(server), tmp_path / "out.tar") == pushed.digest
    assert (tmp_path / "out.tar").read_bytes() == bundle.read_bytes()
    assert signature_path(tmp_path / "out.tar").read_bytes() == b"signed"


@pytest.mark.parametrize("realm", ["file://{file}", "ftp://127.0.0.1/x", "http://localhost:1/x", "", "http://[", "x"])
def test_a_realm_leads_to_https_or_to_the_registry_itself(server: Registry, tmp_path: Path, realm: str) -> None:
    (tmp_path / "token.json").write_text(json.dumps({"token": SECRET}))
    realm = realm.format(file=tmp_path / "token.json")
    server.answers["GET", "/v2/"] = 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, b""
    line = refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))
    assert "expected the registry to lead to HTTPS, found" in line and "; refused" in line
    assert not any(SECRET in header for header in server.seen)


TOKENS = [b"", b"[]", b"3", b'{"token": 3}', b'{"token": "a\\r\\nX: y"}', b'{"token": ""}', b"[" * 100_000]


@pytest.mark.parametrize("answer", TOKENS, ids=[repr(answer[:20]) for answer in TOKENS])
def test_a_token_that_is_none_is_one_line(server: Registry, tmp_path: Path, answer: bytes) -> None:
    realm = f"http://{server.host}/token"
    server.answers["GET", "/v2/"] = 401, {"WWW-Authenticate": f'Bearer realm="{realm}"'}, b""
    server.answers["GET", "/token"] = 200, {}, answer
    assert "expected a token from" in refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))


def test_a_login_goes_to_the_domain_of_its_registry(
    server: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = base64.b64encode(b"me:password").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": login}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    server.answers["GET", "/v2/"] = 401, {"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'}, b""
    server.answers["GET", "/token"] = 200, {}, b'{"token": "t"}'
    refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))
    assert server.seen == ["", f"Basic {login}", "Bearer t"]
    is_own_domain = Repository(Reference.parse("registry.gitlab.com/a/b")).is_own_domain
    assert is_own_domain("https://gitlab.com/jwt") and is_own_domain("https://registry.gitlab.com/x")
    assert not is_own_domain("https://gitlab.com.evil.org/x") and not is_own_domain("https://evil.org/gitlab.com")
    assert not Repository(Reference.parse("10.0.0.1/a")).is_own_domain("https://9.9.0.1/x")
    assert Repository(Reference.parse("docker.io/a/b")).is_own_domain("https://auth.docker.io/token")


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://localhost:1/x", "http://[/"])
def test_a_redirection_and_an_upload_lead_nowhere_else(
    server: Registry, bundle: Path, tmp_path: Path, where: str
) -> None:
    server.answers["GET", "/manifests/"] = 307, {"Location": where}, b""
    refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))
    server.answers["POST", "/uploads/"] = 202, {"Location": where}, b""
    assert "lead to HTTPS" in refused(lambda: artifact.push(bundle, place(server)))
    server.answers["POST", "/uploads/"] = 202, {}, b""  # it names no place
    server.answers["PUT", "/"] = 500, {}, b"no"
    refused(lambda: artifact.push(bundle, place(server)))


def changed(server: Registry, layer: int = 0, **changes: Any) -> bytes:
    manifest = json.loads(server.stored["1"])
    manifest["layers"][layer] |= changes
    return json.dumps(manifest).encode()


MANIFESTS: dict[str, Callable[[Registry], bytes]] = {
    "nothing": lambda server: b"",
    "a list": lambda server: b"[]",
    "no layers": lambda server: json.dumps({**json.loads(server.stored["1"]), "layers": None}).encode(),
    "a digest that leads elsewhere": lambda server: changed(server, digest="../../../../x"),
    "a digest that is none": lambda server: changed(server, digest=3),
    "a size below zero": lambda server: changed(server, size=-1),
    "a size that is another": lambda server: changed(server, size=3),
    "17 GiB": lambda server: changed(server, size=17 << 30),
    "an engine of 17 GiB": lambda server: changed(server, 1, size=17 << 30),
    "an engine that is another": lambda server: changed(server, 1, digest=sha256_digest(b"{}"), size=2),
    "a file that is not listed": lambda server: changed(server, 1, annotations={artifact.FILE_PATH: "../x"}),
    "a layer without a name": lambda server: changed(server, 1, annotations={}),
    "a tar file, as 0.2.0 pushed": lambda server: changed(server, annotations={artifact.FILE_PATH: "records"}),
    "deep": lambda server: b"[" * 100_000,
    "no UTF-8": lambda server: b"\xff\xfe",
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_none_is_one_line(server: Registry, bundle: Path, tmp_path: Path, name: str) -> None:
    artifact.push(bundle, place(server))
    server.answers["GET", "/manifests/1"] = 200, {}, MANIFESTS[name](server)
    refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from"]


def test_a_manifest_that_breaks_off_is_one_line(server: Registry, tmp_path: Path) -> None:
    server.answers["GET", "/manifests/1"] = 200, {"Content-Length": "99", "Connection": "close"}, b"{"
    refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))


def attached(*layers: dict[str, Any]) -> bytes:
    manifest = Manifest(KIND, Descriptor.of("", b"{}"), ()).to_json()
    return json.dumps({**manifest, "layers": layers}).encode()


def layer(**changes: Any) -> dict[str, Any]:
    return {"mediaType": KIND, "digest": "sha256:" + "0" * 64, "size": 1} | changes


KIND = next(iter(artifact.ATTACHED))
LISTS: dict[str, bytes] = {
    "no list": b'{"manifests": 3}',
    "no JSON": b"x",
    "deep": b"[" * 100_000,
    "no digest": json.dumps({"manifests": [{"artifactType": KIND}]}).encode(),
    "no object": json.dumps({"manifests": [3]}).encode(),
}
ATTACHED: dict[str, bytes] = {
    "no layers": attached(),
    "two layers": attached(layer(), layer()),
    "17 MiB": attached(layer(size=17 << 20)),
    "no size": attached(layer(size="1")),
    "no digest of a layer": attached(layer(digest="../x")),
    "other bytes": attached(layer(digest=sha256_digest(b"{}"), size=2)),
}


@pytest.mark.parametrize("name", [*LISTS, *ATTACHED])
def test_what_is_attached_is_checked_before_a_bundle_is_written(
    server: Registry, bundle: Path, tmp_path: Path, name: str
) -> None:
    artifact.push(bundle, place(server))
    answer = LISTS.get(name)
    if answer is None:
        data = ATTACHED[name]
        server.stored[sha256_digest(data)] = data
        server.stored[sha256_digest(b"{}")] = b"[]"
        entry = Descriptor("", sha256_digest(data), len(data), artifact_type=KIND)
        answer = json.dumps(Index((entry,)).to_json()).encode()
    server.answers["GET", "/referrers/"] = 200, {}, answer
    refused(lambda: artifact.pull(place(server), tmp_path / "out.tar"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from"], "no bundle and no other file"
