"""Uploads and the requests that they are for: one request takes nothing from another one."""

from __future__ import annotations

import pytest

from reelwire import messages as m

from .fake_jobs import Shop


def test_groups_09_a_request_keeps_its_upload_of_what_another_one_has_too() -> None:
    """Two requests with one picture: each has uploaded it, and when a job has come of one, the other's stays."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    first, second = (client.upload(b"image x", name, "images") for name in ("1.0", "2.0"))
    client.accepted("a", "r2v", media={"images": (first, first)})
    worker.fail(worker.runs[-1])
    other = client.upload(b"image y", "2.1", "images")
    client.accepted("b", "r2v", media={"images": (second, other)})
    worker.fail(worker.runs[-1])
    assert not shop.disk.files


@pytest.mark.parametrize("works", [False, True])
def test_groups_09_each_submission_of_a_request_takes_its_uploads_with_it(works: bool) -> None:
    """Also when it says again what is checked, or accepted: nothing is kept of either when the job is over."""
    shop = Shop()
    worker, client = shop.worker(), shop.client()
    image, _ = (client.upload(b"image x", name, "images") for name in ("1.0", "2.0"))
    shop.works = works
    for _ in range(2):
        client.submit("a", "r2v", media={"images": (image,)})
    shop.works = True
    shop.settle()
    assert client.heard(m.JobAccepted)
    worker.fail(worker.runs[-1])
    assert not shop.disk.files


def test_groups_09_no_file_of_a_request_that_is_uploaded_gives_way_to_its_others() -> None:
    """A request that is larger than what one client may upload is refused, by the limit's name and with what is kept of it."""
    shop = Shop(upload_bytes_per_client_max=20)
    shop.worker()
    client = shop.client()
    for index in range(3):
        client.upload(b"image %d" % index, f"1.{index}", "images")
    (refused,) = client.heard(m.UploadRefused)
    assert (refused.upload, refused.failure.kind) == ("1.2", "overload")
    assert "14 bytes already, of 20 (upload_bytes_per_client_max)" in refused.failure.message
    assert len(client.heard(m.UploadStored)) == 2
    client.say(m.BeginUpload("u", "video", 21, "0" * 64))
    assert client.heard(m.UploadRefused)[-1].failure.message == "has 21 bytes; accepted: 0 to 20"
