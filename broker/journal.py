"""The jobs of a broker in an SQLite database: what was written is there after a crash of the process or the machine.

One row per job. Its columns are for people, who may read the file with any tool while the broker runs; what the broker
reads is the whole record beside them, msgpack through `reelwire.codec`, whose types are closed. A record is the list of
`JobRecord`'s fields in their order, so whoever changes those also raises `FORMAT` and says how rows are carried over.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import msgpack

from reelwire import codec
from reelwire.checks import shown
from reelwire.errors import ConfigError, WireError
from reelwire.spec import Plain

from .actions import Persist
from .job_record import JobRecord

FORMAT = 2
"""Version of the tables and of the records in them; 2: `JobRecord.is_cancelled` came."""
_PRIMARY = 0xFF
"""Bits of an error's extended code that are its primary code (SQLite, "Result and Error Codes")."""
BUSY_S = 10.0
"""How long a write waits for somebody who has locked the database by hand."""

_TABLES = """
CREATE TABLE broker (one INTEGER PRIMARY KEY CHECK (one = 1), incarnation INTEGER NOT NULL);
CREATE TABLE jobs (
    id TEXT PRIMARY KEY NOT NULL,
    number INTEGER NOT NULL,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    client TEXT NOT NULL,
    standing TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    record BLOB NOT NULL
);
INSERT INTO broker VALUES (1, 0);
"""
_PUT = """
INSERT INTO jobs (id, number, key, kind, client, standing, submitted_at, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET number = excluded.number, key = excluded.key, kind = excluded.kind,
    client = excluded.client, standing = excluded.standing, submitted_at = excluded.submitted_at, record = excluded.record
"""


_MAY_PASS = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL}


class NotNow(Exception):
    """A batch can't be written for the moment: the disk is full, or somebody has locked the database."""


class JournalGone(Exception):
    """The journal that is written isn't the one that lies there: somebody has removed it, moved it or put another there."""


class Journal:
    """A journal that is open; one thread at a time may use it.

    Args:
        path: of the database, which is made when it isn't there.
        beside: folders without which what is written is of no use, such as that of the files that records name.

    Attributes:
        path: the same.

    Raises:
        ConfigError: of the field ``state_dir``: it can't be opened, is damaged, or isn't a journal of this version.
    """

    def __init__(self, path: Path, beside: Iterable[Path] = ()) -> None:
        """Open or make it, and check it."""
        self.path = path
        with _explained(path):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with _explained(path):
                self._prepare()
                self._written = {each: _identity(each) for each in (path, path.with_name(f"{path.name}-wal"), *beside)}
        except ConfigError:
            self._connection.close()
            raise

    def begin(self) -> int:
        """Count one more broker; its number is durable when this returns.

        Raises:
            ConfigError: it can't be written.
        """
        with _explained(self.path), self._transaction():
            self._connection.execute("UPDATE broker SET incarnation = incarnation + 1")
            return self._number("SELECT incarnation FROM broker")

    def load(self) -> tuple[JobRecord, ...]:
        """All records, in order of arrival.

        Raises:
            ConfigError: a row can't be read; the sentence names the file and the row.
        """
        with _explained(self.path):
            rows = self._connection.execute("SELECT rowid, id, key, record FROM jobs ORDER BY number").fetchall()
        records = []
        for row, job, key, data in rows:
            with self._reading(row, job):
                records.append(_record(data, job, key))
        return tuple(records)

    def write(self, batch: Iterable[Persist]) -> None:
        """Write all of it, in order, in one transaction: durable when this returns, not there at all when it raises.

        A full disk is met before anything is synchronized, when pages are written to the log, and so is a lock: writing the
        same batch once more writes the same pages again. An error of the synchronization is another matter: the system may
        have forgotten by then which pages it still had to write.

        Raises:
            NotNow: it can't be written for the moment; nothing else may be written before the same batch is.
            JournalGone: it was written where nobody will find it; nothing may be said to be durable any more.
            sqlite3.Error: it can't be written; nothing may be said to be durable any more.
        """
        try:
            with self._transaction() as connection:
                for action in batch:
                    if action.record is None:
                        connection.execute("DELETE FROM jobs WHERE id = ?", (action.job,))
                    else:
                        connection.execute(_PUT, _row(action.record))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY in _MAY_PASS:
                raise NotNow(str(error)) from error
            raise
        self._check_there()

    def close(self) -> None:
        """Close it; closing again does nothing."""
        self._connection.close()

    def _check_there(self) -> None:
        """Find out whether what is written has its names yet: a file without any takes all writes, and goes with us."""
        for path, written in self._written.items():
            try:
                found = _identity(path)
            except OSError as error:
                raise JournalGone(f"{str(path)!r} is gone while the broker runs ({error.strerror})") from error
            if found != written:
                raise JournalGone(f"{str(path)!r} was replaced while the broker runs")

    def _prepare(self) -> None:
        connection = self._connection
        version = self._number("PRAGMA user_version")
        if version > FORMAT:
            _refuse(self.path, f"was written by a newer reelwire (format {version}; this one reads up to {FORMAT})")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables != ({"broker", "jobs"} if version else set()):
            _refuse(self.path, "is a database of something else; accepted: a broker's journal")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            _refuse(
                self.path, f"lies where SQLite can't keep a write-ahead log ({mode}); accepted: a local file system"
            )
        for pragma in ("synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON", "trusted_schema = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        if not version:
            with self._transaction():
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
        elif (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            _refuse(self.path, f"is damaged ({found})")
        elif version == 1:
            self._carry_over()

    def _carry_over(self) -> None:
        """Make rows of format 1 what they would be in this one: nobody could say for good then that a job is cancelled."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT rowid, id, key, record FROM jobs").fetchall()
            for row, job, key, data in rows:
                with self._reading(row, job):
                    record = _record(data, job, key, False)
                connection.execute(_PUT, _row(record))
            connection.execute(f"PRAGMA user_version = {FORMAT}")

    @contextlib.contextmanager
    def _reading(self, row: int, job: str) -> Iterator[None]:
        """Say of a record that can't be read whose it is."""
        try:
            yield
        except (WireError, ValueError, TypeError, msgpack.UnpackException) as error:
            wrong = str(error) or type(error).__name__
            _refuse(self.path, f"has a row that can't be read, row {row} of jobs, job {shown(job)}: {wrong}", error)

    def _number(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


_encode, _decode = codec.encoder(JobRecord), codec.decoder(JobRecord)


def _record(data: bytes, job: str, key: str, *newer: Plain) -> JobRecord:
    """What a row says; `newer`: the fields that there weren't yet when it was written."""
    tree = msgpack.unpackb(data, strict_map_key=True, raw=False, ext_hook=_refuse_extension)
    if newer and isinstance(tree, list):
        tree = [*tree, *newer]
    record = cast("JobRecord", _decode(tree, codec.Frames(()), "record"))
    if (record.job, record.key) != (job, key):
        raise WireError(f"the record is of job {shown(record.job)} with the key {shown(record.key)}")
    return record


def _row(record: JobRecord) -> tuple[Any, ...]:
    data = msgpack.packb(_encode(record, []))
    return (
        record.job,
        record.number,
        record.key,
        record.kind,
        record.client,
        record.standing,
        record.submitted_at,
        data,
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of an error of the database what it is about."""
    try:
        yield
    except sqlite3.Error as error:
        _refuse(path, f"can't be used ({error})", error)
    except OSError as error:
        _refuse(path, f"can't be used ({error.strerror})", error)


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ValueError(f"msgpack extension {code}")


def _refuse(path: Path, reason: str, error: Exception | None = None) -> NoReturn:
    raise ConfigError("state_dir", f"the journal {str(path)!r} {reason}") from error
