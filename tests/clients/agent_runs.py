"""Agents by the libraries of `envs/agents.txt`, in whose environment this runs: `agents.py CLIENT URL`.

Prints JSON: {check: result}. The first word of a check's name is the expected result.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from weather import FORM_QUESTION, PARAMETERS, QUESTION, weather

MODEL = "scripted"
ASK = [{"role": "user", "content": QUESTION}]
FORM = [{"role": "user", "content": FORM_QUESTION}]
FUNCTION = {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
Checks = Iterator[tuple[str, Any]]


def chat_calls(message: Any) -> Any:
    """Return a chat's message as text, calls and reasoning."""
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]
    return [message.content, calls, getattr(message, "reasoning_content", None)]


def chat_turns(message: Any) -> list[Any]:
    """Return the messages of the turn after a chat's calls."""
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in message.tool_calls
    ]
    return [*ASK, message.model_dump(exclude_none=True), *results]


def run_openai(url: str) -> Checks:
    import openai
    from pydantic import BaseModel

    class Form(BaseModel):
        city: str
        rain: bool

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": MODEL, "temperature": 0, "tools": [CHAT_TOOL]}
    message = client.chat.completions.create(messages=ASK, **options).choices[0].message
    yield "calls", chat_calls(message)
    with client.chat.completions.stream(messages=ASK, **options) as stream:
        yield "calls of a stream", chat_calls(stream.get_final_completion().choices[0].message)
    message = client.chat.completions.create(messages=chat_turns(message), **options).choices[0].message
    yield "loop", message.content
    parsed_form = client.chat.completions.parse(messages=FORM, model=MODEL, temperature=0, response_format=Form)
    parsed = parsed_form.choices[0].message.parsed
    yield "form", parsed and parsed.model_dump()

    flat = [{"type": "function", **FUNCTION, "strict": True}]
    options = {"model": MODEL, "temperature": 0, "tools": flat}
    response = client.responses.create(input=ASK, **options)
    yield "calls of a response", response_calls(response.output)
    with client.responses.stream(input=ASK, **options) as stream:
        yield "calls of a streamed response", response_calls(stream.get_final_response().output)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": weather(**json.loads(item.arguments))}
        for item in response.output
        if item.type == "function_call"
    ]
    yield "loop of responses", client.responses.create(input=[*ASK, *response.output, *results], **options).output_text
    output = client.responses.parse(input=FORM, model=MODEL, temperature=0, text_format=Form).output_parsed
    yield "form of a response", output and output.model_dump()


def response_calls(output: Any) -> Any:
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in output:
        if item.type == "function_call":
            calls.append([item.name, json.loads(item.arguments)])
        elif item.type in texts:
            texts[item.type] += "".join(part.text for part in item.content)
    return [texts["message"], calls, texts["reasoning"]]


def run_anthropic(url: str) -> Checks:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools = [{"name": "weather", "description": "Tell the weather.", "input_schema": PARAMETERS}]
    thinking = {"type": "enabled", "budget_tokens": 128}
    options: Any = {"model": MODEL, "max_tokens": 200, "tools": tools, "thinking": thinking}
    options["extra_body"] = {"temperature": 0}  # the package's own is said to be no more
    message = client.messages.create(messages=ASK, **options)
    yield "calls", message_calls(message)
    with client.messages.stream(messages=ASK, **options) as stream:
        yield "calls of a stream", message_calls(stream.get_final_message())
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns: Any = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    (block,) = client.messages.create(messages=turns, **options).content
    yield "loop", block.text
    runner = client.beta.messages.tool_runner(
        messages=ASK, model=MODEL, max_tokens=200, tools=[anthropic.beta_tool(weather)], extra_body={"temperature": 0}
    )
    yield "loop of the tool runner", runner.until_done().content[0].text
    count = client.messages.count_tokens(messages=ASK, model=MODEL, tools=tools)
    yield "count", count.input_tokens == message.usage.input_tokens


def message_calls(message: Any) -> Any:
    thinking, text, *calls = message.content
    return [text.text, [[call.name, call.input] for call in calls], thinking.thinking]


def run_openai_agents(url: str) -> Checks:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    settings = agents.ModelSettings(temperature=0, store=False)
    models = {
        "chats": agents.OpenAIChatCompletionsModel(MODEL, client),
        "responses": agents.OpenAIResponsesModel(MODEL, client),
    }

    async def run() -> dict[str, Any]:
        results = {}
        for name, model in models.items():
            tools = [agents.function_tool(weather)]
            agent = agents.Agent("weather", instructions="Tell it.", model=model, tools=tools, model_settings=settings)
            results[f"loop of {name}"] = (await agents.Runner.run(agent, QUESTION)).final_output
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            results[f"loop of streamed {name}"] = streamed.final_output
        return results

    yield from asyncio.run(run()).items()


def run_langchain(url: str) -> Checks:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    for api in ("chats", "responses"):
        chat = ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, use_responses_api=api == "responses"
        )
        bound = chat.bind_tools([CHAT_TOOL])
        message = bound.invoke(QUESTION)
        calls = [[call["name"], call["args"]] for call in message.tool_calls]
        yield f"called in {api}", [message.text.strip(), calls]
        final_message = None
        for chunk in bound.stream(QUESTION):
            final_message = chunk if final_message is None else final_message + chunk
        yield (
            f"called in a stream of {api}",
            [final_message.text.strip(), [[c["name"], c["args"]] for c in final_message.tool_calls]],
        )
        results = [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
        yield f"loop of {api}", bound.invoke([*ASK, message, *results]).text.strip()
        schema = {"title": "Form", "type": "object", "properties": {"city": {"type": "string"}}}
        schema = {**schema, "required": ["city"], "additionalProperties": False}
        form = chat.with_structured_output(schema, method="json_schema").invoke(FORM_QUESTION)
        yield f"city of {api}", form["city"]


def run_litellm(url: str) -> Checks:
    import litellm

    for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
        options: Any = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "temperature": 0}
        options |= {"tools": [CHAT_TOOL], "max_tokens": 200, "num_retries": 0}
        message = litellm.completion(messages=ASK, **options).choices[0].message
        yield f"called by {provider}", chat_calls(message)[:2]
        chunks = list(litellm.completion(messages=ASK, stream=True, **options))
        final_message = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message
        yield f"called in a stream by {provider}", chat_calls(final_message)[:2]
        turns = chat_turns(message)
        yield f"loop by {provider}", litellm.completion(messages=turns, **options).choices[0].message.content


def run_inspect(url: str) -> Checks:
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="weather")
    def weather_tool() -> Any:
        async def execute(city: str) -> str:
            """Tell the weather.

            Args:
                city: The city's name.
            """
            return weather(city)

        return execute

    for api in (False, True):
        model = get_model(f"openai-api/lockstep/{MODEL}", base_url=f"{url}/v1", api_key="none", responses_api=api)
        task = inspect_ai.Task(
            dataset=[Sample(input=QUESTION, target="Paris only")],
            solver=[use_tools(weather_tool()), generate()],
            scorer=includes(),
        )
        (log,) = inspect_ai.eval(task, model=model, temperature=0, display="none")
        assert log.status == "success" and log.samples, log.error
        yield f"loop of {'responses' if api else 'chats'}", log.samples[0].output.completion.strip()
        yield f"score of {'responses' if api else 'chats'}", log.samples[0].scores["includes"].value


CLIENTS: dict[str, Callable[[str], Checks]] = {
    "openai": run_openai, "anthropic": run_anthropic, "openai-agents": run_openai_agents,
    "langchain-openai": run_langchain, "litellm": run_litellm, "inspect-ai": run_inspect,
}  # fmt: skip

if __name__ == "__main__":
    client, url = sys.argv[1:]
    print(json.dumps(dict(CLIENTS[client](url)), sort_keys=True))
