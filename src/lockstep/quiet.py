"""Silence while transformers and torch work. Needs transformers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, load reports, logs or warnings of transformers, torch and its exporter; errors still raise."""
    previous, bars = logging.root.manager.disable, transformers.utils.logging.is_progress_bar_enabled()
    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
        if bars:
            transformers.utils.logging.enable_progress_bar()
