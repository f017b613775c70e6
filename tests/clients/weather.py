"""What agents are asked, and what the scripted model answers; no import, for the clients' environments read it too."""

QUESTION = "How is the weather in Paris and Berlin?"
FIRST = "rain in Paris"
SECOND = "sun in Berlin"
CALLS = [["weather", {"city": "Paris"}], ["weather", {"city": "Berlin"}]]
TEXT = "Let me look."
THOUGHT = "There are two cities."
END = "It rains in Paris only."
FORM_QUESTION = "Tell it as JSON."
FORM = {"city": "Paris", "rain": True}
_CALL = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
ANSWERS = {
    QUESTION: f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{_CALL.format('Paris')}\n{_CALL.format('Berlin')}",
    SECOND: END,
    FORM_QUESTION: '{"city": "Paris", "rain": true}',
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city's name."}},
    "required": ["city"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return {"Paris": FIRST, "Berlin": SECOND}[city]
