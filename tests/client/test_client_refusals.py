"""What the SDK refuses before anything is sent: times, names and values that can't be any."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from reelwire import Client, Control, OverloadError, RequestError, UsageError
from reelwire import messages as m
from reelwire.client import own_name

StandIn = Any  # of conftest.py
LIMIT_S = 10.0
NO_TIMES = (float("nan"), -1, -1e-9, float("-inf"), "1", True, [1])


@pytest.fixture
def client(stand_in: StandIn) -> Iterator[Client]:
    with Client(stand_in.endpoint, name="tester") as client:
        yield client


@pytest.mark.parametrize("timeout", NO_TIMES)
def test_a_timeout_that_is_none_is_refused_wherever_one_waits(client: Client, timeout: Any) -> None:
    """A negative one, NaN or no number: each call says so at once, nothing is sent, and the session goes on."""
    session = client.open_session("toy", chunks=2)
    calls: list[Callable[[], object]] = [
        lambda: client.open_session("toy", chunks=1, timeout=timeout),
        lambda: client.status(timeout),
        lambda: session.next_chunk(timeout),
        lambda: session.submit(0, Control(keys=()), timeout),
        lambda: session.metrics(timeout),
        lambda: session.close(timeout=timeout),
        lambda: session.cancel(timeout),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"timeout: .*accepted: seconds, 0 or more") as caught:
            call()
        assert isinstance(caught.value, RequestError)
    session.submit(0, Control(keys=()), LIMIT_S)
    assert session.next_chunk(LIMIT_S) is not None


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**400, None])
def test_a_timeout_may_be_as_long_as_one_likes(client: Client, timeout: Any) -> None:
    """Without an end, or one that nobody will see."""
    assert client.status(timeout) == {"workers": 0}


@pytest.mark.parametrize("value", [*NO_TIMES, 0, None, float("inf"), 10**400])
def test_a_time_to_connect_is_bounded(value: Any) -> None:
    """It is what every call waits for a lost broker, so it has an end."""
    with pytest.raises(RequestError, match=r"connect_timeout_s: .*accepted: seconds"):
        Client("tcp://127.0.0.1:1", connect_timeout_s=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "1", 2**63 - 1, 10**400])
@pytest.mark.parametrize("field", ["frame_bytes_max", "output_credit_chunks", "output_credit_bytes"])
def test_what_a_client_takes_is_bounded(field: str, value: Any) -> None:
    """Numbers of bytes and chunks that a machine can have."""
    with pytest.raises(RequestError, match=rf"{field}: .*accepted: a whole number"):
        Client("tcp://127.0.0.1:1", **{field: value})


@pytest.mark.parametrize(
    ("field", "pipeline", "given"),
    [
        ("pipeline", ["toy"], {}),
        ("pipeline", None, {}),
        ("pipeline", {}, {}),
        ("image", "toy", {"image": [[1, 2], [3]]}),
        ("image", "toy", {"image": 7}),
        ("image", "toy", {"image": "a\0b.png"}),
        ("tensors", "toy", {"tensors": 5}),
        ("tensors", "toy", {"tensors": [("depth", 1)]}),
        ("control_binding", "toy", {"control_binding": "sometimes"}),
        ("control_binding", "toy", {"control_binding": None}),
        ("control_binding", "toy", {"control_binding": np.ones(2)}),
        ("pace", "toy", {"pace": "slow"}),
        ("pace", "toy", {"pace": 16.0}),
    ],
)
def test_values_of_another_type_are_refused_by_name(client: Client, field: str, pipeline: Any, given: Any) -> None:
    """Not with a TypeError of whatever looked at them first."""
    with pytest.raises(RequestError, match=re.escape(field)) as caught:
        client.open_session(pipeline, chunks=1, **given)
    assert caught.value.field == field
    assert "accepted" in caught.value.reason


def test_without_any_worker_the_name_of_a_pipeline_is_not_called_wrong(stand_in: StandIn, client: Client) -> None:
    """While the workers are away a session is refused as one that may be opened later."""
    assert set(client.pipelines) == {"toy"}
    stand_in.say(m.Welcome("me-1", stand_in.version, stand_in.heartbeat_s, 3, stand_in.limits, ()))
    client.status()  # answered after the welcome was
    with pytest.raises(OverloadError, match="no worker serves 'toy' now") as caught:
        client.open_session("toy", chunks=1)
    assert caught.value.retry_after_s > 0
    assert np.isfinite(caught.value.retry_after_s)


def test_groups_14_a_client_without_a_name_is_called_as_its_user_is(stand_in: StandIn) -> None:
    """So whoever connects anew has the turns and limits that it had; a name that is given is said as it is."""
    for given, said in (("", f"{getpass.getuser()}@{socket.gethostname()}"), ("app 7", "app 7")):
        with Client(stand_in.endpoint, name=given):
            assert stand_in.next(m.ClientHello).name == said


@pytest.mark.parametrize(
    "name", ["x" * 300, "a\nb", "\x1b[31m", " ", 5], ids=["long", "lines", "escape", "blank", "number"]
)
def test_a_name_that_no_broker_takes_is_refused_before_anybody_is_asked(name: Any) -> None:
    """By the argument's name; nothing listens here."""
    with pytest.raises(RequestError, match=r"^name: .*accepted: "):
        Client("tcp://127.0.0.1:1", name=name)


@pytest.mark.parametrize("fault", [KeyError, OSError, ImportError])
def test_groups_14_a_user_without_a_name_has_one_too(monkeypatch: pytest.MonkeyPatch, fault: type[Exception]) -> None:
    """As in a container whose user stands in no file, or on a system without users."""

    def unknown() -> str:
        raise fault

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert own_name() == f"user@{socket.gethostname()}"


def test_groups_14_whatever_user_and_host_are_called_the_broker_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 characters at most, all of which can be shown and sent."""
    monkeypatch.setattr(getpass, "getuser", lambda: "\udce4\n\x1b[2J" * 500)
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 500)
    name = own_name()
    assert name.isprintable()
    assert len(name) <= 256
    assert name.encode().decode() == name
