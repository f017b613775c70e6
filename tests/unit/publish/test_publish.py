"""Publishing: a bundle is signed, pushed to a registry, pulled elsewhere and served, and one flipped byte is refused by
name at each step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from demo_model import LIMITS
from recorded import recorded

import registry
from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.statement import libraries
from lockstep.bundle.archive import read_archive
from lockstep.bundle.opened import opened
from lockstep.bundle.pack import pack
from lockstep.cli.main import main
from lockstep.errors import CheckError, InputError, LockstepError
from lockstep.provenance.lock import Lock
from lockstep.publish import artifact, sbom, signature
from lockstep.publish.registry import Reference
from lockstep.targets import Results, Target

TARGET = Target("demo-llama", "fp16", "all", "onnxruntime")


@pytest.fixture(scope="module")
def results(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return recorded(demo, tmp_path_factory.mktemp("results") / "results")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that makes a private and a public key for a name."""
    folder = tmp_path_factory.mktemp("keys")

    def pair(name: str) -> tuple[Path, Path]:
        private = folder / f"{name}.key"
        public = folder / f"{name}.pub"
        if not private.exists():
            make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private)]
            subprocess.run(make, check=True)
            subprocess.run(["openssl", "ec", "-in", str(private), "-pubout", "-out", str(public)], check=True)
        return private, public

    return pair


@pytest.fixture(scope="module")
def signed(results: Results, keys: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed bundle with its weights. Read only."""
    bundle = pack(results, TARGET, LIMITS, tmp_path_factory.mktemp("signed") / "demo.tar", with_weights=True)
    assert signature.sign(bundle, keys("signer")[0]) == [
        bundle.with_name("demo.tar.sig"),
        bundle.with_name("demo.tar.statement.json"),
    ]
    return bundle


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registry.Registry]:
    with registry.running(tmp_path_factory.mktemp("registry")) as running:
        yield running


def copied(bundle: Path, folder: Path) -> Path:
    for path in bundle.parent.glob(f"{bundle.name}*"):
        shutil.copy2(path, folder / path.name)
    return folder / bundle.name


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def flip_member(bundle: Path, name: str) -> None:
    member = read_archive(bundle).members[name]
    flip(bundle, member.offset + member.size // 2)


def refused(call: Callable[[], object], kind: type[LockstepError] = CheckError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_signature_is_of_the_key_and_of_each_byte(signed: Path, keys: Callable, tmp_path: Path) -> None:
    public = keys("signer")[1]
    other = keys("other")[1]
    assert str(public) in signature.verify(signed, [other, public])
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(signed), "--public_key", str(public)]
    done = subprocess.run([*tool, "--signature", f"{signed}.sig"], capture_output=True, text=True)
    assert done.returncode == 0, "Model Signing's own tool reads it"
    line = refused(lambda: signature.verify(signed, [other]))
    assert "demo.tar.sig: expected the signature of demo.tar by" in line and str(other) in line
    bundle = copied(signed, tmp_path)
    flip_member(bundle, "graphs/tokenizer.json")
    line = refused(lambda: signature.verify(bundle, [public]), InputError)
    assert line.startswith(f"{bundle}: graphs/tokenizer.json: expected sha256 ")
    for name in ("demo.tar.sig", "demo.tar.statement.json"):
        bundle = copied(signed, tmp_path)
        envelope = json.loads((tmp_path / name).read_text())
        text = (envelope.get("dsseEnvelope") or envelope)["payload"]
        changed = text[:-20] + ("B" if text[-20] == "A" else "A") + text[-19:]
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(text, changed))
        assert refused(lambda: signature.verify(bundle, [public]), LockstepError).startswith(str(tmp_path / name))
    (tmp_path / "demo.tar.sig").unlink()
    assert "expected the signature of demo.tar, found none" in refused(
        lambda: signature.verify(bundle, [public]), InputError
    )


def test_what_is_no_key_is_one_line(signed: Path, keys: Callable, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "none", tmp_path):
        assert "expected a private key" in refused(lambda: signature.sign(signed, path), InputError)
        assert "expected a public key" in refused(lambda: signature.verify(signed, [path]), InputError)
    private = keys("signer")[0]
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "ec", "-in", private, "-aes128", "-passout", "pass:a", "-out", locked], check=True)
    assert "without a password" in refused(lambda: signature.sign(signed, locked), InputError)


def test_a_bundle_is_pushed_and_pulled_to_the_same_bytes(
    signed: Path, server: registry.Registry, keys: Callable, tmp_path: Path
) -> None:
    place = Reference.parse(f"{server.host}/team/demo:1")
    first = artifact.push(signed, place)
    assert {"bundle.json", "graphs/tokenizer.json", "demo.tar.sig"} <= set(first.uploaded)
    again = artifact.push(signed, replace(place, tag="2"))
    assert again.digest == first.digest
    assert set(again.uploaded) <= {"demo.tar.sig", "demo.tar.statement.json"}, "the registry has the layers"
    out = tmp_path / "out.tar"
    assert artifact.pull(place, out) == first.digest
    assert sha256_file(out) == sha256_file(signed)
    assert str(keys("signer")[1]) in signature.verify(out, [keys("signer")[1]])
    with opened(out) as bundle:
        assert bundle.target == TARGET
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.tar", "out.tar.sig", "out.tar.statement.json"]


def test_models_share_the_layers_of_their_files(results: Results, server: registry.Registry, tmp_path: Path) -> None:
    """A fine-tune's bundle: other weights and tokenizer, the same engines."""
    bundle = pack(results, TARGET, LIMITS, tmp_path / "base.tar")
    artifact.push(bundle, Reference.parse(f"{server.host}/team/shared:base"))
    other = tmp_path / "results"
    shutil.copytree(results.root, other, symlinks=True)
    os.rename(other / "demo-llama", other / "tuned")
    tuned = pack(Results(other), replace(TARGET, model="tuned"), LIMITS, tmp_path / "tuned.tar")
    assert artifact.push(tuned, Reference.parse(f"{server.host}/team/shared:tuned")).uploaded == ("bundle.json",)


def test_a_flipped_byte_is_refused_on_its_way(signed: Path, server: registry.Registry, tmp_path: Path) -> None:
    bundle = copied(signed, tmp_path)
    engine = next(name for name in read_archive(bundle).members if name.endswith(".onnx"))
    flip_member(bundle, engine)
    place = Reference.parse(f"{server.host}/team/flipped:1")
    assert f"{bundle}: {engine}: expected sha256" in refused(lambda: artifact.push(bundle, place), InputError)
    pushed = artifact.push(signed, place)
    manifest = json.loads(server.blob(pushed.digest).read_bytes())
    for layer in manifest["layers"]:
        flip(server.blob(layer["digest"]), layer["size"] // 2)
        name = layer["annotations"]["org.cncf.model.filepath"]
        line = refused(lambda: artifact.pull(place, tmp_path / "out.tar"))
        assert line.startswith(f"{place}: {name}: expected {layer['size']} bytes of {layer['digest']}, found ")
        assert not (tmp_path / "out.tar").exists()
        flip(server.blob(layer["digest"]), layer["size"] // 2)
    artifact.pull(place, tmp_path / "out.tar")


def test_a_registry_that_has_not_what_is_asked_is_one_line(
    signed: Path, server: registry.Registry, tmp_path: Path
) -> None:
    missing = Reference.parse(f"{server.host}/team/none:1")
    assert "found none; push it with" in refused(lambda: artifact.pull(missing, tmp_path / "out.tar"), InputError)
    nobody = Reference.parse("127.0.0.1:9/team/none:1")
    assert "expected a registry at http://127.0.0.1:9" in refused(
        lambda: artifact.pull(nobody, tmp_path / "out.tar"), InputError
    )
    for text in ("demo", "localhost:5000/Team", "a b/c", "host/x@sha256:12"):
        assert "expected HOST/REPOSITORY" in refused(lambda: Reference.parse(text), InputError)


def lock_of(results: Results, path: Path, signed: Path) -> Path:
    """A lock that holds the demo's engines."""
    engines = {
        name.partition("/")[2]: member.sha256
        for name, member in read_archive(signed).members.items()
        if name.startswith("engines/") and not name.endswith(".json")
    }
    entries = {"checkpoint": {"source": "x"}, "engines/fp16/onnxruntime/a CPU": engines}
    Lock("demo-llama", {}, entries).save(path)
    return path


def test_a_lock_names_the_manifest(results: Results, signed: Path, server: registry.Registry, tmp_path: Path) -> None:
    lock = lock_of(results, tmp_path / "demo-llama.lock.json", signed)
    place = Reference.parse(f"{server.host}/team/locked:1")
    assert "expected the digest of" in refused(lambda: artifact.locked_reference(lock, place), InputError)
    pushed = artifact.push(signed, place)
    artifact.note_in_lock(lock, signed, pushed)
    assert Lock.load(lock).published == {str(TARGET): artifact.Published(str(place), pushed.digest)}
    bundle = pack(results, TARGET, LIMITS, tmp_path / "apart.tar")
    assert artifact.push(bundle, place).digest != pushed.digest, "another bundle below the same tag"
    assert artifact.pull(artifact.locked_reference(lock, place), tmp_path / "out.tar") == pushed.digest
    assert sha256_file(tmp_path / "out.tar") == sha256_file(signed)
    lock_of(results, lock, signed)
    changed = Lock.load(lock)
    entries = {**changed.entries, "engines/fp16/onnxruntime/a CPU": {"block.onnx": "0" * 64}}
    replace(changed, entries=entries).save(lock)
    assert "expected the engines of" in refused(lambda: artifact.note_in_lock(lock, signed, pushed))


def bill_of(results: Results, target: Target) -> dict[str, Any]:
    text = sbom.bill(results, target)
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(text) is None
    assert text == sbom.bill(results, target)
    return json.loads(text)


def test_the_bill_of_materials_is_valid(results: Results) -> None:
    bill = bill_of(results, TARGET)
    components = {component["bom-ref"]: component for component in bill["components"]}
    files = {part["name"] for part in components["checkpoint"]["components"]}
    assert {"checkpoint/config.json", "checkpoint/model.safetensors", "checkpoint/tokenizer.json"} <= files
    assert {"weights/weights.json", "graphs/assembly.json", "engines/engines.json"} <= set(components)
    model = bill["metadata"]["component"]
    assert {"name": "lockstep:precision", "value": "fp16"} in model["properties"]
    assert model["modelCard"]["modelParameters"]["modelArchitecture"] == "LlamaForCausalLM"
    broken = json.dumps({**bill, "components": [{"type": "model"}]})
    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(broken) is not None


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_each_file_names_the_libraries_of_its_stage(demo: Results, tmp_path: Path, backend: str) -> None:
    results = recorded(demo, tmp_path / "results", precision="fp32", backend=backend)
    bill = bill_of(results, replace(TARGET, precision="fp32", backend=backend))
    components = {component["bom-ref"]: component for component in bill["components"]}
    used = {entry["ref"]: " ".join(entry.get("dependsOn", [])) for entry in bill["dependencies"]}
    assert f"pkg:pypi/{backend}@" in used["engines/engines.json"], "what built them"
    assert "pkg:pypi/torch@" in used["graphs/assembly.json"], "what traced them"
    assert "pkg:pypi/torch@" not in used["engines/engines.json"] + used["weights/weights.json"]
    for name, component in components.items():
        if name.startswith("pkg:pypi/"):
            (entry, *_) = component["licenses"]
            assert entry.get("expression") or entry["license"].get("id") or entry["license"]["name"], name
            assert component["properties"][0]["name"] == "lockstep:RECORD-sha256", name


def test_the_builder_of_an_engine_is_among_its_libraries() -> None:
    key = SimpleNamespace(environment={"numpy": "2.0"}, backend={"name": "tensorrt", "version": "10.6"})
    assert ("tensorrt", "10.6", "pkg:generic/tensorrt@10.6") in set(libraries(key))


def test_a_library_of_another_version_has_no_digest() -> None:
    """The machine that made the target had another than this one."""
    component = sbom.library_component("numpy", "1.0", "pkg:pypi/numpy@1.0")
    assert not component.properties and not component.licenses


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# Demo\n", "Apache-2.0"),
        ("---\nlicense: llama3\n---\n", "llama3"),
        ("---\nlicense: other\nlicense_name: ours\n---\n", "ours"),
        ("# Demo\n---\nlicense: mit\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("", None),
    ],
)
def test_the_licence_of_a_checkpoint_is_that_of_its_card(tmp_path: Path, card: str, expected: str | None) -> None:
    (tmp_path / "README.md").write_text(card)
    licenses = [license.id or license.name for license in sbom.card_licenses(tmp_path)]
    assert licenses == ([expected] if expected else [])


def test_what_is_asked_of_verify_must_fit(signed: Path, keys: Callable) -> None:
    public = str(keys("signer")[1])

    def error_of_verify(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["verify", *arguments])
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        return line

    assert "expected --signature with it" in error_of_verify(str(signed), "--key", public)
    assert "expected a public key of a possible signer" in error_of_verify(str(signed), "--signature")
    assert "expected a bundle, found none" in error_of_verify("--signature", "--key", public)
    assert "expected models, bundles or certificates, found several" in error_of_verify(str(signed), "demo-llama")
    assert "signed by key" in CliRunner().invoke(main, ["verify", str(signed), "--signature", "--key", public]).output
