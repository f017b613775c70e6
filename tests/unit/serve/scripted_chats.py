"""A model whose answers to chats are scripted: with tool calls, reasoning, and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scripted_model
from demo_model import DEMO
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from lockstep.runtime import Tokenizer
from lockstep.targets import Results
from shared import Shared

# A prompt is the users' messages; where one asks for it, the template prints its arguments.
TEMPLATE = """\
{%- if shown %}{{ raise_exception(tools | tojson) }}{% endif %}
{%- if effort_shown %}{{ raise_exception('effort ' ~ reasoning_effort ~ enable_thinking | default('') | lower) }}
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'tool') %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or () %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt and thinks %}<think>{% endif %}
{#- <tool_call> <think> #}"""
PARIS = '{"city": "Paris"}'
BERLIN = '{"city": "Berlin", "days": [1, 2]}'


def calls(*arguments: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in arguments
    )


# What the model answers, by the number of tokens of the prompt.
TWO_CALLS = f"Let me look. {calls(('weather', PARIS), ('weather', BERLIN))}"
ANSWERS = {
    20: TWO_CALLS, 140: "<tool_call>\nnone</tool_call>", 200: f"[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]time{{}}",
    260: "<think>\nI <b>think.\n</think>\n\nParis.", 310: f"<think>Look.</think>{calls(('time', '{}'))}",
    360: "still thinking</think>Done.", 400: f'{{"name": "weather", "arguments": {PARIS}}}', 460: "The time is known.",
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Berlin"]}, "days": {"type": "array", "maxItems": 0}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "additionalProperties": False}},
}
TOOLS = [WEATHER, TIME]
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]")


def scripted_chats(shared: Shared) -> Results:
    """Return results of the model."""

    def make(folder: Path) -> None:
        library = Library.from_file(str(DEMO / "tokenizer.json"))
        library.add_tokens([AddedToken(name, normalized=False, special=False) for name in ADDED])
        library.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
        library.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer(folder / "tokenizer.json")
        script: dict[int, int] = {}
        for length, text in ANSWERS.items():
            ids = [*tokenizer.encode(text).tolist(), 0]
            places = range(length - 1, length - 1 + len(ids))
            assert not script.keys() & set(places)
            script |= dict(zip(places, ids))
        config = {"chat_template": TEMPLATE, "eos_token": "<eos>"}
        checkpoint = scripted_model.write(
            folder / "checkpoint", folder / "tokenizer.json", script, config, eos_token_id=0
        )
        scripted_model.results(checkpoint, folder / "results")

    return Results(shared.folder("scripted-tools", make) / "results")


def prompt(text: str, less: int = 0) -> str:
    """Return the prompt that is answered with a text; less: tokens that come from elsewhere."""
    length = next(length for length, answer in ANSWERS.items() if answer == text)
    return "\n" * (length - less)


def chat_options(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt(text)}]
    return {"model": "scripted", "temperature": 0, "messages": messages, **options}
