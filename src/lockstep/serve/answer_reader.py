"""The text of an answer, as it comes, to its parts: reasoning, content and tool calls.

Whatever the pieces in which a text comes, the parts joined are the same. A call is held back until it is whole, unless
a grammar holds the model to it: then its arguments go out as they come, and one that is cut short ends where it does.
What begins like a call and is none is content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.runtime.tokenizer import Tokenizer
from lockstep.serve.reasoning import ReasoningFormat
from lockstep.serve.tool_formats.base import Event, Malformed, Reading, Source, ToolFormat


@dataclass(frozen=True)
class Part:
    """A piece of an answer; call: of a name or arguments, the number of their call."""

    kind: Literal["reasoning", "content", "name", "arguments"]
    text: str
    call: int = 0


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of a request are read.

    reasoning: how the model marks it, None where it stays in the content. opened: the prompt ends inside of it.
    format: of tool calls, None where none are read. tools: schemas by name. single: only the first call counts.
    earlier: calls of the chat's messages. held: a grammar holds the model to calls from the answer's first token on.
    """

    reasoning: ReasoningFormat | None = None
    opened: bool = False
    format: ToolFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    single: bool = False
    held: bool = False
    earlier: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what a tokenizer may have as special tokens, which are to be in the text."""
        calls = (*self.format.marks, *self.format.starts) if self.format else ()
        return calls if self.reasoning is None else (*calls, self.reasoning.begin, self.reasoning.end)

    def call_id(self, answer: str, number: int, name: str) -> str:
        """Return a call's id, which is the same for the same id of the answer."""
        if self.format and self.format.id:
            return self.format.id.format(name=name, number=self.earlier + number)
        digest = hashlib.sha256(f"{answer}/{number}".encode()).hexdigest()
        length = self.format.id_length if self.format else 0
        return digest[:length] if length < 24 else f"call_{digest[:length]}"  # Mistral's templates take no underscore

    def num_reasoning_tokens(self, tokens: Sequence[int], text: str, tokenizer: Tokenizer) -> int:
        """Return how many tokens of an answer are its reasoning, up to the end mark; text: of the answer."""
        reasoning = self.reasoning
        if reasoning is None or not (self.opened or text.lstrip().startswith(reasoning.begin)):
            return 0
        end = tokenizer.token_id(reasoning.end)
        if end is not None and not self.calls_end_reasoning:
            return tokens.index(end) + 1 if end in tokens else len(tokens)
        stream = tokenizer.stream(shown=tokenizer.silent(self.marks))
        before = ""
        for number, token in enumerate(tokens, 1):
            before += stream.push(token)
            if any(mark in before for mark in (reasoning.end, *self.calls_end_reasoning)):
                return number
        return len(tokens)

    @property
    def calls_end_reasoning(self) -> tuple[str, ...]:
        """Return what ends the reasoning without its end mark; a grammar waits for that."""
        return self.format.ends_reasoning if self.format and self.tools and not self.held else ()

    def reader(self) -> AnswerReader:
        """Return a reader of one answer."""
        return AnswerReader(self)


@dataclass
class Message:
    """A whole answer: its parts joined. calls: names and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def joined(parts: list[Part]) -> Message:
    """Return the message that parts make."""
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
    """Text without the white space at its ends, where it meets a mark; at_start: it follows one."""

    def __init__(self, at_start: bool) -> None:
        self._drops = at_start
        self._space = ""
        self._said = False

    def push(self, text: str) -> str:
        if self._drops:
            text = text.lstrip()
        if not text:
            return ""
        self._drops = False
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._said |= bool(kept)
        return kept

    def cut(self) -> None:
        """Take note of a mark; texts before and after it become two lines."""
        self._drops = True
        self._space = "\n" if self._said else ""

    def rest(self) -> str:
        """Return the white space that no mark followed."""
        return "" if self._drops else self._space


def _split(text: str, marks: re.Pattern[str], longest: int) -> tuple[int, int]:
    """Return where the first mark begins, else (from where one may begin, -1)."""
    if found := marks.search(text):
        return found.start(), found.end()
    return max(0, len(text) - longest + 1), -1


class AnswerReader:
    """The reader of one answer; num_calls, num_malformed: what it has found so far."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._live = plan.held
        self.num_calls = self.num_malformed = self._number = 0
        self._buffer = ""
        self._thought: list[str] = []
        self._state: Literal["before", "reasoning", "answer"] = "answer"
        if plan.reasoning is not None:
            self._state = "reasoning" if plan.opened else "before"
            ends = (plan.reasoning.end, *plan.calls_end_reasoning)
            self._end = re.compile("|".join(map(re.escape, ends)))
            self._longest_end = max(map(len, ends))
        self._reasoning = _Trimmed(True)
        self._content = _Trimmed(False)
        self._source = Source(plan.tools)
        self._reading: Reading[None] | None = None
        self._waiting: list[Event] = []  # of a call that is not whole
        self._mark = 0  # characters of what the call at hand began with
        self._sent = False  # of the call at hand, its name
        self._at_start = True
        starts = plan.format.starts if plan.format else ()
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self._longest_start = max(map(len, starts), default=1)

    def push(self, text: str) -> list[Part]:
        """Take more text and return the parts that are sure."""
        self._buffer += text
        return list(self._parts(False))

    def finish(self) -> list[Part]:
        """Return what is left when no more text comes."""
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
            if ended and (rest := self._content.rest()):
                yield Part("content", rest)

    def _before(self, ended: bool) -> None:
        """Look whether the answer begins with reasoning."""
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
        at, behind = _split(self._buffer, self._end, self._longest_end)
        at = len(self._buffer) if ended and behind < 0 else at
        if behind >= 0 and self._buffer[at:behind] != self._plan.reasoning.end:
            behind = at  # a call, which is part of the answer
        self._thought.append(self._buffer[:at])
        if text := self._reasoning.push(self._buffer[:at]):
            yield Part("reasoning", text)
        if ended and behind < 0 and self._plan.tools:  # calls that nobody gets
            self.num_malformed += len(self._starts.findall("".join(self._thought)))
        self._buffer = self._buffer[at:] if behind < 0 else self._buffer[behind:]
        if behind >= 0:
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
                    if self._live or event.kind in ("content", "reasoning"):
                        yield from self._told()
                yield from self._told()
                self._content.cut()
                self._reading = None
            except Malformed as error:
                self.num_malformed += 1
                self._reading = None
                self._waiting = []
                if self._sent:  # a call that was cut short, under a grammar: its name is out
                    self._source.at = len(self._source.text)
                else:
                    self._source.at = self._mark if error.end is None else error.end
                    yield from self._say(self._source.text[: self._source.at])
            self._source.text = self._source.text[self._source.at :]
            self._source.at = 0

    def _next_call(self, ended: bool) -> Generator[Part, None, bool]:
        """Give out the content before the next call, and begin to read that; return whether there is one."""
        assert self._plan.format is not None
        source = self._source
        opening = self._plan.format.opening
        if self._at_start and opening:
            text = source.text.lstrip()
            if not text and not ended:
                return False
            self._at_start = False
            if text[:1] and text[0] in opening:
                source.at = len(source.text) - len(text)
                self._begin(source.at)
                return True
        at, behind = _split(source.text, self._starts, self._longest_start)
        at = len(source.text) if ended and behind < 0 else at
        yield from self._say(source.text[:at])
        source.text = source.text[at:]
        if behind < 0:
            return False
        self._begin(behind - at)
        return True

    def _begin(self, mark: int) -> None:
        assert self._plan.format is not None
        self._mark = mark
        self._sent = False
        self._at_start = False
        self._reading = self._plan.format.read(self._source)

    def _told(self) -> Iterator[Part]:
        """Give out what is known of the calls at hand."""
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
            if self._number == self.num_calls:
                yield Part(event.kind, event.text, self._number - 1)
