"""Tests of what a thread waits with at a client's door."""

from __future__ import annotations

import math
import threading
import time

import pytest

from reelwire.client_door import Alarm

LIMIT_S = 20.0


def test_an_alarm_that_has_rung_before_is_heard() -> None:
    """What rings before somebody waits isn't lost, and rings once however often it was rung."""
    alarm = Alarm()
    alarm.ring()
    alarm.ring()
    alarm.wait(math.inf)
    with pytest.raises(TimeoutError):
        alarm.wait(time.monotonic())


def test_an_alarm_wakes_a_thread_that_waits() -> None:
    """A thread that waits without a limit goes on when it rings."""
    alarm = Alarm()
    waiting = threading.Thread(target=alarm.wait, args=(math.inf,), daemon=True)
    waiting.start()
    alarm.ring()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()


def test_an_alarm_is_silent_until_the_time_is_over() -> None:
    """A wait returns at about its time without a ring, and is refused when that is over."""
    alarm, until = Alarm(), time.monotonic() + 0.01
    alarm.wait(until)
    with pytest.raises(TimeoutError, match="no answer"):
        alarm.wait(time.monotonic())
