"""`lockstep serve --allow-adapter-loading`: folders that requests name, loaded while the server runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_model import CONFIG as DEMO_CONFIG
from demo_model import ROOT
from lora_folders import ADAPTERS, LIGHT, TARGET, TUNED, tensors, tuned_lora, tuned_texts, write

from calls import call
from lockstep.artifacts.files import write_json
from lockstep.targets import Results
from real_server import ENDS, RealServer
from shared import Shared


@pytest.fixture(scope="module")
def results(demo: Results, shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return tuned_lora(tmp_path_factory.mktemp("tuned") / "results", demo, shared)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that requests may name, next to one that they may not."""
    root = tmp_path_factory.mktemp("outer") / "adapters"
    for name in ("sailor", "team/bard", "gone", "changes", "many/a", "again"):
        shutil.copytree(ADAPTERS / ("shakespeare" if name == "team/bard" else "captain"), root / name)
    shutil.copytree(ADAPTERS / "captain", root.parent / "private")
    (root / "link").symlink_to(root.parent / "private")
    module = {"model.layers.0.self_attn.q_proj": (240, 144)}
    write(root / "large", 9, tensors(module, 9, 0))
    write(root / "other", 4, tensors({"model.layers.0.self_attn.q_proj": (240, 99)}, 4, 0))
    write(root / "dora", 4, tensors(module, 4, 0), use_dora=True)
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(results: Results, root: Path) -> Iterator[RealServer]:
    with RealServer(results.root, TUNED, "--allow-adapter-loading", str(root), target=TARGET) as running:
        yield running


def post(server: RealServer, path: str, body: dict) -> tuple[int, str]:
    status, _, data = server.request("POST", path, body)
    return status, data.decode()


def text(server: RealServer, **body: object) -> str:
    status, answer = completion(server, **body)
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["text"]


def completion(server: RealServer, **body: object) -> tuple[int, str]:
    options = {"model": "demo-lora", "prompt": "Light", "max_tokens": 16, "temperature": 0, **body}
    return post(server, "/v1/completions", options)


def names(server: RealServer) -> list[str]:
    return [entry["id"] for entry in server.get("/v1/models")["data"]]


def test_a_folder_in_a_request_is_loaded_and_then_is_a_model(server: RealServer, root: Path) -> None:
    assert text(server, lora="team/bard").startswith(LIGHT["shakespeare"])
    assert "demo-lora:team/bard" in names(server)
    assert text(server, model="demo-lora:team/bard").startswith(LIGHT["shakespeare"])
    assert text(server, lora=str(root / "sailor")) == LIGHT["captain"]  # its whole path
    assert text(server, lora="captain") == LIGHT["captain"], "the config's"
    entry = server.get("/v1/models/demo-lora:sailor")
    assert entry["parent"] == "demo-lora" and len(entry["root"]) == 64
    body = {"text_input": "Light", "max_tokens": 16, "exclude_input_in_output": True}
    status, answer = post(server, "/v2/models/ensemble/generate", {**body, "lora": "many/a"})
    assert status == 200 and json.loads(answer)["text_output"].startswith(LIGHT["captain"])
    status, answer = post(server, "/v2/models/ensemble/generate", {**body, "lora_task_id": 2})
    assert json.loads(answer)["text_output"].startswith(LIGHT["shakespeare"]), "numbers are of the config's adapters"


@pytest.mark.parametrize(
    ("lora", "status", "line"),
    [
        ("../private", 403, "or a folder below that of --allow-adapter-loading, found '../private'"),
        ("/etc", 403, "or a folder below that of --allow-adapter-loading, found '/etc'"),
        ("link", 403, "or a folder below that of --allow-adapter-loading, found 'link'"),
        (".", 403, "or a folder below that of --allow-adapter-loading, found '.'"),
        ("a\u0000b", 403, "or a folder below that of --allow-adapter-loading"),
        ("a b", 400, "lora: expected letters, digits, . _ - and /, found 'a b'"),
        ("pirate", 400, "expected the folder of an adapter, found nothing"),
        ("empty", 400, "expected adapter_config.json, found none"),
        ("other", 400, "[240, 144] as the base"),
        ("dora", 400, "a LoRA without use_dora"),
        ("large", 400, "expected a rank of at most 8 (max_lora_rank), found 9"),
    ],
)
def test_what_is_no_adapter_of_this_model_or_lies_elsewhere_is_refused(
    server: RealServer, lora: str, status: int, line: str
) -> None:
    actual, answer = completion(server, lora=lora)
    message = json.loads(answer)["error"]["message"]
    assert actual == status and line in message and "\n" not in message
    assert f"demo-lora:{lora}" not in names(server)


@pytest.mark.long
def test_without_the_option_no_folder_is_read(results: Results, root: Path) -> None:
    with RealServer(results.root, target=TARGET) as server:
        status, answer = completion(server, lora=str(root / "sailor"))
        assert status == 404 and "; --allow-adapter-loading lets requests name folders" in answer
        status, answer = post(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "sailor"})
        assert status == 403 and "expected a server with --allow-adapter-loading" in answer
        status, answer = post(server, "/v1/unload_lora_adapter", {"lora_name": "captain"})
        assert status == 404 and "none, for none was loaded" in answer


def test_a_folder_that_changes_is_refused_until_it_is_loaded_again(server: RealServer, root: Path) -> None:
    assert text(server, lora="changes") == LIGHT["captain"]
    weights = root / "changes" / "adapter_model.safetensors"
    original = weights.read_bytes()
    shutil.copy(ADAPTERS / "shakespeare" / "adapter_model.safetensors", weights)
    shutil.copy(ADAPTERS / "shakespeare" / "adapter_config.json", weights.with_name("adapter_config.json"))
    status, answer = completion(server, lora="changes")
    assert status == 409 and "expected its folder as it was when it was loaded" in answer
    assert text(server, model="demo-lora:changes") == LIGHT["captain"], "the loaded weights decide"
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "changes"})[0] == 200
    assert text(server, lora="changes").startswith(LIGHT["shakespeare"])
    assert original != weights.read_bytes()


def test_vllms_requests_load_and_unload(server: RealServer, root: Path) -> None:
    options = {"lora_name": "mine", "lora_path": str(root / "team" / "bard")}
    assert post(server, "/v1/load_lora_adapter", options) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert text(server, lora="mine").startswith(LIGHT["shakespeare"]) and "demo-lora:mine" in names(server)
    assert post(server, "/v1/load_lora_adapter", options)[0] == 409
    assert post(server, "/v1/load_lora_adapter", {**options, "lora_name": "captain"})[0] == 409
    assert post(server, "/v1/load_lora_adapter", {**options, "lora_name": "a:b"})[0] == 400
    assert post(server, "/v1/load_lora_adapter", {**options, "lora_name": "p", "lora_path": "/etc"})[0] == 403
    with server.opened("Light", 200, model="demo-lora", lora="mine", ignore_eos=True) as events:
        next(iter(events))
        status, answer = post(server, "/v1/unload_lora_adapter", {"lora_name": "mine"})
        assert status == 409 and "found 'mine' in use" in answer
    deadline = time.monotonic() + ENDS
    while (reply := post(server, "/v1/unload_lora_adapter", {"lora_name": "mine"}))[0] == 409:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert reply == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert completion(server, model="demo-lora:mine")[0] == 404 and "demo-lora:mine" not in names(server)
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "captain"})[0] == 404, "the config's stay"


def test_a_further_model_loads_folders_of_its_own(server: RealServer, results: Results, root: Path) -> None:
    captain = tuned_texts(results)["captain"]
    options = {"lora_name": "mine", "lora_path": str(root / "sailor"), "model": "tuned-lora"}
    assert post(server, "/v1/load_lora_adapter", options)[0] == 200
    assert text(server, model="tuned-lora:mine") == text(server, model="tuned-lora", lora="sailor") == captain
    os.kill(server.engine_pid, signal.SIGKILL)
    assert text(server, model="tuned-lora:mine") == captain
    assert completion(server, model="demo-lora:mine")[0] == 404
    assert post(server, "/v1/unload_lora_adapter", options)[0] == 200
    assert completion(server, model="tuned-lora:mine")[0] == 404


def test_requests_that_ask_at_once_wait_for_one_load(server: RealServer) -> None:
    actual: list[str | None] = [None] * 6

    def ask(number: int) -> None:
        actual[number] = text(server, lora="again")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == [LIGHT["captain"]] * 6


def test_a_request_waits_for_its_adapter_while_that_is_loading(server: RealServer, root: Path) -> None:
    """Its folder has another name: the request got a 409 about `lora_name`, which it does not have."""
    bodies = {
        "/v1/load_lora_adapter": {"lora_name": "late", "lora_path": "sailor"},
        "/v1/completions": {"model": "demo-lora", "prompt": "Light", "lora": "late"},
    }
    with contextlib.ExitStack() as stack:
        connections = []
        with server.stopped_engine():
            for path, body in bodies.items():
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                connections.append(stack.enter_context(contextlib.closing(connection)))
                connection.request("POST", path, json.dumps(body))
                for _ in range(3):  # answers that come after the server has read the request
                    server.get("/status")
        assert [connection.getresponse().status for connection in connections] == [200, 200]
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "late"})[0] == 200


def test_two_folders_that_are_loaded_at_once_as_one_name_are_not_one(server: RealServer, root: Path) -> None:
    """One is told that the name is taken; before, both were told that theirs was loaded."""
    results: list[tuple[str, int]] = []

    def load(folder: str) -> None:
        options = {"lora_name": "twin", "lora_path": str(root / folder)}
        results.append((folder, post(server, "/v1/load_lora_adapter", options)[0]))

    threads = [threading.Thread(target=load, args=(folder,)) for folder in ("team/bard", "sailor")]
    with server.stopped_engine():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ENDS
        while not results and time.monotonic() < deadline:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert [status for _, status in results] == [409, 200]
    light = LIGHT["shakespeare" if results[1][0] == "team/bard" else "captain"]
    assert text(server, lora="twin").startswith(light)
    # Nor is a folder of that name meant by another folder's path.
    shutil.copytree(ADAPTERS / "captain", root / "twin")
    status, answer = completion(server, lora="./twin")
    assert status == 409 and "expected a folder whose name is free" in answer
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "twin"})[0] == 200
    assert text(server, lora="./twin").startswith(LIGHT["captain"])


@pytest.mark.long
def test_an_engine_that_is_started_again_has_what_was_loaded_but_for_what_changed(results: Results, root: Path) -> None:
    with RealServer(results.root, "--allow-adapter-loading", str(root), target=TARGET) as server:
        for name in ("sailor", "gone"):
            assert text(server, lora=name) == LIGHT["captain"]
        body = {"model": "demo-lora", "lora": "sailor", "ignore_eos": True}
        full = text(server, max_tokens=200, **body)
        with server.opened("Light", 200, **body) as events:
            reader = iter(events)
            resumed_text = next(reader)["choices"][0]["text"]
            (root / "gone").rename(root / "away")
            os.kill(server.engine_pid, signal.SIGKILL)
            resumed_text += "".join(event["choices"][0]["text"] for event in reader)
        assert resumed_text == full
        assert "demo-lora:sailor" in names(server) and "demo-lora:gone" not in names(server)
        assert completion(server, model="demo-lora:gone")[0] == 404
        assert text(server, lora="sailor") == LIGHT["captain"]


def test_a_model_without_room_for_adapters_is_refused_at_the_start(demo: Results, root: Path, tmp_path: Path) -> None:
    tree = Results(shutil.copytree(demo.root, tmp_path / "results"))
    write_json(tree.config(), DEMO_CONFIG.dump())
    options = ("--results", str(tree.root), "--allow-adapter-loading", str(root))
    ended = call("lockstep", ("serve", "demo-llama/fp32/all", *options), ROOT, os.environ)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "expected a model whose graphs take adapters, found one without" in ended.stderr
