"""Every numbered rule that this tree claims to keep has a test that names it.

A test names a rule by ``streaming_07`` or ``groups_07`` in its own name, or by the marker ``@pytest.mark.rule("streaming_07")``.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RULE = re.compile(r"(streaming|groups)_(\d\d)(?!\d)")

RULES_MAX = {"streaming": 38, "groups": 21}

STREAMING = {
    1: "0 <= nc - nx <= 2, monotone, never beyond the chunk count",
    2: "prefetch fills the window when a session becomes ready and when a denoise ends",
    3: "a control is accepted in order only, with its condition and room; a refusal changes nothing",
    4: "with nc == nx control and condition are admitted together or not at all",
    5: "a control is never refused because of the prefetch window alone",
    6: "asking for capacity changes nothing",
    7: "the refill happens in the step that sends the latent on",
    8: "a stage that settles isn't run again; its output is put on its edges for each later chunk",
    9: "the join is by session, epoch and index",
    10: "occupancy counts queued and reserved; an artifact leaves its edge when its consumer starts",
    11: "credits: absolute grants for controls, chunks and bytes; one running and one waiting task per actor",
    12: "a client that stops reading stops its own session and nothing else; memory is bounded",
    13: "sessions at one actor take turns by the media time they were given; one that paused starves nobody",
    14: "explicit, then taps, then held state; a snapshot is immutable once its denoise starts",
    15: "held state supplies at most one chunk ahead, bound when its denoise starts; nothing else is repeated",
    16: "each chunk says which control it applied, and carries the facts of its stages",
    17: "an unknown key is refused at the broker with the names that it accepts",
    18: "chunks are committed in index order, all outputs of an index together",
    19: "the client acknowledges a commit cursor; unacknowledged chunks stay in a bounded ring",
    20: "a session at the pace of its media never runs further ahead than what may wait for the client",
    21: "initialize and release orders, each once, all attempted, the first error kept",
    22: "close delivers what was accepted, cancel drops it; both end although a stage hangs",
    23: "a stage error fails its session only, after the chunks below it; old results are dropped",
    24: "an idle session and one whose client never reads are closed",
    27: "a client that is gone has a grace, then its session is cancelled",
    29: "the clock of a chunk starts when its control is accepted",
    30: "latency and period per session and in sum; idle gaps by cause; histograms of fixed size",
    32: "heartbeats both ways; a busy worker says so; a stalled broker reads its backlog first",
    33: "identity is issued at registration; an old attachment is fenced off",
    34: "a malformed message is counted, the peer is told once and dropped",
    35: "sends never block; the outbox of a dead peer is freed",
    38: "versions and limits at the handshake; announced is not ready",
}

GROUPS = {
    1: "bodies go to every rank, numbered by the group's own sequence",
    2: "the leader orders, by messages; it chooses only what every rank has",
    3: "a chunk of a stream starts at the next step boundary of a job, and the job loses only the time it gave away",
    4: "a rank that dies or stands still ends the epoch within seconds, and is killed for certain",
    5: "several groups live side by side",
    6: "a size that doesn't divide the heads, a missing device and mixed versions are refused before anything runs",
    7: "a submission is durable when acknowledged, and idempotent by its key",
    8: "requests are checked at submission, and the error names the field",
    9: "media lie below an allowed root or are uploaded in parts with a hash; no symlink leads out",
    10: "progress says queue position, stage, step, seconds per step and time left",
    11: "a cancel takes effect at the next step on all ranks; a client that disappears cancels nothing",
    12: "a job whose group was lost goes on from what was kept, and makes the same result",
    13: "retries only for lost workers; a failure on one rank fails the job on all, and the group takes the next",
    14: "priority, fair between clients, arrival; over the limits refused with a time to try again",
    15: "results stay for a while or until they are deleted, within a quota",
}
CLAIMED = {"streaming": STREAMING, "groups": GROUPS}


def named_rules(path: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """Rules that tests of a file name, with the name of the test."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts = [node.name, *(ast.unparse(decorator) for decorator in node.decorator_list)]
            if not node.name.lower().startswith("test"):
                continue
            for text in texts:
                for design, number in RULE.findall(text):
                    yield (design, int(number)), f"{path.relative_to(TESTS)}::{node.name}"


def test_every_claimed_rule_has_a_test_that_names_it() -> None:
    """The list of rules without a test is empty, and no test names a rule that there isn't."""
    tests: dict[tuple[str, int], list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__).resolve():
            for rule, name in named_rules(path):
                tests[rule].append(name)
    claimed = {(design, number): text for design, rules in CLAIMED.items() for number, text in rules.items()}
    missing = [
        f"{design}_{number:02}: {text}" for (design, number), text in claimed.items() if (design, number) not in tests
    ]
    assert not missing, "rules without a test:\n" + "\n".join(missing)
    assert not [names for (design, number), names in tests.items() if not 1 <= number <= RULES_MAX[design]]
