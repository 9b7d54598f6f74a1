"""Whose a job is: the name that its client has, whoever else has that name, and however often it connects."""

from __future__ import annotations

from reelwire import messages as m

from .fake_jobs import Client, Shop


def test_groups_14_limits_and_turns_are_a_names_not_a_connections() -> None:
    """Who connects anew finds what it left in the queue, and may ask for no more than that; two may have one name at once."""
    shop = Shop(jobs_queued_per_client_max=2)
    shop.worker()
    shop.client("somebody").accepted("begun")
    first = shop.client("ann@host")
    for key in "ab":
        first.accepted(key)
    second = Client(shop, b"another", "ann@host").hello()
    assert "2 jobs of this client" in second.refused("c").message
    shop.drop(first)
    assert second.refused("c").kind == "overload"
    ben = shop.client("ben@host")
    later = ben.accepted("d")
    assert ben.info(later).position == 1
    assert [info.client for info in ben.ask(m.AskJobs).jobs[:3]] == ["ben@host", "ann@host", "ann@host"]


def test_groups_14_a_name_that_the_broker_makes_is_nobodys_after_its_restart() -> None:
    """Strangers without a name have none of the jobs that others left under an earlier broker."""
    shop = Shop(jobs_queued_per_client_max=1)
    owners = []
    for key in "ab":
        shop.worker()
        stranger = Client(shop, b"stranger", "").hello()
        owners.append(stranger.info(stranger.accepted(key)).client)
        shop = shop.restart()
    assert owners == ["client-1.2", "client-2.2"]
