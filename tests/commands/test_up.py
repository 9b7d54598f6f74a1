"""What `reelwire up` starts: the groups and workers of its file, and of its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from reelwire.commands.up import Asked, planned
from reelwire.errors import ConfigError
from reelwire.settings import Settings


def plan(tmp_path: Path, text: str = "", *groups: str) -> list[tuple[str, str, int, int, str]]:
    """Name, group, rank, world and device of each process."""
    file = tmp_path / "reelwire.toml"
    file.write_text(text)
    made = planned(Settings.load(file, {}), Asked(None, groups, {}))
    return [(name, each.value.group, each.value.rank, each.value.world, each.value.device) for name, each in made]


def refused(tmp_path: Path, text: str = "", *groups: str) -> str:
    """Why nothing is started."""
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, text, *groups)
    return str(caught.value)


def test_groups_of_a_file_have_a_process_for_each_device(tmp_path: Path) -> None:
    """Listed, or as many as `world` says from `device` on; all of them on the CPU where that is the device."""
    text = """
[worker]
device = "cuda:7"
[[groups]]
name = "a"
devices = ["cuda:1", "cuda:3"]
[[groups]]
name = "b"
world = 2
device = "cuda:4"
[[groups]]
name = "c"
devices = ["cpu", "cpu"]
"""
    assert plan(tmp_path, text) == [
        ("a-0", "a", 0, 2, "cuda:1"),
        ("a-1", "a", 1, 2, "cuda:3"),
        ("b-0", "b", 0, 2, "cuda:4"),
        ("b-1", "b", 1, 2, "cuda:5"),
        ("c-0", "c", 0, 2, "cpu"),
        ("c-1", "c", 1, 2, "cpu"),
    ]
    assert plan(tmp_path, "", "a=2", "b=1") == [
        ("a-0", "a", 0, 2, "cpu"),
        ("a-1", "a", 1, 2, "cpu"),
        ("b-0", "b", 0, 1, "cpu"),
    ]


WRONG = {
    "devices = []": ("devices: []", "a list that has the device of each rank"),
    "devices = 'cpu'": ("devices: 'cpu'", "a list that has the device of each rank"),
    "devices = 3": ("devices: 3", "a list that has the device of each rank"),
    "devices = ['cpu', 3]": ("devices: 3", "a text"),
    "devices = ['cpu', 'gpu']": ("devices: 'gpu'", "cpu or cuda:N"),
    "devices = ['gpu', 'cpu']": ("devices: 'gpu'", "cpu or cuda:N"),
    "devices = ['cuda:0', 'cuda:0']": ("devices: ['cuda:0', 'cuda:0']", "a device of its own for each rank"),
    "devices = ['cpu']\nworld = 1": ("devices: is given beside world or device", "devices alone"),
    "device = 3": ("device: 3", "a text"),
    "world = 'two'": ("world: 'two'", "an integer"),
    "world = 0": ("world: 0", "a whole number from 1 to 1024"),
    "world = true": ("world: True", "an integer"),
    "group = 'h'": ("group: is no setting of a group", "name, devices, and those of a worker"),
    "rank = 1": ("rank: is no setting of a group", "name, devices, and those of a worker"),
    "count = 2": ("count: is no setting of a group", "name, devices, and those of a worker"),
    "stages = 3": ("stages: 3", "a list"),
    "jobs = 3": ("jobs: 3", "a text"),
    "options = 3": ("options: 3", "a list"),
    "options = {a = [1]}": ("options.a: [1]", "a text"),
    "slots = 'many'": ("slots: 'many'", "an integer"),
    "colour = 1": ("colour: unknown setting", "pipeline"),
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_a_group_of_a_file_is_named(tmp_path: Path, line: str) -> None:
    """By the group's number and the field as it is written there, with what is accepted."""
    wrong, accepted = WRONG[line]
    said = refused(tmp_path, f"[[groups]]\nname = 'ok'\n[[groups]]\nname = 'g'\n{line}\n")
    assert said.startswith(f"groups[2].{wrong}")
    assert accepted in said.partition("accepted:")[2]


@pytest.mark.parametrize("name", ["3", "['g']", "'a b'", "''", "true"])
def test_a_group_has_a_name_that_is_one(tmp_path: Path, name: str) -> None:
    """The field is called what it is called in the file, not what the ranks are told."""
    said = refused(tmp_path, f"[[groups]]\nname = {name}\n")
    assert said.startswith("groups[1].name: ")
    assert "accepted: " in said
    assert refused(tmp_path, "[[groups]]\n").startswith("groups[1].name: is missing")


def test_two_groups_of_one_name_are_refused(tmp_path: Path) -> None:
    """The sentence names both of them, or the flag; workers that have a rank's name are refused as such."""
    said = refused(tmp_path, "[[groups]]\nname = 'g'\n[[groups]]\nname = 'h'\n[[groups]]\nname = 'g'\n")
    assert said.startswith("groups[3].name: 'g' is that of groups[1], too (")
    assert said.endswith("; accepted: another name for each group")
    assert refused(tmp_path, "", "g=1", "g=2") == "group: 'g' is given twice; accepted: another name for each group"
    assert refused(tmp_path, "[[workers]]\nname = 'g-0'\n[[groups]]\nname = 'g'\n").startswith("workers.name: 'g-0'")
