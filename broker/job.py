"""One job as a state machine: `Job.handle(event)` looks its handler up in `job_states.TRANSITIONS`.

What is known of a job is its record. It is written whenever something changes that must outlive the broker, and what
follows from that for others, an acknowledgement or the removal of a file, waits until it is durable. Work doesn't wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from reelwire import messages as m
from reelwire.job_parts import FILE_NAME
from reelwire.messages import Failure

from . import job_states as t
from .actions import ExportFile
from .desk import described, short, shortened
from .fitting import fitted
from .job_base import Arriving, JobBase, Request
from .job_desk import JobDesk
from .job_news import OUTPUT_ERROR, info_of
from .job_pace import STEPS_MAX, StepPace, is_sensible
from .job_quota import Quota
from .job_record import JobRecord, StoredFile
from .job_states import ENDED, PHASES, TRANSITIONS, WAITING, State


class Job(JobBase):
    """A job, from its submission until it is forgotten; arguments as of `JobBase`."""

    def __init__(self, at: JobDesk, quota: Quota, record: JobRecord, state: State) -> None:
        """Take its place in the tables."""
        super().__init__(at, quota, record, state)
        at.keys[record.key] = self
        if state in WAITING:
            at.begin_waiting(record.client)
        if state == "checking":
            return
        at.jobs[self.id] = self
        for stored in self.kept:
            at.store.hold(stored.file, stored.nbytes)
        if state == "queued":
            self._enter_queue(again=False)
        elif state in ENDED:
            self.ended_now = (record.ended_at or 0.0) - at.wall + at.desk.now
            self._remember()

    def handle(self, event: t.JobEvent) -> None:
        """Take one event in."""
        step = TRANSITIONS.get((self.state, type(event)))
        if step is None:
            assert isinstance(event, get_args(t.WorkerSays)), f"{type(event).__name__} while {self.state}"
            self._refuse("out_of_protocol")
            return
        before = self.state
        getattr(self, step.handler)(event)
        assert self.state == before or self.state in step.to, f"{before} -> {self.state} by {type(event).__name__}"
        self._moved(before)

    # --- the request ---------------------------------------------------------------------------------------------------

    def on_checked(self, event: t.Checked) -> None:
        """Make the job durable."""
        if event.media:
            self.record = replace(self.record, media=event.media)
        self.request.files = []  # the record refers to them now
        self.state = "committing"
        self._at.persist(self.id, self.record, then=self._committed)

    def on_refused(self, event: t.Refused) -> None:
        """Tell everybody who asked, and keep nothing."""
        at, key = self._at, self.record.key
        self.state = "refused"
        del at.keys[key]
        for stored in self.request.files:
            at.store.release(stored.file)
        failure = short(event.failure)
        at.desk.counters["jobs_refused"] += 1
        at.desk.log("info", "job_refused", key=key, failure=failure.kind, field=failure.field, reason=failure.message)
        for peer in self.request.askers:
            at.desk.send(peer, m.JobRefused(failure, key))
        self.request = Request()

    def on_accepted(self, _event: t.Committed) -> None:
        """The job is durable: everybody who asked is told, and it waits for a group."""
        at, record = self._at, self.record
        at.jobs[self.id] = self
        at.desk.counters["jobs_accepted"] += 1
        at.desk.log("info", "job_accepted", job=self.id, kind=record.kind, client=record.client)
        self.state = "queued"
        self._enter_queue(again=False)
        accepted = m.JobAccepted(record.key, info_of(at, self))
        for peer, requests in self.request.askers.items():
            at.desk.send(peer, accepted)
            at.uploads_used(peer, [stored.file for stored in self.files], requests)
        self.request = Request()

    # --- at work -------------------------------------------------------------------------------------------------------

    def on_begun(self, event: t.Begun) -> None:
        """Have a group begin it, unless its workers were lost too often or this group can't be told."""
        at, group, record = self._at, event.group, self._next(self.record.attempt + 1)
        if record.losses > self.record.losses and record.losses >= at.config.job_attempts:
            self.record = replace(self.record, losses=record.losses)
            reason = f"its workers were lost {record.losses} times, the last time: {self._lost}"
            self._end("failed", Failure("worker_lost", reason))
            return
        unnumbered = m.RunJob(
            job=self.id,
            attempt=record.attempt,
            kind=record.kind,
            parameters=record.parameters,
            media={name: tuple(map(at.offer, files)) for name, files in record.media.items()},
            checkpoint=None if record.checkpoint is None else at.offer(record.checkpoint),
            checkpoint_step=record.checkpoint_step,
            checkpoint_steps=at.config.checkpoint_steps,
            sequence=0,
        )
        run = group.number(unnumbered)
        packed, misfit = fitted(run, group.limits())
        if misfit is not None:
            self._end("failed", Failure("request", f"the request doesn't fit what its workers accept: {misfit}"))
            return
        self.record = record
        group.send(at.desk, run, packed)
        at.persist(self.id, self.record)
        self._join(group)
        self.state = "preparing"
        self.pace = StepPace()
        self._begun_at = at.desk.now
        at.desk.log("info", "job_begun", job=self.id, attempt=run.attempt, group=group.name)

    def on_adopted(self, event: t.Adopted) -> None:
        """Go on where the job was before the broker, or the group, was away."""
        at, before = self._at, self.record
        self.record = self._next(event.attempt)
        if self.record != before:
            at.persist(self.id, self.record)
        self._join(event.group, is_over=event.is_over)
        self.state = "running"
        if not event.is_over and self._kept_step >= 0:
            self._tell_kept()
        at.desk.log("info", "job_adopted", job=self.id, attempt=event.attempt, group=event.group.name)

    def on_not_held(self, _event: t.NotHeld) -> None:
        """Have it done again, from its newest checkpoint; that is nobody's loss."""
        self._wait_again()
        self._at.desk.log("warning", "job_not_held", job=self.id, attempt=self.record.attempt)

    def on_progress(self, event: m.JobProgress) -> None:
        """Note where it stands."""
        if event.state not in ("preparing", "running", "encoding") or not is_sensible(event):
            self._refuse("malformed_progress")
            return
        self.state = event.state
        self.pace.take(event)

    def on_late_progress(self, _event: m.JobProgress) -> None:
        """It is to stop: nobody is told how far it gets."""

    def on_file(self, event: m.JobFile) -> None:
        """Take a checkpoint in, or the result: whatever came before is of no use then."""
        offer, limit = event.offer, self._at.config.result_bytes_max
        if not FILE_NAME.fullmatch(offer.file) or offer.nbytes < 1:
            self._refuse("malformed_files")
        elif event.role == "checkpoint":
            is_coming = self._arriving is not None and self._arriving.offer == offer
            is_wanted = self.state not in ("stopping", "unstored")
            is_new = is_wanted and self.record.checkpoint_step < event.step < STEPS_MAX
            if is_wanted and self.record.checkpoint is not None and event.step == self._kept_step:
                self._tell_kept()
            elif not is_new or offer.nbytes > limit:
                self._refuse("checkpoints_refused")
            elif not is_coming and not self._take(Arriving("checkpoint", offer, event.step)):
                self._refuse("checkpoints_without_room")
        elif offer.nbytes > limit:
            self._end("failed", Failure("stage", f"its result has {offer.nbytes} bytes; accepted: {limit}"))
        else:
            self._take_result(Arriving("result", offer, facts=dict(event.facts)))

    def on_take_due(self, _event: t.TakeDue) -> None:
        """Perhaps there is room now."""
        assert self.unstored is not None, "nothing to take"
        self._take_result(replace(self.unstored, taker=None))

    def _take_result(self, arriving: Arriving) -> None:
        """Take the result in, now or when there is room; it fails only if there never will be."""
        most, kept = self._at.config.state_bytes_max, {stored.file: stored.nbytes for stored in self.files}
        nbytes = arriving.offer.nbytes
        if nbytes + sum(kept.values()) > most:
            reason = f"its result of {nbytes} bytes and the files of the request don't fit: the store has {most} bytes"
            self._end("failed", Failure("overload", reason))
        elif not self._take(arriving):
            self._cannot_take(arriving, "there is no room for it", "room")

    def on_file_again(self, _event: m.JobFile) -> None:
        """The result is known already."""

    def on_ended(self, event: m.JobEnded) -> None:
        """The attempt has ended without a result, for good: its group takes the next job at once."""
        if event.state not in ("failed", "cancelled"):
            self._refuse("malformed_ends")
            return
        assert self.group is not None, "ended nowhere"
        self._at.free(self.group, self.id)
        failure = short(event.failure or Failure("stage", "the worker gave no reason"))
        self._end(event.state, failure if event.state == "failed" else None)

    def on_ended_again(self, _event: m.JobEnded) -> None:
        """Its end is known, and its leader will hear so when that is durable."""

    def on_checkpoint_taken(self, event: t.FileTaken) -> None:
        """Go on from there if the group is lost; without it, from an earlier one."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "a checkpoint that nobody announced"
        if event.failure is not None:
            self._at.desk.count("checkpoints_lost", job=self.id, reason=event.failure.message)
            return
        before = () if self.record.checkpoint is None else (self.record.checkpoint,)
        checkpoint = StoredFile(arriving.offer.file, arriving.offer.nbytes)
        self.record = replace(self.record, checkpoint=checkpoint, checkpoint_step=arriving.step)

        def durable() -> None:
            self._kept_step = arriving.step
            self._tell_kept()

        self._at.persist(self.id, self.record, without=before, then=durable)

    def on_result_taken(self, event: t.FileTaken) -> None:
        """Write the result to where it was asked for, or end at once."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "a result that nobody announced"
        failure = event.failure
        if failure is not None and failure.kind in ("overload", "timeout"):
            self._cannot_take(arriving, failure.message, "room" if failure.kind == "overload" else "worker")
            return
        if failure is not None:
            self._end("failed", Failure("stage", f"its result can't be had: {shortened(failure.message)}"))
            return
        result = self._result = StoredFile(arriving.offer.file, arriving.offer.nbytes)
        facts = {name: value for name, value in arriving.facts.items() if name != OUTPUT_ERROR}
        self.record = replace(self.record, facts=facts)
        output = self.record.output
        if output:
            self.state = "exporting"
            self._at.store.ask(lambda ticket: ExportFile(ticket, result.file, output), self._exported)
        else:
            self._end("succeeded")

    def on_exported(self, event: t.Exported) -> None:
        """The job has succeeded either way: its result can be fetched, and its note says what went wrong."""
        if event.failure is not None:
            error = shortened(event.failure.message)
            self.record = replace(self.record, facts={**self.record.facts, OUTPUT_ERROR: error})
            self._at.desk.log("warning", "result_not_written", job=self.id, path=self.record.output, reason=error)
        self._end("succeeded")

    def on_group_lost(self, event: t.GroupLost) -> None:
        """Have it done again from its newest checkpoint, unless nobody wants it.

        Workers that were asked to stop hand their job back. Others may live, and come back with it, until it begins again.
        """
        record = self.record
        self._drop_arriving()
        self._leave()
        self._at.desk.log("warning", "job_lost_its_group", job=self.id, attempt=record.attempt, reason=event.reason)
        if self.record.is_cancelled:
            self._end("cancelled")
        elif event.was_asked:
            self._wait_again()
        else:
            self._wait_again(lost=shortened(event.reason) or "nobody knows why")

    def on_leader_away(self, _event: t.LeaderAway) -> None:
        """Wait for what the leader says when it is back: it may have lost what it was told, or know more than it could say."""
        self._drop_arriving()
        self._leave()
        if self.record.is_cancelled:
            self._end("cancelled")
        else:
            self.state = "rejoining"

    def on_group_left(self, _event: t.GroupLost | t.LeaderAway) -> None:
        """The group isn't needed any more."""
        self._leave()

    def _take_in(self, failure: Failure | None) -> None:
        """The file that was to come is there, or isn't."""
        assert self._arriving is not None, "a file that nobody announced"
        if self._arriving.role == "checkpoint":
            self.on_checkpoint_taken(t.FileTaken(failure))
        else:
            self.on_result_taken(t.FileTaken(failure))

    # --- the end -------------------------------------------------------------------------------------------------------

    def on_end_durable(self, _event: t.Committed) -> None:
        """Its end is known for good: to the leader, to whoever wanted it, to those that watch."""
        at, record = self._at, self.record
        assert record.standing in ("succeeded", "failed", "cancelled"), f"ends as {record.standing}"
        self.state = record.standing
        self.phase = PHASES[self.state]
        self.ended_now = at.desk.now
        if self._begun_at is not None and self.state == "succeeded":
            at.took(at.desk.now - self._begun_at)
        self._tell_leader(m.ForgetJob(self.id, record.attempt))
        self._leave()
        self._remember()
        at.desk.counters[f"jobs_{self.state}"] += 1
        at.desk.log("info", "job_ended", job=self.id, state=self.state, **described(record.failure))

    def on_cancel_noted(self, event: t.CancelAsked) -> None:
        """It ends already: all that can change is that it isn't begun again if its result can't be had.

        While nothing can be made durable whoever asks is told to come again: of any number nothing is kept.
        """
        full = self._at.not_now()
        if full is not None:
            self._at.desk.send(event.peer, m.JobRefused(full, request=event.request))
            return
        if self.state != "ending":
            self._note_cancel()
        self._at.when_durable(lambda: self._answer(event))

    def on_cancel_waiting(self, event: t.CancelAsked) -> None:
        """Nobody works at it: it ends now, and whoever wants that is told when it is durable."""
        self._end("cancelled")
        self._at.when_durable(lambda: self._answer(event))

    def on_cancel_running(self, event: t.CancelAsked) -> None:
        """Have the leader stop at the next step, which may take a while; a result that comes before that counts.

        Whoever wants that is told when it is durable that it was said: the next broker doesn't wait for the leader.
        """
        self._note_cancel()
        self._at.when_durable(lambda: self._answer(event))
        self._drop_arriving()
        self._tell_leader(m.StopJob(self.id, self.record.attempt))
        self.state = "stopping"

    def _note_cancel(self) -> None:
        """Make durable that it was cancelled."""
        if not self.record.is_cancelled:
            self.record = replace(self.record, is_cancelled=True)
            self._at.persist(self.id, self.record)

    def on_cancel_late(self, event: t.CancelAsked) -> None:
        """It has ended: it stays as it is."""
        self._answer(event)

    def on_delete_early(self, event: t.DeleteAsked) -> None:
        """Only what has ended can be forgotten."""
        reason = f"{self.id} is {self.phase}; accepted: a job that has ended: cancel it first"
        self._at.desk.send(event.peer, m.JobRefused(Failure("request", reason, field="job"), request=event.request))

    def on_delete(self, event: t.DeleteAsked) -> None:
        """Forget it, and say so when that is durable."""
        at, last = self._at, m.Jobs(event.request, (info_of(self._at, self),), 1)
        files = self._forget("it was deleted")
        at.persist(self.id, None, without=files, then=lambda: at.desk.send(event.peer, last))

    def on_keep_expired(self, _event: t.KeepExpired) -> None:
        """It was kept for long enough."""
        self._at.persist(self.id, None, without=self._forget("it was kept for long enough"))

    def on_fetched(self, _event: t.Fetched) -> None:
        """Somebody has the result: it makes room before others do."""
        if self.record.fetched_at is None and self.record.result is not None:
            self.record = replace(self.record, fetched_at=self._at.wall)
            self._at.persist(self.id, self.record)
            self._at.fetched[self.id] = self

    def on_evicted(self, _event: t.Evicted) -> None:
        """Give the result up; the job stays known."""
        at, result = self._at, self.record.result
        assert result is not None, "nothing to give up"
        at.fetched.pop(self.id, None)
        self.record = replace(self.record, result=None)
        at.persist(self.id, self.record, without=(result,))
        at.outgoing.end_job(self.id, "the result made room for others")
        at.desk.log("info", "result_evicted", job=self.id, nbytes=result.nbytes)
