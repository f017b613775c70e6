"""Silence transformers and torch on the terminal and on the network. Needs transformers."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import transformers
from huggingface_hub import constants


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch off progress bars, load reports, logs and warnings of transformers and torch; errors still raise.

    The Hugging Face hub counts as offline meanwhile: transformers asks it for files by default, even if all are local.
    """
    previous = logging.root.manager.disable
    bars = transformers.utils.logging.is_progress_bar_enabled()
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.disable(previous)
        if bars:
            transformers.utils.logging.enable_progress_bar()
