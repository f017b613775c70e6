"""A model of a server: what its requests need besides the engine, which all models of the server share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep_serve.adapters import Adapters
from lockstep_serve.chat import Chat
from lockstep_serve.frames import Ready
from lockstep_serve.metrics import ModelMetrics
from lockstep_serve.reasoning import reasoning_format
from lockstep_serve.settings import ServedModelOptions
from lockstep_serve.tool_formats import tool_format

if TYPE_CHECKING:
    from lockstep_serve.service import Service


class ServedModel:
    """A model by its name in requests.

    Attributes:
        checkpoint: Its weights' name in the engine: "" of a server's first model.
    """

    def __init__(
        self,
        service: Service,
        options: ServedModelOptions,
        checkpoint: str,
        chat: Chat,
        adapters: Adapters,
        metrics: ModelMetrics,
    ):
        """Raises InputError for an unknown name of a format."""
        self.name = options.name
        self.checkpoint = checkpoint
        self.tokenizer = options.tokenizer
        self.chat = chat
        self.adapters = adapters
        self.metrics = metrics
        template = options.chat_template.template if options.chat_template is not None else ""
        self.tool_format = tool_format(options.tool_call_parser, template)
        self.reasoning_format = reasoning_format(options.reasoning_parser, template)
        self._limits = options.limits
        self._service = service
        self._frame: Ready | None = None  # of the engine that `_ready` is of
        self._ready: Ready

    @property
    def ready(self) -> Ready:
        """Return the engine's limits, with this model's own lengths, identity and end ids. The service has started."""
        # A restarted engine has another frame. Cached, because each request asks several times.
        frame = self._service.ready
        if frame is not self._frame:
            self._frame = frame
            self._ready = frame.of(self.checkpoint)
            if self._limits is not None:
                self._ready = replace(
                    self._ready,
                    max_seq_len=min(frame.max_seq_len, self._limits.max_seq_len),
                    max_input_len=min(frame.max_input_len, self._limits.max_input_len),
                )
        return self._ready

    @property
    def weights_version(self) -> int | None:
        """Return how often the weights were updated; None for a model whose weights stay."""
        return self._service.weights.version if not self.checkpoint else None
