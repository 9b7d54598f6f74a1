"""The journal: what was written is read again, as it was, or an error says which row isn't."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from reelwire.broker.actions import Persist
from reelwire.broker.job_record import JobRecord, StoredFile
from reelwire.broker.journal import FORMAT, Journal, JournalGone, NotNow
from reelwire.errors import ConfigError
from reelwire.messages import Failure

FULL = JobRecord(
    job="j1",
    number=3,
    key="kéy",
    client="app",
    kind="v2v",
    suffix=".png",
    parameters={"prompt": "a dog", "steps": 40, "scale": 1.5, "list": [1, {"a": None}], "raw": b"\0", "on": True},
    media={"video": (StoredFile("a" * 64, 5),), "images": (StoredFile("b" * 64, 6), StoredFile("c" * 64, 0))},
    priority=-100,
    output="/srv/out.mp4",
    standing="failed",
    attempt=2,
    losses=1,
    checkpoint=StoredFile("d" * 64, 7),
    checkpoint_step=20,
    result=StoredFile("e" * 64, 8),
    facts={"frames": 81},
    failure=Failure("stage", "out of memory", stage="denoise", index=4, retry_after_s=2.0),
    submitted_at=1_700_000_000.25,
    ended_at=1_700_000_100.0,
    fetched_at=1_700_000_200.0,
    asked="digest",
    is_cancelled=True,
)


def record(number: int, **more: Any) -> JobRecord:
    return JobRecord(f"job-{number}", number, f"key-{number}", "app", "v2v", **more)


def put(*records: JobRecord) -> list[Persist]:
    return [Persist(ticket, each, each.job) for ticket, each in enumerate(records, 1)]


def opened(path: Path) -> tuple[JobRecord, ...]:
    """What a broker that starts there would know."""
    with contextlib.closing(Journal(path)) as journal:
        return journal.load()


def refused(path: Path) -> str:
    """Why a journal isn't opened, or not read."""
    with pytest.raises(ConfigError) as caught:
        opened(path)
    assert caught.value.field == "state_dir"
    assert str(path) in caught.value.reason
    return caught.value.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite3"


def test_groups_07_a_record_is_read_as_it_was_written(path: Path) -> None:
    """Every field of it, whatever is in it, in order of arrival, by the next broker."""
    journal = Journal(path)
    journal.write(put(record(7), FULL, record(1)))
    journal.close()
    journal.close()
    journal = Journal(path)
    assert journal.load() == (record(1), FULL, record(7))
    journal.close()


def test_groups_07_the_newest_record_of_a_job_holds(path: Path) -> None:
    """Jobs change and are forgotten, and a key may come again once it is; the order of a batch is kept."""
    journal = Journal(path)
    journal.write(put(record(1), record(2), replace(record(1), standing="running")))
    again = replace(record(1), job="other", number=3)
    journal.write([Persist(4, None, "job-1"), Persist(5, again, "other"), Persist(6, None, "never was")])
    assert journal.load() == (record(2), again)
    journal.close()


def test_a_batch_is_written_whole_or_not_at_all(path: Path) -> None:
    """One record that can't be written takes the others of its batch with it, and the journal can still be used."""
    journal = Journal(path)
    with pytest.raises(sqlite3.IntegrityError):
        journal.write(put(record(1), replace(record(2), key="key-1")))
    assert journal.load() == ()
    with pytest.raises(UnicodeEncodeError):
        journal.write(put(record(1), replace(record(2), client="\udc80")))
    journal.write(put(record(3)))
    assert journal.load() == (record(3),)
    journal.close()


def test_groups_07_a_real_disk_that_is_full_is_met_when_a_batch_is_committed(tmp_path: Path) -> None:
    """Nothing of the batch is there then; once there is room the same batch is written, and so is the next one."""
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=1m none {small} 2>/dev/null"):
        pytest.skip("no file system can be mounted here")
    try:
        path = small / "journal.sqlite3"
        journal = Journal(path)
        journal.write(put(record(1)))
        with contextlib.suppress(OSError):
            (small / "other").write_bytes(bytes(2 << 20))
        batch = put(*(record(number, parameters={"prompt": "x" * 1000}) for number in range(2, 50)))
        for _ in range(3):
            with pytest.raises(NotNow, match="full"):
                journal.write(batch)
            assert journal.load() == (record(1),)
        shutil.copytree(small, tmp_path / "crashed", ignore=shutil.ignore_patterns("other"))
        assert opened(tmp_path / "crashed" / "journal.sqlite3") == (record(1),)
        (small / "other").unlink()
        journal.write(batch)
        journal.write(put(record(50)))
        journal.close()
        assert [each.number for each in opened(path)] == list(range(1, 51))
    finally:
        os.system(f"umount {small}")


def away(path: Path) -> None:
    """The whole folder goes."""
    shutil.rmtree(path.parent)


def moved(path: Path) -> None:
    """The folder has another name."""
    path.parent.rename(path.parent.with_name("moved"))


def replaced(path: Path) -> None:
    """A backup is put in the journal's place."""
    shutil.copy(path, path.with_name("backup"))
    path.with_name("backup").rename(path)


def without_log(path: Path) -> None:
    """What is to be in the journal soon is removed."""
    path.with_name(f"{path.name}-wal").unlink()


@pytest.mark.parametrize("gone", [away, moved, replaced, without_log])
@pytest.mark.parametrize("is_new", [True, False])
def test_groups_07_what_is_written_into_a_journal_that_is_gone_is_not_durable(
    tmp_path: Path, gone: Any, is_new: bool
) -> None:
    """SQLite goes on to write into files without a name: that is noticed at the next batch, and at all that follow."""
    path = tmp_path / "state" / "journal.sqlite3"
    path.parent.mkdir()
    if not is_new:
        Journal(path).close()
    journal = Journal(path)
    journal.write(put(record(1)))
    gone(path)
    for number in (2, 3):
        with pytest.raises(JournalGone, match=r"journal\.sqlite3.*while the broker runs"):
            journal.write(put(record(number)))
    journal.close()


def test_groups_07_a_journal_that_others_read_and_tidy_is_still_there(path: Path) -> None:
    """Nothing that SQLite's own tools do to it while the broker runs is taken for a removal."""
    journal = Journal(path)
    journal.write(put(record(1)))
    for order in ("SELECT * FROM jobs", "PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM"):
        other = sqlite3.connect(path, isolation_level=None)
        other.execute(order).fetchall()
        other.close()
        journal.write(put(record(2)))
    journal.close()
    assert opened(path) == (record(1), record(2))


def test_incarnations_are_counted(path: Path) -> None:
    """Each broker has a higher number than all before it."""
    for expected in (1, 2, 3):
        journal = Journal(path)
        assert journal.begin() == expected
        journal.close()


def test_what_is_written_survives_a_crash(path: Path) -> None:
    """The log is written ahead and synchronized with every transaction; the file is the user's alone."""
    journal = Journal(path)
    asked = {
        name: journal._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
    }
    assert asked == {"journal_mode": "wal", "synchronous": 2}
    journal.write(put(record(1)))
    for name in ("journal.sqlite3", "journal.sqlite3-wal"):
        assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600
    journal.close()


def test_the_table_can_be_read_by_hand(path: Path) -> None:
    """While a broker runs anybody of its user can ask with SQLite's own tool."""
    journal = Journal(path)
    journal.write(put(FULL))
    other = sqlite3.connect(path)
    row = other.execute("SELECT id, number, key, kind, client, standing, submitted_at FROM jobs").fetchone()
    assert row == ("j1", 3, "kéy", "v2v", "app", "failed", 1_700_000_000.25)
    assert other.execute("SELECT incarnation FROM broker").fetchone() == (0,)
    assert other.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    other.close()
    journal.close()


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("record", b"\xc1", "row 2 of jobs, job 'job-2'"),
        ("record", b"", "row 2 of jobs, job 'job-2'"),
        ("record", "text", "row 2 of jobs, job 'job-2'"),
        ("record", msgpack.packb(["job-2"]), "a list of the 23 fields of JobRecord"),
        ("record", msgpack.packb(msgpack.ExtType(1, b"")), "msgpack extension 1"),
        ("key", "another", "the record is of job 'job-2' with the key 'key-2'"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_error(path: Path, column: str, value: object, reason: str) -> None:
    """Nothing is lost silently: it names the file and the row, and the rest of the journal stays as it is."""
    journal = Journal(path)
    journal.write(put(record(1), record(2), record(3)))
    journal.close()
    other = sqlite3.connect(path)
    with other:
        other.execute(f"UPDATE jobs SET {column} = ? WHERE id = 'job-2'", (value,))
    assert reason in (said := refused(path))
    assert "row 2 of jobs" in said
    assert other.execute("SELECT count(*) FROM jobs").fetchone() == (3,)
    other.close()


def test_a_record_of_a_wrong_type_names_the_field(path: Path) -> None:
    """The types are closed: what isn't one of them isn't made."""
    journal = Journal(path)
    journal.write(put(replace(record(1), standing="asleep")))  # type: ignore[arg-type]
    journal.close()
    assert "JobRecord.standing is not one of queued, running" in refused(path)


FIRST_FORMAT = """
CREATE TABLE broker (one INTEGER PRIMARY KEY CHECK (one = 1), incarnation INTEGER NOT NULL);
CREATE TABLE jobs (id TEXT PRIMARY KEY NOT NULL, number INTEGER NOT NULL, key TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    client TEXT NOT NULL, standing TEXT NOT NULL, submitted_at REAL NOT NULL, record BLOB NOT NULL);
INSERT INTO broker VALUES (1, 7);
PRAGMA user_version = 1;
PRAGMA journal_mode = WAL;
"""


def first_format(path: Path, *, broken: bool = False) -> sqlite3.Connection:
    """A journal as the first format had it, with two jobs: one runs, one has failed."""
    other = sqlite3.connect(path)
    other.executescript(FIRST_FORMAT)
    failure = ["stage", "out of memory", "denoise", 4, "", 2.0]
    rows: tuple[list[Any], ...] = (
        ["a", 1, "ka", "app", "v2v", ".mp4", {"steps": 4}, {"video": [["1" * 64, 5]]}, 0, "", "running", 2, 1, ["2" * 64, 6],
         20, None, {}, None, 1.5, None, None, "digest"],
        ["b", 2, "kb", "app", "t2v", ".mp4", {}, {}, 7, "/o.mp4", "failed", 1, 0, None, -1, None, {}, failure, 2.5, 3.5, None, ""],
    )  # fmt: skip
    with other:
        for row in rows:
            data = msgpack.packb(row[:-1] if broken and row[0] == "b" else row)
            other.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row[:3], row[4], row[3], row[10], row[18], data)
            )
    return other


def test_groups_07_jobs_of_the_first_format_are_carried_over(path: Path) -> None:
    """Each field stands as it stood, no job is cancelled, and from then on the journal is one of this format."""
    first_format(path).close()
    running = JobRecord(
        "a", 1, "ka", "app", "v2v", parameters={"steps": 4}, media={"video": (StoredFile("1" * 64, 5),)}, standing="running",
        attempt=2, losses=1, checkpoint=StoredFile("2" * 64, 6), checkpoint_step=20, submitted_at=1.5, asked="digest",
    )  # fmt: skip
    failed = JobRecord(
        "b", 2, "kb", "app", "t2v", priority=7, output="/o.mp4", standing="failed", attempt=1, submitted_at=2.5, ended_at=3.5,
        failure=Failure("stage", "out of memory", stage="denoise", index=4, retry_after_s=2.0),
    )  # fmt: skip
    for _ in range(2):
        assert opened(path) == (running, failed)
    journal = Journal(path)
    assert journal.begin() == 8
    journal.write(put(replace(running, is_cancelled=True)))
    journal.close()
    assert opened(path) == (replace(running, is_cancelled=True), failed)
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA user_version").fetchone() == (FORMAT,)
    other.close()


def test_groups_07_a_row_of_the_first_format_that_cannot_be_read_stops_the_carrying_over(path: Path) -> None:
    """The error names it, and every row is what it was."""
    other = first_format(path, broken=True)
    before = other.execute("SELECT * FROM jobs").fetchall()
    assert "row 2 of jobs, job 'b': record is not a list of the 23 fields" in refused(path)
    assert other.execute("PRAGMA user_version").fetchone() == (1,)
    assert other.execute("SELECT * FROM jobs").fetchall() == before
    other.close()


def test_a_journal_of_a_newer_version_is_refused(path: Path) -> None:
    """Whoever wrote it knows fields that would be lost here."""
    Journal(path).close()
    other = sqlite3.connect(path)
    other.execute(f"PRAGMA user_version = {FORMAT + 1}")
    other.close()
    assert f"was written by a newer reelwire (format {FORMAT + 1}; this one reads up to {FORMAT})" in refused(path)


def test_another_database_is_refused(path: Path) -> None:
    """Neither is it changed."""
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (x)")
    other.close()
    before = path.read_bytes()
    assert "is a database of something else" in refused(path)
    assert path.read_bytes() == before


def test_a_damaged_journal_is_refused(path: Path) -> None:
    """No database at all, and one of which a page was overwritten."""
    path.write_bytes(b"no database " * 1000)
    assert "can't be used (file is not a database)" in refused(path)
    path.unlink()
    journal = Journal(path)
    journal.write(put(*(record(number, parameters={"prompt": "x" * 500}) for number in range(100))))
    journal.close()
    data = bytearray(path.read_bytes())
    data[3 * 4096 : 5 * 4096] = b"\xff" * 8192
    path.write_bytes(data)
    assert "is damaged" in (reason := refused(path)) or "can't be used" in reason


def test_a_journal_in_no_folder_is_refused(tmp_path: Path) -> None:
    """As one that may not be opened."""
    assert "can't be used (No such file or directory)" in refused(tmp_path / "none" / "journal.sqlite3")


def test_fields_of_a_record_belong_to_its_format() -> None:
    """Records are lists: whoever changes the fields of one raises `FORMAT`, says how rows are carried over, and this list."""
    names = [
        "job", "number", "key", "client", "kind", "suffix", "parameters", "media", "priority", "output", "standing",
        "attempt", "losses", "checkpoint", "checkpoint_step", "result", "facts", "failure", "submitted_at", "ended_at",
        "fetched_at", "asked", "is_cancelled",
    ]  # fmt: skip
    assert [field.name for field in fields(JobRecord)] == names
    assert [field.name for field in fields(StoredFile)] == ["file", "nbytes"]
    assert [field.name for field in fields(Failure)] == ["kind", "message", "stage", "index", "field", "retry_after_s"]
    assert FORMAT == 2
