"""In which order jobs start: priority, then fairly between clients, then arrival.

Among the clients of one priority it is start-time fair queueing with every job at cost 1, so all tags are whole numbers:
the *rounds*. A client's first job has the tag of the next round, its others follow one round later each; the smallest
tag starts first, of equal ones the job that came first. A round takes nobody in once a job of it has started. So a client
that comes late waits for one job of each other client at most, and however many clients come, they delay a job that
is there already by those rounds that are before its own. Whoever has no job that waits is owed nothing and owes nothing.

A group takes the first job, in that order, of the kinds that it does. A job that lost its group comes back where it was:
before the others of its client, and as if it hadn't been started.

After P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing", IEEE/ACM Transactions on Networking 5 (5), 1997.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Place:
    """What decides when a job starts.

    Attributes:
        job: its id.
        number: order of arrival; no two have the same.
        client: who submitted it.
        priority: higher ones go first.
        kind: what it is.
    """

    job: str
    number: int
    client: str
    priority: int
    kind: str


@dataclass(slots=True)
class _Line:
    """The jobs of one client at one priority: numbers by kind, ascending, and the tag of whichever starts next."""

    tag: int
    kinds: dict[str, list[int]] = field(default_factory=dict)

    def count(self, kinds: Collection[str]) -> int:
        count = 0
        for kind, numbers in self.kinds.items():
            if kind in kinds:
                count += len(numbers)
        return count

    def below(self, number: int, kinds: Collection[str]) -> int:
        count = 0
        for kind, numbers in self.kinds.items():
            if kind in kinds:
                count += bisect_left(numbers, number)
        return count

    def first(self, kinds: Collection[str]) -> int | None:
        return min((numbers[0] for kind, numbers in self.kinds.items() if kind in kinds), default=None)

    def numbers(self, kinds: Collection[str]) -> Iterator[int]:
        return heapq.merge(*(numbers for kind, numbers in self.kinds.items() if kind in kinds))


@dataclass(slots=True)
class _Level:
    """One priority: the round that has begun, the clients' lines, and how many jobs there are of each kind."""

    round: int = -1
    lines: dict[str, _Line] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def count(self, kinds: Collection[str]) -> int:
        return sum([count for kind, count in self.counts.items() if kind in kinds])


class JobQueue:
    """Jobs that wait for a group.

    Attributes:
        version: changes whenever some job's position may have.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._levels: dict[int, _Level] = {}
        self._places: dict[str, Place] = {}
        self._jobs: dict[int, str] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, job: str) -> bool:
        return job in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def add(self, place: Place, *, again: bool = False) -> None:
        """A job waits; `again`: it had started, and comes back."""
        assert place.job not in self._places, f"{place.job} waits already"
        assert place.number not in self._jobs, f"two jobs have the number {place.number}"
        self._places[place.job] = place
        self._jobs[place.number] = place.job
        level = self._levels.setdefault(place.priority, _Level())
        line = level.lines.get(place.client)
        if line is None:
            line = level.lines[place.client] = _Line(level.round + 1)
        if again:
            line.tag = max(line.tag - 1, 0)
        insort(line.kinds.setdefault(place.kind, []), place.number)
        level.counts[place.kind] += 1
        self.version += 1

    def first(self, kinds: Collection[str]) -> str | None:
        """The job that starts next where these kinds are done; None when there is none."""
        for priority in sorted(self._levels, reverse=True):
            best: tuple[int, int] | None = None
            for line in self._levels[priority].lines.values():
                number = line.first(kinds)
                if number is not None and (best is None or (line.tag, number) < best):
                    best = line.tag, number
            if best is not None:
                return self._jobs[best[1]]
        return None

    def start(self, job: str) -> None:
        """A job starts, in its turn or otherwise: its client's next one belongs to the next round."""
        place = self._places[job]
        level = self._levels[place.priority]
        line = level.lines[place.client]
        level.round = max(level.round, line.tag)
        line.tag += 1
        self.remove(job)

    def remove(self, job: str) -> None:
        """A job waits no longer; it needn't have started."""
        place = self._places.pop(job)
        del self._jobs[place.number]
        level = self._levels[place.priority]
        line = level.lines[place.client]
        numbers = line.kinds[place.kind]
        del numbers[bisect_left(numbers, place.number)]
        level.counts[place.kind] -= 1
        if not numbers:
            del line.kinds[place.kind]
        if not line.kinds:
            del level.lines[place.client]
        if not level.lines:
            del self._levels[place.priority]
        self.version += 1

    def position(self, job: str, kinds: Collection[str]) -> int:
        """How many jobs of these kinds start before one of them; takes time in proportion to the number of clients."""
        place = self._places[job]
        ahead = sum(level.count(kinds) for priority, level in self._levels.items() if priority > place.priority)
        lines = self._levels[place.priority].lines
        own = lines[place.client]
        index = own.below(place.number, kinds)
        tag = own.tag + index
        for line in lines.values():
            before = tag - line.tag
            if line is own:
                ahead += index
            elif before >= 0:
                count = line.count(kinds)
                if before >= count:
                    ahead += count
                else:  # of the one with the same tag whoever came first
                    ahead += before + (line.below(place.number, kinds) > before)
        return ahead

    def order(self, kinds: Collection[str]) -> Iterator[str]:
        """All jobs of these kinds, as they start when nothing else happens."""
        for priority in sorted(self._levels, reverse=True):
            heap: list[tuple[int, int, Iterator[int]]] = []
            for line in self._levels[priority].lines.values():
                numbers = line.numbers(kinds)
                number = next(numbers, None)
                if number is not None:
                    heap.append((line.tag, number, numbers))
            heapq.heapify(heap)
            while heap:
                tag, number, numbers = heap[0]
                yield self._jobs[number]
                following = next(numbers, None)
                if following is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (tag + 1, following, numbers))

    def check(self) -> None:
        """Assert that every job stands in one line, and that nothing else does."""
        found: set[tuple[int, str, str, int]] = set()
        for priority, level in self._levels.items():
            assert level.lines, "a priority without a job"
            kinds: Counter[str] = Counter()
            for client, line in level.lines.items():
                assert line.kinds, f"{client} has no job"
                assert 0 <= line.tag <= level.round + 1, f"{client} waits for a round that nobody knows"
                for kind, numbers in line.kinds.items():
                    assert numbers, f"{client} has no {kind}"
                    assert numbers == sorted(numbers), f"{client}'s jobs are out of order"
                    kinds[kind] += len(numbers)
                    found |= {(priority, client, kind, number) for number in numbers}
            assert kinds == +level.counts, "jobs of a priority don't add up"
        places = {(each.priority, each.client, each.kind, each.number) for each in self._places.values()}
        assert found == places, "a job stands in no line, or in another one"
        assert {each.number: each.job for each in self._places.values()} == self._jobs, "numbers and jobs don't agree"
