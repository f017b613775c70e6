"""Split the streamed text of an answer into reasoning, content and tool calls.

The joined parts do not depend on how the text is split into pieces. A call is held back until it is complete, because
text that only begins like a call is content. Under a grammar that forces calls, their arguments are streamed, and a
truncated call stays truncated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.runtime.tokenizer import Tokenizer
from lockstep_serve.reasoning import ReasoningFormat
from lockstep_serve.tool_formats.base import Event, Malformed, Reading, Source, ToolFormat


@dataclass(frozen=True)
class Part:
    """A piece of an answer; call: of a name or arguments, the number of their call."""

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = 0


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of a request are read.

    reasoning: its format; None: it stays in the content. opened: the prompt ends inside the reasoning. format: of tool
    calls; None: none are read. tools: {name: schema}. single: only the first call counts. forced: a grammar allows only
    calls. earlier: number of calls in the chat's messages.
    """

    reasoning: ReasoningFormat | None = None
    opened: bool = False
    format: ToolFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    single: bool = False
    forced: bool = False
    earlier: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must stay in the text, even if they are special tokens."""
        marks: tuple[str, ...] = ()
        if self.format is not None:
            marks = (*self.format.marks, *self.format.starts)
        if self.reasoning is not None:
            marks = (*marks, self.reasoning.begin, self.reasoning.end)
        return marks

    def call_id(self, answer: str, number: int, name: str) -> str:
        """Return a call's id, a function of the answer's id and the call's number."""
        assert self.format is not None
        if self.format.id:
            return self.format.id.format(name=name, number=self.earlier + number)
        digest = hashlib.sha256(f"{answer}/{number}".encode()).hexdigest()
        id = digest[: self.format.id_length]
        if self.format.id_length < 24:  # Mistral's templates take no underscore
            return id
        return f"call_{id}"

    def num_reasoning_tokens(self, tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
        """Return the number of reasoning tokens, end mark included. tokens, text: of the answer."""
        reasoning = self.reasoning
        if reasoning is None or not (self.opened or text.lstrip().startswith(reasoning.begin)):
            return 0
        end = tokenizer.token_id(reasoning.end)
        # An end mark of one token is looked up; one of several, or a call's, is found in the text token by token.
        if end in tokens and not self.calls_end_reasoning:
            return tokens.index(end) + 1
        if end is not None and not self.calls_end_reasoning:
            return len(tokens)
        stream = tokenizer.stream(shown=tokenizer.silent(self.marks))
        before = ""
        for number, token in enumerate(tokens, 1):
            before += stream.push(token)
            if any(mark in before for mark in (reasoning.end, *self.calls_end_reasoning)):
                return number
        return len(tokens)

    @property
    def calls_end_reasoning(self) -> tuple[str, ...]:
        """Return the marks of calls that end the reasoning; a grammar forces the reasoning's end mark instead."""
        if self.format is None or not self.tools or self.forced:
            return ()
        return self.format.ends_reasoning

    def reader(self) -> AnswerReader:
        return AnswerReader(self)


@dataclass
class Message:
    """A complete answer: its parts joined. calls: names and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def join_parts(parts: list[Part]) -> Message:
    message = Message("", "", [])
    for part in parts:
        if part.kind == "name":
            message.calls.append((part.text, ""))
        elif part.kind == "arguments":
            name, before = message.calls[part.call]
            message.calls[part.call] = name, before + part.text
        elif part.kind == "reasoning":
            message.reasoning += part.text
        else:
            message.content += part.text
    return message


class _Trimmed:
    """Strips white space before and after marks. at_start: a mark precedes the text."""

    def __init__(self, at_start: bool) -> None:
        self._after_mark = at_start
        self._space = ""  # held back: a mark may follow
        self._is_empty = True

    def push(self, text: str) -> str:
        if self._after_mark:
            text = text.lstrip()
        if not text:
            return ""
        self._after_mark = False
        text = self._space + text
        trimmed = text.rstrip()
        self._space = text[len(trimmed) :]
        if trimmed:
            self._is_empty = False
        return trimmed

    def cut(self) -> None:
        """Record a mark; the texts before and after it are joined by a line end."""
        self._after_mark = True
        self._space = ""
        if not self._is_empty:
            self._space = "\n"

    def trailing_space(self) -> str:
        """Return the held back white space, at the end of the text."""
        return "" if self._after_mark else self._space


def _split(text: str, marks: re.Pattern[str], longest: int) -> tuple[int, int]:
    """Return the first mark's start and end; without one, the index from which a mark may still begin, and -1."""
    if match := marks.search(text):
        return match.start(), match.end()
    return max(0, len(text) - longest + 1), -1


class AnswerReader:
    """The reader of one answer; num_calls, num_malformed: of calls so far."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self.num_calls = 0
        self.num_malformed = 0
        self._number = 0  # of the current call, from 1
        self._buffer = ""
        self._thought: list[str] = []
        self._state: Literal["before", "reasoning", "answer"] = "answer"
        if plan.reasoning is not None:
            self._state = "before"
            if plan.opened:
                self._state = "reasoning"
            ends = (plan.reasoning.end, *plan.calls_end_reasoning)
            self._end = re.compile("|".join(map(re.escape, ends)))
            self._longest_end = max(map(len, ends))
        self._reasoning = _Trimmed(True)
        self._content = _Trimmed(False)
        self._source = Source(plan.tools)
        self._reading: Reading[None] | None = None
        self._waiting: list[Event] = []  # of an incomplete call
        self._mark = 0  # length of the mark that began the call
        self._sent = False  # the call's name
        self._at_start = True
        starts: tuple[str, ...] = plan.format.starts if plan.format is not None else ()
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self._longest_start = max(map(len, starts), default=1)

    def push(self, text: str) -> list[Part]:
        """Add text; return the parts that later text cannot change."""
        self._buffer += text
        return list(self._parts(False))

    def finish(self) -> list[Part]:
        """End the text; return the remaining parts."""
        return list(self._parts(True))

    def _parts(self, ended: bool) -> Iterator[Part]:
        if self._state == "before":
            self._before(ended)
        if self._state == "reasoning":
            yield from self._in_reasoning(ended)
        if self._state == "answer":
            text = self._buffer
            self._buffer = ""
            if self._plan.format is None:
                yield from self._say(text)
            else:
                self._source.text += text
                self._source.ended = ended
                yield from self._in_answer(ended)
            space = self._content.trailing_space()
            if ended and space:
                yield Part("content", space)

    def _before(self, ended: bool) -> None:
        """Decide whether the answer begins with reasoning."""
        assert self._plan.reasoning is not None
        text = self._buffer.lstrip()
        begin = self._plan.reasoning.begin
        if text.startswith(begin):
            self._buffer = text[len(begin) :]
            self._state = "reasoning"
        elif ended or not begin.startswith(text):
            self._state = "answer"

    def _in_reasoning(self, ended: bool) -> Iterator[Part]:
        assert self._plan.reasoning is not None
        start, end = _split(self._buffer, self._end, self._longest_end)
        if ended and end < 0:
            start = len(self._buffer)
        thought = self._buffer[:start]
        mark = self._buffer[start:end]
        self._thought.append(thought)
        if text := self._reasoning.push(thought):
            yield Part("reasoning", text)
        if end < 0:
            self._buffer = self._buffer[start:]
            if ended and self._plan.tools:  # calls inside reasoning that never ended
                self.num_malformed += len(self._starts.findall("".join(self._thought)))
            return
        if mark != self._plan.reasoning.end:
            end = start  # the mark of a call, which is part of the answer
        self._buffer = self._buffer[end:]
        self._content.cut()
        self._state = "answer"

    def _say(self, text: str) -> Iterator[Part]:
        if text := self._content.push(text):
            yield Part("content", text)

    def _in_answer(self, ended: bool) -> Iterator[Part]:
        while True:
            if self._reading is None and not (yield from self._next_call(ended)):
                return
            assert self._reading is not None
            try:
                for event in self._reading:
                    if event is None:
                        return
                    self._waiting.append(event)
                    if self._plan.forced or event.kind in ("content", "reasoning"):
                        yield from self._emit()
                yield from self._emit()
                self._content.cut()
                self._reading = None
            except Malformed as error:
                self.num_malformed += 1
                self._reading = None
                self._waiting = []
                if self._sent:  # a truncated call under a grammar: its name was sent, so it stays a call
                    self._source.at = len(self._source.text)
                else:
                    self._source.at = self._mark
                    if error.end is not None:
                        self._source.at = error.end
                    yield from self._say(self._source.text[: self._source.at])
            self._source.text = self._source.text[self._source.at :]
            self._source.at = 0

    def _next_call(self, ended: bool) -> Generator[Part, None, bool]:
        """Yield the content before the next call, and begin to read the call; return whether there is one."""
        assert self._plan.format is not None
        source = self._source
        opening = self._plan.format.opening
        # Some formats have calls without a mark, if the answer begins with their first character.
        if self._at_start and opening:
            text = source.text.lstrip()
            if not text and not ended:
                return False
            self._at_start = False
            if text[:1] and text[0] in opening:
                source.at = len(source.text) - len(text)
                self._begin(source.at)
                return True
        start, end = _split(source.text, self._starts, self._longest_start)
        if ended and end < 0:
            start = len(source.text)
        yield from self._say(source.text[:start])
        source.text = source.text[start:]
        if end < 0:
            return False
        self._begin(end - start)
        return True

    def _begin(self, mark: int) -> None:
        assert self._plan.format is not None
        self._mark = mark
        self._sent = False
        self._at_start = False
        self._reading = self._plan.format.read(self._source)

    def _emit(self) -> Iterator[Part]:
        """Yield the parts of the events that were held back."""
        events = self._waiting
        self._waiting = []
        for event in events:
            if event.kind == "content" or (event.kind == "reasoning" and self._plan.reasoning is None):
                yield from self._say(event.text)
                continue
            if event.kind == "reasoning":
                yield Part("reasoning", event.text)
                continue
            if event.kind == "name":
                self._sent = True
                self._number += 1
                self.num_calls = 1 if self._plan.single else self._number
            # A further call, where only one counts, is left out.
            if self._number == self.num_calls:
                yield Part(event.kind, event.text, self._number - 1)
