"""Children that are started, watched, restarted and stopped; all of them are real processes."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from reelwire.workers.files import Files
from reelwire.workers.supervisor import Backoff, Child, ChildFailed, Supervisor

LIMIT_S = 30.0
READY = "import json, os; print(json.dumps({'event': 'ready', 'pid': os.getpid()}), flush=True)\n"
STAY = "import signal; signal.pause()\n"
PARENT_DEATH = "import os; from reelwire.workers.supervisor import die_with_parent; die_with_parent(os.getppid())\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests watch processes through pidfds")


class Lines:
    """What children said, to be waited for."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, kind: str, line: str) -> None:
        """Keep a line."""
        with self._changed:
            self.lines.append((name, kind, line))
            self._changed.notify_all()

    def wait_for(self, part: str, times: int = 1) -> None:
        """Until that many lines hold `part`."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(part in line for *_, line in self.lines) >= times, LIMIT_S)


def child(name: str, *program: str, stop_rank: int = 0) -> Child:
    return Child(name, (sys.executable, "-P", "-c", "".join(program)), stop_rank)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def lines() -> Lines:
    """Output of the children."""
    return Lines()


@pytest.fixture
def supervisor(lines: Lines) -> Iterator[Supervisor]:
    """A supervisor with short pauses, of which nothing is left in the end."""
    files = open_files()
    with Supervisor(lines, lambda: Backoff(0.01, 0.04), stop_limit_s=LIMIT_S) as made:
        yield made
    assert made.pids() == {}
    assert "supervisor" not in {thread.name for thread in threading.enumerate()}
    assert open_files() == files


def gone(pid: int) -> bool:
    """Wait for the end of a process that is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


def test_pauses_double_up_to_the_most_and_start_again_after_a_stable_life() -> None:
    """1, 2, 4 ... 32, 32; a minute of life ends the series."""
    backoff = Backoff(1.0, 32.0, 60.0)
    assert [backoff.after(0.5) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert backoff.after(59.9) == 32
    assert [backoff.after(60.0), backoff.after(3.0)] == [1, 2]


def test_a_child_says_when_it_is_ready(supervisor: Supervisor, lines: Lines) -> None:
    """The line is returned as a mapping; other lines are forwarded, whatever is in them."""
    noise = "import sys; print('{\"event\": 3}'); print('[1]'); sys.stderr.buffer.write(b'\\xff\\n'); "
    supervisor.start(child("worker", noise, READY, STAY))
    said = supervisor.wait_ready("worker", LIMIT_S)
    assert said["event"] == "ready"
    assert supervisor.pids() == {"worker": said["pid"]}
    lines.wait_for("\ufffd")
    assert ("worker", "stdout", '{"event": 3}') in lines.lines
    assert supervisor.wait_ready("worker", 0) == said, "it still is"


def test_a_child_that_falls_over_is_started_again(supervisor: Supervisor, lines: Lines) -> None:
    """Killed twice: each time a new process says that it is ready."""
    supervisor.start(child("worker", READY, STAY))
    seen: set[object] = set()
    for times in (1, 2):
        pid = supervisor.wait_ready("worker", LIMIT_S)["pid"]
        assert isinstance(pid, int)
        seen.add(pid)
        os.kill(pid, signal.SIGKILL)
        lines.wait_for("was killed by signal 9; starts again", times)
    seen.add(supervisor.wait_ready("worker", LIMIT_S)["pid"])
    assert len(seen) == 3
    assert "starts again in 0.01 s" in lines.lines[1][2]


def test_a_child_may_come_back_as_what_it_said_it_was(supervisor: Supervisor, lines: Lines) -> None:
    """The command of a later start is made from the line that said ready."""

    def again(said: Mapping[str, object]) -> tuple[str, ...]:
        program = f"import json; print(json.dumps({{'event': 'ready', 'before': {said['pid']}}}), flush=True)\n"
        return child("worker", program, STAY).command

    supervisor.start(dataclasses.replace(child("worker", READY, STAY), again=again))
    pid = supervisor.wait_ready("worker", LIMIT_S)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    lines.wait_for("was killed by signal 9; starts again")
    assert supervisor.wait_ready("worker", LIMIT_S) == {"event": "ready", "before": pid}


def test_children_may_be_started_while_others_come_and_go(lines: Lines) -> None:
    """The supervisor's thread looks at its children while another thread adds some."""
    failures: list[object] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        with Supervisor(lines, lambda: Backoff(0.001)) as supervisor:
            supervisor.start(child("weak", "raise SystemExit(1)"))
            for number in range(200):
                supervisor.start(Child(f"ghost-{number}", ("/no/such/program",)))
            lines.wait_for("starts again", 2)
    finally:
        threading.excepthook = hook
    assert failures == []


def test_wrong_usage_is_not_repeated(supervisor: Supervisor) -> None:
    """Exit code 2: the last line of standard error is the reason, and `wait` returns it."""
    supervisor.start(child("steady", READY, STAY))
    supervisor.start(child("worker", "import sys; print('a\\nstages: no such', file=sys.stderr); sys.exit(2)"))
    with pytest.raises(ChildFailed, match="worker ended with exit code 2: stages: no such") as caught:
        supervisor.wait_ready("worker", LIMIT_S)
    assert (caught.value.exit_code, caught.value.last_line) == (2, "stages: no such")
    assert supervisor.wait(LIMIT_S) is caught.value
    supervisor.wait_ready("steady", LIMIT_S)
    assert list(supervisor.pids()) == ["steady"]


def test_a_command_that_is_not_there_is_given_up(supervisor: Supervisor) -> None:
    """As wrong usage."""
    supervisor.start(Child("ghost", ("/no/such/program",)))
    with pytest.raises(ChildFailed, match="No such file"):
        supervisor.wait_ready("ghost", LIMIT_S)


def test_a_child_that_is_done_is_left_alone(supervisor: Supervisor, lines: Lines) -> None:
    """Exit code 0 is no fault, and told; when all have ended, `wait` returns."""
    supervisor.start(child("one", "pass"))
    with pytest.raises(ChildFailed, match="before it was ready"):
        supervisor.wait_ready("one", LIMIT_S)
    assert supervisor.wait(LIMIT_S) is None
    assert lines.lines == [("one", "stderr", "ended with exit code 0; it isn't started again")]


def test_a_child_that_never_is_ready(supervisor: Supervisor, lines: Lines) -> None:
    """The error repeats what it said last."""
    supervisor.start(child("slow", "import sys; print('loading', file=sys.stderr, flush=True)\n", STAY))
    lines.wait_for("loading")
    with pytest.raises(TimeoutError, match=r"slow isn't ready.*loading"):
        supervisor.wait_ready("slow", 0.0)


def test_wait_can_be_interrupted(supervisor: Supervisor) -> None:
    """By another thread."""
    supervisor.start(child("worker", READY, STAY))
    threading.Thread(target=supervisor.interrupt).start()
    assert supervisor.wait(LIMIT_S) is None


def test_lower_ranks_are_stopped_first(supervisor: Supervisor, lines: Lines) -> None:
    """The broker drains while its workers live; they get their SIGTERM when it has ended."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: (print('ending', flush=True), sys.exit(0)))\n"
    program = ("import signal, sys\n", handler, READY, STAY)
    supervisor.start(child("worker-1", *program, stop_rank=1))
    supervisor.start(child("broker", *program, stop_rank=0))
    supervisor.start(child("worker-2", *program, stop_rank=1))
    pids = [supervisor.wait_ready(name, LIMIT_S)["pid"] for name in ("worker-1", "broker", "worker-2")]
    supervisor.stop()
    order = [name for name, _, line in lines.lines if line == "ending"]
    assert order[0] == "broker"
    assert sorted(order[1:]) == ["worker-1", "worker-2"]
    for pid in pids:
        assert isinstance(pid, int)
        with pytest.raises(ChildProcessError):  # reaped
            os.waitpid(pid, os.WNOHANG)
    with pytest.raises(ValueError, match="stopped"):
        supervisor.start(child("late", READY))


@pytest.fixture
def impatient(lines: Lines) -> Iterator[Supervisor]:
    """A supervisor that kills what doesn't end soon."""
    made = Supervisor(lines, stop_limit_s=0.2)
    yield made
    made.stop()


def test_a_child_that_does_not_listen_is_killed(impatient: Supervisor) -> None:
    """SIGKILL after the limit, rank by rank."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    for rank in (0, 1):
        impatient.start(child(f"deaf-{rank}", deaf, READY, STAY, "signal.pause()\n", stop_rank=rank))
    for rank in (0, 1):
        impatient.wait_ready(f"deaf-{rank}", LIMIT_S)
    impatient.stop()
    assert impatient.pids() == {}


def test_a_second_request_kills_at_once(supervisor: Supervisor) -> None:
    """`kill` ends a `stop` that waits on another thread."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    supervisor.start(child("deaf", deaf, READY, STAY))
    supervisor.wait_ready("deaf", LIMIT_S)
    stopping = threading.Thread(target=supervisor.stop)
    stopping.start()
    supervisor.kill()
    stopping.join(LIMIT_S)
    assert not stopping.is_alive()


def test_a_stop_does_not_wait_for_a_restart(lines: Lines) -> None:
    """What waits for its turn is over, and whoever waits for it hears so."""
    with Supervisor(lines, lambda: Backoff(3600.0)) as supervisor:
        supervisor.start(child("weak", "import sys; sys.exit(1)"))
        lines.wait_for("starts again in 3600 s")
    with pytest.raises(ChildFailed):
        supervisor.wait_ready("weak", LIMIT_S)


def test_a_stop_right_after_a_start(lines: Lines) -> None:
    """Whether the child has begun or not."""
    for _ in range(20):
        with Supervisor(lines) as supervisor:
            supervisor.start(child("brief", STAY))
        assert supervisor.pids() == {}


def test_a_grandchild_that_holds_the_pipes_hides_nothing(supervisor: Supervisor, lines: Lines) -> None:
    """The exit of the child is seen although its output stays open."""
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STAY!r}]).pid, flush=True)\n"
    supervisor.start(child("parent", program))
    assert supervisor.wait(LIMIT_S) is None
    os.kill(int(lines.lines[0][2]), signal.SIGKILL)


def test_a_long_line_is_cut_and_not_kept(supervisor: Supervisor, lines: Lines) -> None:
    """A child that never ends its line can't fill our memory; what it said last without an end comes too."""
    supervisor.start(child("talker", "import sys; sys.stdout.write('x' * (1 << 20) + '\\nend')"))
    assert supervisor.wait(LIMIT_S) is None
    said = [line for _, kind, line in lines.lines if kind == "stdout"]
    assert sum(map(len, said)) == (1 << 20) + 3
    assert max(map(len, said)) <= 2 * (64 << 10)


def test_names_are_unique(supervisor: Supervisor) -> None:
    """Two children of one name are one too many."""
    supervisor.start(child("a", READY, STAY))
    with pytest.raises(ValueError, match="already"):
        supervisor.start(child("a", READY, STAY))


def test_environment_and_process_group_are_the_childs_own(supervisor: Supervisor) -> None:
    """Ctrl-C on the terminal reaches the supervisor alone."""
    program = "import json, os; print(json.dumps({'event': 'ready', 'x': os.environ['X'], 'g': os.getpgrp()}))\n"
    command = (sys.executable, "-P", "-c", program.replace("}))", "}), flush=True)") + STAY)
    supervisor.start(Child("worker", command, environment={"X": "here"}))
    said = supervisor.wait_ready("worker", LIMIT_S)
    assert said["x"] == "here"
    assert said["g"] == supervisor.pids()["worker"] != os.getpgrp()


def test_children_die_with_a_killed_supervisor() -> None:
    """A kill -9 of the parent: the kernel ends the children."""
    program = (
        "import signal, sys\n"
        "from reelwire.workers.supervisor import Child, Supervisor\n"
        "supervisor = Supervisor()\n"
        "for name in ('a', 'b'):\n"
        f"    supervisor.start(Child(name, (sys.executable, '-P', '-c', {PARENT_DEATH + READY + STAY!r})))\n"
        "print(*(supervisor.wait_ready(name, 30)['pid'] for name in 'ab'), flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait(LIMIT_S)
        assert all(gone(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate()


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    """The window before the kernel was asked is closed by looking at the parent."""
    program = "from reelwire.workers.supervisor import die_with_parent; die_with_parent(1 << 22)"
    done = subprocess.run([sys.executable, "-P", "-c", program], check=False, timeout=LIMIT_S)
    assert done.returncode == 1


def test_without_the_kernel_the_end_of_standard_input_ends_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable way: a thread waits on the pipe that the parent holds."""
    program = f"import sys; sys.platform = 'other'\n{PARENT_DEATH}{READY}import threading; threading.Event().wait()\n"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert "ready" in process.stdout.readline()
    process.stdin.close()
    assert process.wait(LIMIT_S) == 1
    process.stdout.close()


def test_exits_are_seen_without_pidfds(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    """Where there are none, a thread waits for each child."""
    monkeypatch.delattr(os, "pidfd_open")
    with Supervisor(lines, lambda: Backoff(0.01)) as supervisor:
        supervisor.start(child("worker", READY, STAY))
        pid = supervisor.wait_ready("worker", LIMIT_S)["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        lines.wait_for("was killed by signal 9; starts again")
        supervisor.wait_ready("worker", LIMIT_S)
    assert supervisor.pids() == {}


def test_output_goes_to_standard_error_under_the_childs_name(capfd: pytest.CaptureFixture[str]) -> None:
    """Unless somebody else takes it; standard output of a child is for the supervisor."""
    with Supervisor() as supervisor:
        supervisor.start(child("worker", "import sys; print('hello', file=sys.stderr, flush=True)\n", READY, STAY))
        supervisor.wait_ready("worker", LIMIT_S)
    out, err = capfd.readouterr()
    assert out == ""
    assert "worker: hello\n" in err


@pytest.mark.parametrize("in_order", [False, True])
def test_the_shared_memory_of_a_child_goes_with_it(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    """Whether a child is killed or stopped, what it had written is removed before it is started again or all is over."""
    monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(tmp_path))
    writing = (
        "from reelwire.segments import Pool\npool = Pool(1 << 20)\npiece = pool.take(1000)\n",
        "import json; print(json.dumps({'event': 'ready', 'owner': pool.owner}), flush=True)\n",
    )
    with Supervisor(lines, lambda: Backoff(3600.0)) as supervisor:
        supervisor.start(child("writer", *writing, STAY))
        owner = str(supervisor.wait_ready("writer", LIMIT_S)["owner"])
        (folder,) = tmp_path.glob("*/*")
        assert (folder.name, (folder / "s1").exists()) == (owner, True)
        if not in_order:
            os.kill(supervisor.pids()["writer"], signal.SIGKILL)
            lines.wait_for("starts again")
            assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_what_killed_children_had_in_temporary_folders_is_removed(
    supervisor: Supervisor, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of jobs as well as shared memory; those of a process that lives stay where they are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = Files()
    program = (
        "from reelwire.workers.files import Files; files = Files(); (files.folder / ('a' * 64)).touch()\n",
        "print(files.folder, flush=True); import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    supervisor.start(dataclasses.replace(child("killed", *program), environment={"TMPDIR": str(tmp_path)}))
    lines.wait_for(str(own.folder.parent), times=2)  # it is started again when that was done
    supervisor.stop()
    assert list(own.folder.parent.iterdir()) == [own.folder]
    own.close()
    assert list(tmp_path.iterdir()) == []
