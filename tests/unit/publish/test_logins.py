"""Registries that ask for a login, by password and by token: it is docker's, from its file or from its helpers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from click.testing import CliRunner

import registry
from lockstep.cli.main import main
from lockstep.publish.logins import basic_login
from lockstep.publish.registry import Descriptor, Manifest, Reference, Repository

# Of `secret`, as `htpasswd -B` writes it.
PASSWORDS = "reader:$2b$04$rF3eZ6oPvOvbriD3ctT0V.cxLvepbIn2kLpWnBjjVF5YI54cjtz7O\n"
HELPER = """\
#!/bin/sh
read -r name
if [ "$1 $name" = "get {host}" ]; then
  echo '{{"ServerURL": "{host}", "Username": "reader", "Secret": "secret"}}'
else
  echo "credentials not found in native keychain"
  exit 1
fi
"""


def basic(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture(scope="module", params=["password", "token"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[registry.Registry]:
    folder = tmp_path_factory.mktemp("registry")
    if request.param == "password":
        (folder / "htpasswd").write_text(PASSWORDS)
        auth = f"auth: {{htpasswd: {{realm: here, path: {folder}/htpasswd}}}}"
        with registry.running(folder, auth) as running:
            yield running
    else:
        with registry.giving_tokens(folder, basic("reader:secret")) as auth, registry.running(folder, auth) as running:
            yield running


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of `docker login`, which is not there yet."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path / "config.json"


@pytest.mark.parametrize("way", ["file", "store", "helper"])
def test_a_login_of_docker_is_used(server: registry.Registry, docker: Path, way: str) -> None:
    host = server.host
    helper = docker.parent / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(HELPER.format(host=host))
    helper.chmod(0o755)
    config = {
        "file": {"auths": {f"http://{host}/v1/": {"auth": basic("reader:secret")}}},
        "store": {"auths": {host: {}}, "credsStore": "test"},
        "helper": {"auths": {host: {"auth": basic("reader:wrong")}}, "credHelpers": {host: "test"}},
    }
    docker.write_text(json.dumps(config[way]))
    repository = Repository(Reference.parse(f"{host}/team/demo:{way}"))
    data = way.encode()
    blob = Descriptor.of("application/octet-stream", data)
    assert repository.put_blob(blob.digest, blob.size, lambda: BytesIO(data))
    manifest = Manifest("test", blob, (blob,))
    repository.put_manifest(manifest, way)
    other = Repository(repository.reference)
    actual = other.get_manifest(way, "a test")
    assert actual is not None and actual[0] == manifest
    assert other.read_blob(blob, way, 100) == data


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "401 Unauthorized"),
        ({"auths": {"HOST": {"auth": basic("reader:wrong")}}}, "401"),
        ({"credHelpers": {"HOST": "none"}}, "docker-credential-none: expected the login of HOST"),
        ([], "config.json: expected what `docker login` writes"),
    ],
    ids=["nobody", "wrong", "no-helper", "broken"],
)
def test_who_is_not_logged_in_is_told_so(
    server: registry.Registry, docker: Path, tmp_path: Path, config: object, expected: str
) -> None:
    docker.write_text(json.dumps(config).replace("HOST", server.host))
    done = CliRunner().invoke(main, ["pull", f"{server.host}/team/none:1", str(tmp_path / "out.tar")])
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and expected.replace("HOST", server.host) in line
    assert line.endswith(("run `docker login`", "log in again"))
    assert not list(tmp_path.glob("out*"))


def test_docker_hub_has_other_names(docker: Path) -> None:
    docker.write_text(json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": basic("reader:secret")}}}))
    assert basic_login("docker.io") == basic_login("registry-1.docker.io") == basic("reader:secret")
    assert basic_login("registry.example.org") is None
