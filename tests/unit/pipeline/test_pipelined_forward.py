"""Tracing a model is not interrupted halfway."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from torch import nn

from embershard.pipeline import pipelined_forward
from embershard.pipeline.pipelined_forward import OpenStep, pipelined_forwards


def test_an_interrupt_waits_until_the_model_is_traced(monkeypatch):
    """torch.fx may be putting `nn.Module.__call__` back just then."""
    own, done = nn.Module.__call__, []

    def trace(*_, **__):
        nn.Module.__call__ = lambda *_: None
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the interpreter looks for signals meanwhile
            pass
        nn.Module.__call__ = own
        done.append(True)
        return [], None, None, None, []

    monkeypatch.setattr(pipelined_forward, "_rewrite_model", trace)
    handler, before = signal.default_int_handler, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler)  # a shell starts processes in the background with interrupts ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            pipelined_forwards(nn.Linear(1, 1), None, OpenStep())
        assert nn.Module.__call__ is own
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        nn.Module.__call__ = own
        signal.signal(signal.SIGINT, before)
    assert done == [True]


def test_a_thread_traces_as_it_is(monkeypatch):
    """Python takes signals in the main thread, and lets no other one set handlers."""
    monkeypatch.setattr(pipelined_forward, "_rewrite_model", lambda *_, **__: ([], None, None, None, []))
    found = []
    thread = threading.Thread(target=lambda: found.append(pipelined_forwards(nn.Linear(1, 1), None, OpenStep())))
    thread.start()
    thread.join()
    assert found == [[]]
