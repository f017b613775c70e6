"""The web page at `/`, in a real browser, under the policy that it is sent with."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser import PATIENCE, Browser, find
from lockstep_serve.page import page
from real_server import RealServer, make_tree
from scripted_server import ScriptedServer, Step
from some import some

pytestmark = pytest.mark.exports  # a browser takes as long as an export
STATUS = {
    "model": "demo/fp16/all", "identity": "ab" * 32, "limits": {}, "running": 3, "waiting": 2,
    "pages": {"total": 200, "used": 50, "cached": 30}, "heartbeat_age": 0.1, "draining": False,
}  # fmt: skip
ANSWER = "at('log').lastElementChild.textContent"
NASTY = "<img src=x onerror=alert(1)> & <b>bold</b>"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        content, headers = page()
        server.pages["/"] = (content, headers)
        server.status = dict(STATUS)
        yield server


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(find(), tmp_path_factory.mktemp("browser") / "profile")
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(started: Browser) -> Browser:
    """With an empty page."""
    started.renew()
    return started


@pytest.fixture
def shown(server: ScriptedServer, browser: Browser) -> Browser:
    """The page, once it knows its server."""
    browser.open(f"{server.url}/")
    browser.wait("at('model').textContent.startsWith('demo') && model")
    return browser


def ask(browser: Browser, text: str) -> None:
    browser.run("at('prompt').focus()")
    browser.type(text)
    browser.press("Enter")


def endless(body: dict, number: int, pause: float = 0.002) -> Iterator[Step]:
    for at in range(100_000):
        yield pause
        yield f"w{at} "


def answers(*steps: Step) -> Callable[[dict, int], Iterator[Step]]:
    """Return the script of a server whose every answer has these steps."""
    return lambda body, number: iter(steps)


def refuses(status: int, message: str) -> Callable[[int], tuple[int, str] | None]:
    """Return the refusal of a server that refuses its first request only."""
    return lambda number: (status, message) if number == 0 else None


def test_the_page_is_one_file_that_asks_for_nothing_from_elsewhere() -> None:
    content, headers = page()
    text = content.decode()
    places = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)|url\(|@import""", text)
    assert places[0] == "data:," and all(re.fullmatch("#?[a-z0-9_/]+", place) for place in places[1:])
    assert "http:" not in text and "https:" not in text
    assert not [word for word in ("innerHTML", "eval(", "localStorage", "document.cookie") if word in text]
    assert not re.search(r"\sstyle=|\son\w+=", text)  # its policy would refuse them
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_a_chat_streams_in_and_goes_on(server: ScriptedServer, shown: Browser) -> None:
    ask(shown, "Hello\nthere")
    shown.wait("at('stop').hidden && " + ANSWER + ".endsWith('w127 ')")
    assert re.match(
        r"128 tokens · first after \d+\.\d\d s · .* · ended: length", shown.run("at('figures').textContent")
    )
    ask(shown, "And now?")
    shown.wait("document.querySelectorAll('.assistant').length === 2 && at('stop').hidden")
    roles = [(body["role"], body["content"][:8]) for body in server.bodies[1]["messages"]]
    assert roles == [("user", "Hello\nth"), ("assistant", "w0 w1 w2"), ("user", "And now?")]
    assert shown.run("document.activeElement.id") == "prompt" and not shown.said


def test_a_chat_with_the_real_server(browser: Browser, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    demo = request.getfixturevalue("demo")  # made only where there is a browser
    with RealServer(make_tree(tmp_path / "results", demo)) as server:
        browser.open(f"{server.url}/")
        browser.wait("at('model').textContent.startsWith('demo') && model")
        assert browser.run("mode()") == "chat"
        browser.run("at('temperature').value = '0'; at('max_tokens').value = '16'; null")
        ask(browser, "Ice floats because")
        browser.wait("at('stop').hidden && " + ANSWER + " === 'it is lighter than water.'")
        assert "ended: stop" in browser.run("at('figures').textContent")
        ask(browser, "San Francisco is a")
        browser.wait("document.querySelectorAll('.assistant').length === 2 && at('stop').hidden")
        assert browser.run("at('error').hidden") and not browser.said
        links = "[...document.querySelectorAll('a')].filter((each) => !each.hash).map((each) => each.href)"
        read = f"Promise.all({links}.map((where) => fetch(where).then((answer) => [where, answer.status])))"
        assert {status for _, status in browser.run(read)} == {200}
        paths = re.findall("POST ([a-z0-9_/]+)", browser.run("at('api').textContent"))
        for path in paths:  # 405 of a path that takes no GET, and not 404 of one that is not there
            assert browser.run(f"fetch('{path}').then((answer) => answer.status)") == 405, path
        shell = subprocess.run(browser.run("at('curl').textContent"), shell=True, capture_output=True, text=True)
        assert json.loads(shell.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_a_model_that_is_gone_is_looked_for_again(server: ScriptedServer, shown: Browser) -> None:
    shown.wait("model === 'scripted'")
    shown.run("model = 'gone'; null")
    server.refusal = refuses(404, "no such model")
    ask(shown, "Hello")
    shown.wait("!at('error').hidden && model === 'scripted'")
    ask(shown, "")
    shown.wait("at('stop').hidden && " + ANSWER + ".endsWith('w127 ')")
    assert [body["model"] for body in server.bodies] == ["gone", "scripted"]


def test_a_completion_takes_the_parameters(server: ScriptedServer, shown: Browser) -> None:
    shown.run("document.querySelector('input[value=complete]').click()")
    for name, value in {
        "temperature": "0.25",
        "top_p": "0.5",
        "max_tokens": "3",
        "seed": "7",
        "stops": "END\\n\\nX",
    }.items():
        shown.run(f"at('{name}').value = '{value}'")
    ask(shown, "Once")
    shown.wait("at('stop').hidden && " + ANSWER + " === 'Oncew0 w1 w2 '")
    (body,) = server.bodies
    fields = {"prompt": "Once", "temperature": 0.25, "top_p": 0.5, "max_tokens": 3, "seed": 7, "stop": ["END", "X"]}
    assert {name: body[name] for name in fields} == fields and body["model"] == "scripted"


@pytest.mark.parametrize("way", some(["click", "Escape"]))
def test_stop_leaves_and_keeps_what_came(server: ScriptedServer, shown: Browser, way: str) -> None:
    server.script = endless
    ask(shown, "Go on")
    shown.wait(ANSWER + ".includes('w9 ')")
    assert shown.run("at('send').hidden && at('log').getAttribute('aria-busy')") == "true"
    shown.press("Escape") if way == "Escape" else shown.run("at('stop').click()")
    shown.wait("at('stop').hidden && !at('send').hidden")
    assert "ended: stopped" in shown.run("at('figures').textContent") and shown.run("at('error').hidden")
    assert shown.run("at('log').getAttribute('aria-busy')") == "false"
    length = shown.run(ANSWER + ".length")
    server.script = answers("next")
    ask(shown, "Again")
    shown.wait(ANSWER + " === 'next'")
    until = time.monotonic() + PATIENCE
    while not server.gone and time.monotonic() < until:  # the next word that it sends finds nobody
        time.sleep(0.05)
    assert server.gone == [0] and server.bodies[1]["messages"][1]["content"].startswith("w0 w1")
    assert shown.run("document.querySelectorAll('.assistant')[0].textContent.length") == length


@pytest.mark.parametrize(("fault", "message"), some([
    ("refusal", "429: queue full Try again in 7 s."),
    ("event", "the engine died"),
    ("end", "The connection ended before the answer was whole."),
    ("gone", "The server cannot be reached."),
]))  # fmt: skip
def test_an_error_is_one_line_and_the_words_are_kept(
    server: ScriptedServer, shown: Browser, fault: str, message: str
) -> None:
    if fault == "refusal":
        server.refusal = refuses(429, "queue\nfull")
    elif fault == "event":
        server.script = answers({"error": {"message": "the engine died"}})
    elif fault == "end":
        server.script = answers(b"0\r\n\r\n")
    else:
        server.end()
    ask(shown, "Hello")
    assert shown.wait("!at('error').hidden && at('error').textContent") == message
    shown.wait("at('stop').hidden")
    assert shown.run("at('prompt').value") == "Hello" and shown.run("document.querySelectorAll('#log p').length") == 0
    if fault != "gone":
        server.script = answers("fine")
        shown.press("Enter")
        shown.wait(ANSWER + " === 'fine' && at('error').hidden")


@pytest.mark.parametrize(("way", "field"), some([("chat", "messages"), ("complete", "prompt")]))
def test_an_example_is_asked_at_a_click(server: ScriptedServer, shown: Browser, way: str, field: str) -> None:
    shown.run(f"document.querySelector('input[value={way}]').click()")
    text = shown.run("document.querySelectorAll('.empty button')[1].textContent")
    shown.run("document.querySelectorAll('.empty button')[1].click()")
    shown.wait("at('stop').hidden && " + ANSWER + ".endsWith('w127 ')")
    assert server.bodies[0][field] == ([{"role": "user", "content": text}] if way == "chat" else text)
    assert shown.run("document.querySelectorAll('.empty').length") == 0
    shown.run("at('clear').click()")
    assert shown.run("document.querySelectorAll('.empty button').length") == 3


def test_reasoning_is_shown_and_not_sent_again(server: ScriptedServer, shown: Browser) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning": "I see. ", "reasoning_content": "I see. "}}]}
    server.script = answers(thought, "Ice.")
    ask(shown, "Hello")
    shown.wait("at('stop').hidden && " + ANSWER + " === 'I see. Ice.'")
    ask(shown, "And?")
    shown.wait("document.querySelectorAll('.assistant').length === 2 && at('stop').hidden")
    assert server.bodies[1]["messages"][1]["content"] == "Ice."


def test_the_first_line_of_a_chats_answer_is_not_indented(server: ScriptedServer, shown: Browser) -> None:
    server.script = answers(" ", " \n Ice", " floats.")
    ask(shown, "Hello")
    shown.wait("at('stop').hidden && " + ANSWER + " === 'Ice floats.'")
    ask(shown, "And?")
    shown.wait("document.querySelectorAll('.assistant').length === 2 && at('stop').hidden")
    assert server.bodies[1]["messages"][1]["content"] == "  \n Ice floats.", "the model sees its earlier answer"
    shown.run("document.querySelector('input[value=complete]').click()")
    ask(shown, "Once")
    shown.wait("at('stop').hidden && " + ANSWER + " === 'Once  \\n Ice floats.'")


def test_the_api_is_shown_as_a_shell_asks_it(server: ScriptedServer, shown: Browser) -> None:
    shown.run("document.querySelector('nav a').click()")
    assert shown.wait("at('api').open && at('curl').textContent").startswith(f"curl {server.url}/v1/chat/completions ")
    shown.run("document.querySelector('input[value=complete]').click()")
    body = json.loads(shown.run("at('curl').textContent").partition("-d '")[2].removesuffix("'"))
    assert body == {"model": "scripted", "prompt": "San Francisco is a", "max_tokens": 64}


def test_what_a_model_says_is_text(server: ScriptedServer, shown: Browser) -> None:
    server.script = answers(NASTY)
    ask(shown, NASTY)
    shown.wait(ANSWER + f" === {NASTY!r}")
    assert shown.run("document.querySelectorAll('#log img, #log b').length") == 0 and not shown.said


def test_the_policy_lets_nothing_else_run(shown: Browser) -> None:
    shown.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    shown.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 2\">')")
    refused = shown.run("fetch('http://127.0.0.1:1/').catch((error) => error.name)")
    assert refused == "TypeError" and shown.run("window.ran === undefined")
    assert any("Content Security Policy" in line for line in shown.said)


def test_the_strip_follows_the_server(server: ScriptedServer, shown: Browser) -> None:
    read = "['running', 'waiting', 'pages', 'state'].map((id) => at(id).textContent).join('|')"
    assert shown.wait(f"at('running').textContent === '3' && {read}") == "3|2|25%|"
    assert shown.run("at('bar-used').style.width + at('bar-cached').style.width") == "25%15%"
    server.status |= {"running": 4, "draining": True}
    shown.wait(f"{read} === '4|2|25%|draining'")
    server.status |= {"draining": False, "heartbeat_age": 42.4}
    shown.wait(f"{read} === '4|2|25%|no step for 42 s'")
    server.status_code = 403  # of a key that opens some models alone
    shown.wait(f"{read} === '-|-|-|' && at('model').textContent === 'scripted'")
    server.end()
    shown.wait(f"{read} === '-|-|-|not reachable'")


def test_a_model_without_a_chat_template_is_completed(server: ScriptedServer, browser: Browser) -> None:
    server.status["chat"] = False
    browser.open(f"{server.url}/")
    browser.wait("mode() === 'complete'")


def test_the_key_goes_with_each_request_and_stays_nowhere(server: ScriptedServer, shown: Browser) -> None:
    script = "(where, how) => (keys.push(how?.headers?.Authorization), real(where, how))"
    shown.run(f"window.keys = []; window.fetch = ((real) => {script})(fetch); at('key').value = 'secret'; null")
    ask(shown, "Hello")
    shown.wait("at('stop').hidden && document.querySelectorAll('.assistant').length === 1 && keys.length > 1")
    assert shown.run("keys.every((key) => key === 'Bearer secret')")
    assert (
        shown.run("Object.keys(localStorage).length + Object.keys(sessionStorage).length + document.cookie.length") == 0
    )
    assert shown.run("at('key').type") == "password"


def test_a_screen_reader_finds_every_control_by_its_name(shown: Browser) -> None:
    shown.run("document.querySelector('details').open = true")
    actual = shown.tree()
    for control in (
        ("textbox", "Message"), ("button", "Send"), ("button", "Clear"), ("radio", "Chat"), ("radio", "Complete"),
        ("spinbutton", "Temperature"), ("spinbutton", "Top p"), ("spinbutton", "Max tokens"), ("spinbutton", "Seed"),
        ("textbox", "Stop before, one a line"), ("textbox", "API key, kept on this page only"), ("log", "Conversation"),
        ("image", "KV cache: 50 pages used and 30 cached of 200"), ("link", "API"),
        ("link", "Metrics"), ("link", "Status"), ("button", "Why does ice float?"),
    ):  # fmt: skip
        assert control in actual
    controls = ("textbox", "button", "radio", "spinbutton", "combobox", "log", "image", "group")
    assert not [role for role, name in actual if role in controls[:-1] and not name]


def test_the_keyboard_reaches_every_control_in_order(shown: Browser) -> None:
    reached = []
    shown.run("document.querySelector('details').open = true; at('prompt').focus()")
    for _ in range(9):
        shown.press("Tab")
        reached.append(
            shown.run("document.activeElement.id || document.activeElement.value || document.activeElement.tagName")
        )
    assert reached == ["chat", "clear", "send", "SUMMARY", "temperature", "top_p", "max_tokens", "seed", "stops"]


CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const bright = (color) => {
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const linear = (v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
  };
  const read = "h1, #model, .strip *, #log p, button:enabled, legend, label, summary, #error";
  const shown = [...document.querySelectorAll(read)];
  return shown.filter((each) => each.checkVisibility() && each.textContent.trim()).map((each) => {
    const [low, high] = [bright(getComputedStyle(each).color), bright(behind(each))].sort((a, b) => a - b);
    return [(high + .05) / (low + .05), each.outerHTML.slice(0, 80)];
  }).sort((a, b) => a[0] - b[0])[0];
})()
"""


@pytest.mark.parametrize(("width", "dark"), some([(360, True), (1200, False)]))
def test_the_page_fits_and_can_be_read(server: ScriptedServer, shown: Browser, width: int, dark: bool) -> None:
    shown.emulate(width, 740, dark)
    ask(shown, "A long word: " + "x" * 200)
    shown.wait("at('stop').hidden && document.querySelectorAll('.assistant').length === 1")
    shown.run("fail('something is wrong'); document.querySelector('details').open = true")
    assert shown.run("document.documentElement.scrollWidth") <= width  # nothing stands out to the side
    ratio, where = shown.run(CONTRAST)
    assert ratio >= 4.5, where  # WCAG 2.1, success criterion 1.4.3, level AA
    script = "filter((each) => each.checkVisibility() && each.type !== 'radio')"
    controls = "[...document.querySelectorAll('button, input, select')]"
    sizes = shown.run(f"{controls}.{script}.map((each) => each.offsetHeight)")
    assert min(sizes) >= 44  # points, for a finger
    first = shown.run("at('send').offsetTop - at('clear').offsetTop")
    assert first == 0  # side by side on a phone too
