"""Ctrl-C while large packages load."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


@contextmanager
def interrupts_end_at_once(clean_up: Callable[[], None] | None = None) -> Iterator[None]:
    """End the process on SIGINT, without unwinding.

    For imports: code deep inside them swallows KeyboardInterrupt, or answers it with a traceback, and there is
    nothing to clean up yet. And for work in another thread, which does not unwind: `clean_up` is called first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        if clean_up is not None:
            clean_up()
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
