"""Input traces: key events and explicit controls over time, and the control that each chunk was made with.

Time is in thousandths of a chunk. Only denoising takes time; conditions and frames are made at once.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from reelwire import messages as m
from reelwire.controls import Keys, KeyState
from reelwire.errors import RequestError
from reelwire.messages import Artifact
from reelwire.pipeline.world.keyboard import KEY_ALIASES, KEY_NAMES, CameraState, integrate
from reelwire.tensors import Inline, TensorRef

if TYPE_CHECKING:
    from scripts.golden_checks.broker_rig import CLIENT, BrokerRig, world
    from scripts.golden_checks.line import Comparison
else:
    from golden_checks.broker_rig import CLIENT, BrokerRig, world

CAPACITIES: dict[str, int] = dict.fromkeys(("encode_request", "condition", "control", "latent", "output"), 2)
KEY_FIELDS = ("key", "control", "direction")
EVENT_FIELDS = ("event", "action")
RELEASES = ("release", "keyup", "end")
TRANSLATION_TOLERANCE = 1e-9


def check_input(trace: dict[str, Any], comparison: Comparison) -> None:
    """Play one trace and note every comparison.

    A message that isn't understood ends the recorded session; ours refuses it and goes on, so only the chunks before
    that are compared.
    """
    play = _Play(trace)
    play.run(trace["events"])
    name, expected = trace["name"], trace["expected"]
    chunks = play.told()
    compared = len(expected["chunks"])
    if expected["failure"] is None:
        comparison.equal(f"{name} submitted", len(play.submitted), expected["submitted"])
        comparison.equal(f"{name} chunks", len(chunks), compared)
    for ours, theirs in zip(chunks, expected["chunks"], strict=False):
        plain = {key: value for key, value in theirs.items() if key != "end_translation"}
        comparison.equal(f"{name} chunk {theirs['chunk']}", {key: ours.get(key) for key in plain}, plain)
        if "end_translation" in theirs:
            wanted = theirs["end_translation"]
            given = ours.get("end_translation", [float("inf")] * 3)
            error = max(abs(a - b) for a, b in zip(given, wanted, strict=True))
            comparison.number(f"{name} chunk {theirs['chunk']} end_translation", error, TRANSLATION_TOLERANCE)
    if len(chunks) < compared:
        comparison.equal(f"{name} chunks", len(chunks), compared)
    if expected["failure"] is None:
        final = play.final()
        if play.misunderstood:  # the recorded one kept it in the slot for explicit controls
            final = {key: value for key, value in final.items() if "explicit" not in key}
        comparison.equal(f"{name} final", final, {key: expected["final"][key] for key in final})


class _Play:
    def __init__(self, trace: dict[str, Any]) -> None:
        self.chunks = trace["chunk_count"]
        self.latents = trace["latents_per_chunk"]
        self.durations = trace.get("durations")
        self.spec = world(CAPACITIES, 2, self.chunks, KEY_NAMES, dict(KEY_ALIASES))
        self.rig = BrokerRig(self.spec)
        self.session = self.rig.core.sessions[self.rig.open("trace", self.chunks)]
        self.keys = Keys(self.spec)
        self.taps: dict[int, int] = {}
        self.submitted: list[tuple[int, bool]] = []
        self.output_at: dict[int, int] = {}
        self.due: int | None = None
        self.now = 0
        self.misunderstood = False

    def run(self, events: list[dict[str, Any]]) -> None:
        """Let time go from event to event: outputs that are due, then messages, then one look."""
        left = sorted(((round(event["t"] * 1000), event["message"]) for event in events), key=lambda entry: entry[0])
        self._settle()
        while left or self.due is not None:
            self.now = min(at for at in (self.due, left[0][0] if left else None) if at is not None)
            self.rig.now = self.now / 1000
            if self.due == self.now:
                self.due = None
                self.rig.finish("denoise")
                self._settle()
            while left and left[0][0] == self.now:
                self._say(left.pop(0)[1])
            self.rig.turn()
            self._settle()

    def _settle(self) -> None:
        """Make conditions and frames at once, take chunks at once, and note when a denoise began."""
        while len(self.submitted) < self.session.flow.next_control_index:
            self.submitted.append((self.now, len(self.submitted) > self.session.flow.next_commit))
        while "encode" in self.rig.running or "decode" in self.rig.running:
            self.rig.finish("encode" if "encode" in self.rig.running else "decode")
        for chunk in self.session.ring:
            self.output_at[chunk.index] = self.now
        if self.session.ring:
            self.rig.say(CLIENT, m.Ack(self.session.id, self.session.flow.next_commit))
        task = self.rig.running.get("denoise")
        if task is not None and self.due is None:
            self.due = self.now + self._duration(task.index)

    def _duration(self, index: int) -> int:
        given: Any = 1.0
        if isinstance(self.durations, dict):
            given = self.durations.get(str(index), 1.0)
        elif isinstance(self.durations, list):
            given = self.durations[index] if index < len(self.durations) else 1.0
        elif self.durations is not None:
            given = self.durations
        return round(float(given) * 1000)

    def _say(self, message: dict[str, Any]) -> None:
        key = next((message[field] for field in KEY_FIELDS if field in message), None)
        if message.get("type") == "control_state":
            self._change(lambda: self.keys.set_keys(message.get("controls")), message.get("controls"))  # type: ignore[arg-type]
        elif key is None and "poses" in message:
            control = Artifact({}, {"poses": _tensor(message["poses"])})
            self.rig.say(CLIENT, m.SubmitControl(self.session.id, None, control))
        else:
            word = str(next((message[field] for field in EVENT_FIELDS if field in message), "press")).lower()
            self._key(key, word)

    def _key(self, key: Any, word: str) -> None:
        def change() -> KeyState:
            self.spec.canonical_key(key)  # a reset has to name a key too, as the recorded messages do
            if word == "press":
                return self.keys.press(key)
            if word in RELEASES:
                return self.keys.release(key)
            if word == "reset":
                return self.keys.reset()
            if word == "reset_pose":
                return self.keys.reset_pose()
            raise RequestError("event", f"unknown word {word!r}")

        self._change(change, [key])

    def _change(self, change: Any, named: Any) -> None:
        """Send the register as the SDK would; what the SDK refuses, the broker must refuse as well."""
        try:
            state = change()
        except (RequestError, TypeError):
            self.misunderstood = True
            names = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
            if all(name in KEY_NAMES or name in KEY_ALIASES for name in names):
                return
            bad = KeyState(self.keys.state.revision + 1000, names)
            told = self.rig.say(CLIENT, m.SetKeys(self.session.id, bad))
            assert any(isinstance(message, m.ControlRefused) for message in told), f"{names} wasn't refused"
            return
        self.taps[state.revision] = state.tap_revision
        self.rig.say(CLIENT, m.SetKeys(self.session.id, state))

    def told(self) -> list[dict[str, Any]]:
        """The chunks that were delivered, in the words of the traces."""
        camera: CameraState | None = None
        described = []
        for chunk in (message for message in self.rig.heard if isinstance(message, m.Chunk)):
            applied = chunk.applied
            at, ahead = self.submitted[chunk.index]
            values: dict[str, Any] = {
                "chunk": chunk.index,
                "source": applied.source,
                "controls": applied.control.values.get("keys", []),
                "revision": self.taps[applied.revision] if applied.source == "tap" else None,
                "submitted_at": at / 1000,
                "output_at": self.output_at[chunk.index] / 1000,
                "ahead": ahead,
                "first_frame_is_start_pose": None,
            }
            if applied.source != "explicit":
                if applied.control.values["reset_pose"]:
                    camera = None
                values["first_frame_is_start_pose"] = camera is None
                camera = integrate(values["controls"], camera, self.latents).end
                values["end_translation"] = [float(axis) for axis in camera.pose[:3, 3]]
            described.append(values)
        return described

    def final(self) -> dict[str, Any]:
        """What is held and pending at the end."""
        desk = self.session.controls
        state = desk.state
        pending = state.tap_revision > desk.consumed_tap and state.tap_keys
        return {
            "pressed": list(state.held),
            "pending_tap": list(state.tap_keys) if pending else None,
            "revision": state.tap_revision,
            "overwritten_taps": desk.taps_overwritten,
            "pending_explicit": desk.pending is not None,
            "overwritten_explicit": desk.explicit_overwritten,
        }


def _tensor(rows: Any) -> TensorRef:
    flat: list[float] = []

    def walk(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            flat.append(float(value))
            return ()
        shapes = [walk(each) for each in value]
        return (len(value), *(shapes[0] if shapes else ()))

    shape = walk(rows)
    return TensorRef("float64", shape, Inline(struct.pack(f"<{len(flat)}d", *flat)))
