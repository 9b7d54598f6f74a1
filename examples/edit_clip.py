"""An editing job: a clip and a sentence in, a clip out, with where it stands on the way.

With a broker and a worker that does jobs (`reelwire status` shows the kinds)::

    python examples/edit_clip.py in.mp4 "make it snow" out.mp4
    python examples/edit_clip.py in.mp4 "make it snow" out.mp4 KIND

The job is the broker's from the moment it is submitted: Ctrl-C ends this program, not the job. What is printed first finds
it again: ``Client().job(ID)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from reelwire import Client, JobStatus, ReelwireError


def shown(status: JobStatus) -> str:
    """Where a job stands, on one line."""
    match status.state:
        case "queued":
            return f"queued, {status.position} before it"
        case "running":
            left = "" if status.left_s is None else f", {status.left_s:.0f} s left"
            return f"{status.stage} {status.step}/{status.steps}{left}"
        case _:
            return status.state


def main(clip: Path, prompt: str, out: Path, kind: str = "emulated-v2v") -> None:
    """Have a clip edited, and write what comes of it."""
    with Client() as client:
        job = client.submit_edit(kind, prompt=prompt, video=clip, seed=42)
        print(f"job {job.id}")
        for status in job.progress():  # goes on over lost connections and restarted brokers
            print(shown(status))
        print(f"wrote {job.result(out)}")  # or raises why there is nothing to write


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
    except ReelwireError as error:
        sys.exit(f"{type(error).__name__}: {error}")
