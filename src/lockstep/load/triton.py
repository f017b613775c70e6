"""Triton's generate extension, as its TensorRT-LLM backend has it.

In: a prompt, or an answer. Out: its request, or its record. Texts go to the model `ensemble`, token ids to
`tensorrt_llm`, which takes them as they are. Triton counts no tokens: those of `tensorrt_llm` are counted here, of
`ensemble` as many as there are values in `output_log_probs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.errors import InputError
from lockstep.load.records import COMPLETED, Prompt, Record
from lockstep.load.wire import Reader, error_line, quoted

_CORE = "tensorrt_llm"


def fields(prompt: Prompt, model: str, extra: Mapping[str, Any], stream: bool) -> tuple[str, dict[str, Any]]:
    """Return a model (`model`, or the usual one for "") and its inputs by name. Raises InputError for a chat."""
    content = prompt.content
    if isinstance(content, str):
        given: dict[str, Any] = {"text_input": content, "max_tokens": prompt.max_tokens, "stream": stream}
        given |= {"bad_words": "", "stop_words": ""}
        model = model or "ensemble"
    elif isinstance(content[0], dict):
        raise InputError("--endpoint triton: expected prompts that are text or token ids, found messages")
    else:
        given = {"input_ids": content, "input_lengths": len(content), "request_output_len": prompt.max_tokens}
        given["streaming"] = stream
        model = model or _CORE
    if not stream:
        given["exclude_input_in_output"] = True  # as a stream has it
    extra = dict(extra)
    if extra.pop("ignore_eos", False):
        given["end_id"] = -1  # no token ends it
    return model, {**given, **extra}


def request(prompt: Prompt, model: str, extra: Mapping[str, Any], stream: bool) -> tuple[str, bytes]:
    """Return the path and the body of a request. Raises InputError as `fields`."""
    model, given = fields(prompt, model, extra, stream)
    return f"/v2/models/{model}/generate{'_stream' if stream else ''}", json.dumps(given).encode()


class TritonReader(Reader):
    """A reader of Triton's events."""

    def _event(self, event: bytes, now: float) -> None:
        try:
            value = json.loads(event)
            if "error" in value:
                self._record.error = error_line(value)
            else:
                take(self._record, *answered(value), now - self._start)
        except (ValueError, TypeError, KeyError):
            self._record.error = f"expected an event of Triton's format, found {quoted(event)}"

    def _judge(self) -> None:
        judge(self._record)


def take(record: Record, text: str, tokens: int, now: float) -> None:
    """Add what came at `now`, in seconds from the start of the run."""
    if tokens or text:
        record.chunks.append(now)
        record.text += text
        record.output_tokens = (record.output_tokens or 0) + tokens


def judge(record: Record) -> None:
    """Set the status of a record whose answer came to its end."""
    if record.error is None and not record.output_tokens:
        record.error = "expected an answer with tokens, found none"
    elif record.error is None:
        record.status = COMPLETED


def answered(value: Mapping[str, Any]) -> tuple[str, int]:
    """Return the text and the token count of an answer's outputs, by name. Raises KeyError and TypeError."""
    if "text_output" in value:
        return str(value["text_output"]), len(_list(value.get("output_log_probs", ())))
    ids = _list(value["output_ids"])
    return "".join(f"{int(token)} " for token in ids), len(ids)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
