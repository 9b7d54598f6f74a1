"""The tree's own shape: who imports whom, links, sizes, packages, and what a wheel holds.

The table of imports stands here as data; a new file at the top of the package must be entered in it.
"""

from __future__ import annotations

import ast
import importlib
import shutil
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "reelwire"
DIAGRAM = ("<!-- printed by reelwire.broker.{}.mermaid() -->\n```mermaid\n", "```")
LINKED = ("broker", "workers", "pipeline", "kernels")
SKIPPED = {".venv", ".git", "build", "dist", "__pycache__", ".hypothesis", "node_modules"}

FILE_LINES_MAX = 500
FILE_LINES_MEDIAN_MAX = 200
FUNCTION_LINES_MAX = 70

# The first row of the table: each may import those before it, and nothing else of ours.
DOWNWARD = (
    "errors", "checks", "versions", "endpoints", "spec", "job_spec", "tensors", "controls", "parts", "job_parts", "binding",
    "group_messages", "job_messages", "worker_messages", "messages", "codec", "wire", "media",
)  # fmt: skip
# Beside the first row: what wakes the loops, and what writes into files what others have made; for these alone.
WAKES = {"loop", "supervisor", "client_loop"}
WRITES = {"broker": {"files"}, "workers": {"files", "collectives"}}
# Shared memory, for whoever writes it, reads it, or cleans up; never the broker.
MEMORY = ("segment_files", "segments")
MEMORY_FILES = {
    "workers": {"memory", "stage_work", "values", "files", "group_loop", "supervisor"},
    "client_memory": {"client_memory"},
}
# What stands on the first row: the SDK and the commands. They may import each other, downward.
FACE = (
    "client_job_events", "client_events", "client_view", "client_desk", "client_jobs", "client_streams", "client_core",
    "client_values", "client_request", "client_files", "client_job_request", "client_memory", "client_door", "client_loop",
    "client_session", "client_job", "client", "client_awaiting", "client_job_async", "client_async", "__init__",
    "settings", "poses", "timeline", "commands", "cli", "__main__",
)  # fmt: skip

ZMQ = {"zmq"}
TORCH = {"torch", "torchvision", "diffusers", "transformers", "safetensors"}
TRITON = {"triton"}
CLOCK = {"time", "datetime", "sched"}
THREADS = {"threading", "_thread", "concurrent", "asyncio", "multiprocessing", "queue"}
WORLD = {
    "os", "socket", "select", "selectors", "signal", "subprocess", "random", "secrets", "uuid", "logging",
    "structlog",
}  # fmt: skip
PICKLED = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}

SDK_ZMQ_FILES = {"client_loop", "client"}
SDK_PURE = {
    "client_job_events", "client_events", "client_view", "client_desk", "client_jobs", "client_streams", "client_core",
    "client_values",
}  # fmt: skip

# Files of a folder that may touch what the rest of the folder may not.
ZMQ_FILES = {
    "broker": {"loop", "auth"},
    "workers": {"loop", "group_loop", "link"},
    "commands": {"bench_broker", "bench_forwarder", "bench_lean", "bench_payload"},  # beside ours they measure a bare socket
}  # fmt: skip
CLOCK_FILES = {
    "broker": {"loop", "metrics", "store", "prober"},
    "workers": {"loop", "group_loop", "threads", "group", "stage_work", "collectives", "emulated", "emulated_jobs", "supervisor"},
    "segments": {"segments"},
}  # fmt: skip
WORKER_TORCH_FILES = {"device", "values", "collectives"}
# It looks at everything, each time inside of a function.
DOCTOR = {"reelwire.commands.diagnosis"}
WORKER_PIPELINE_FILES = {
    "runner", "stage_work", "group", "group_loop", "group_events", "job_runner", "results", "collectives", "emulated",
    "emulated_jobs", "leader_jobs",
}  # fmt: skip
IMPURE = {
    "broker": {"loop", "endpoint", "store", "journal", "files", "exporting", "media_roots", "media_probe", "prober", "state_folder"},
    "workers": {
        *CLOCK_FILES["workers"], *ZMQ_FILES["workers"], "runner", "device", "rank_processes", "files", "checkpoints", "results",
        "config",
    },
}  # fmt: skip


def sources(folder: Path) -> list[Path]:
    """Python files under a folder, links not followed twice."""
    return sorted(path for path in folder.rglob("*.py") if not SKIPPED.intersection(path.relative_to(folder).parts))


@cache
def product() -> tuple[tuple[Path, str], ...]:
    """Every file of the package and its dotted name."""
    found = []
    for path in sources(PACKAGE):
        if path.relative_to(PACKAGE).parts[0] in LINKED:
            continue  # rglob follows links in some Python releases and not in others
        found.append((path, dotted(path.relative_to(PACKAGE))))
    for name in LINKED:
        found += [(path, dotted(Path(name) / path.relative_to(ROOT / name))) for path in sources(ROOT / name)]
    return tuple(found)


def dotted(relative: Path) -> str:
    """Dotted name of a file under the package."""
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return "reelwire" if parts == ["__init__"] else ".".join(["reelwire", *parts])


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, name: str, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Absolute names that a file imports, anywhere or at its top level only, with their lines."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    parsed = tree(path)
    nodes = at_import(parsed) if top_level else ast.walk(parsed)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            if base != "reelwire":
                yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def at_import(parsed: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no bodies of functions, nothing that only types need."""
    waiting: list[ast.AST] = list(parsed.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))


def place(name: str) -> str:
    """First part below the package: a folder or a file; ``__init__`` for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def ours(path: Path, name: str, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Files and folders of ours that a file imports."""
    for imported, line in imports(path, name, top_level=top_level):
        first, _, rest = imported.partition(".")
        if first == "reelwire":
            known = rest.split(".")[0]
            is_module = (PACKAGE / known).is_dir() or (PACKAGE / f"{known}.py").exists()
            yield (known if known and is_module else "__init__"), line


def outside(path: Path, name: str, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Top-level packages of others that a file imports."""
    for imported, line in imports(path, name, top_level=top_level):
        if imported.split(".")[0] != "reelwire":
            yield imported.split(".")[0], line


def allowed(name: str) -> set[str]:
    """What of ours a file may import."""
    at = place(name)
    file = name.rsplit(".", maxsplit=1)[-1]
    beside = {each for each, files in (("wake", WAKES), ("writing", WRITES.get(at, ()))) if file in files}
    memory = set(MEMORY) if at == "commands" or file in MEMORY_FILES.get(at, set()) else set()
    if at in DOWNWARD:
        return set(DOWNWARD[: DOWNWARD.index(at)])
    if at in {"wake", "writing"}:
        return set()
    if at in MEMORY:
        return {"parts", "tensors", "writing", *MEMORY[: MEMORY.index(at)]}
    if name in DOCTOR:
        return {*DOWNWARD, *FACE, *MEMORY, "__init__", "kernels"}
    if at in FACE:
        reach = {*DOWNWARD, *FACE[: FACE.index(at) + 1], "__init__"} | beside | memory
        return reach | {"broker", "workers"} if at == "commands" else reach
    if at == "broker":
        return {*DOWNWARD, "broker", "__init__"} | beside
    if at == "workers":
        reach = {*DOWNWARD, "workers", "__init__"} | beside | memory
        return reach | {"pipeline"} if file in WORKER_PIPELINE_FILES else reach
    if at == "pipeline":
        return {"pipeline", "kernels", "spec", "job_spec"}
    assert at == "kernels", f"{name}: enter the file in the table of this test, with what it may import"
    return set()


def test_each_file_imports_only_what_the_table_lets_it() -> None:
    """Imports of ours point one way, as the table in ARCHITECTURE.md has it; kernels import nothing of ours."""
    wrong = []
    for path, name in product():
        reach = allowed(name)
        wrong += [f"{name}:{line} imports reelwire.{to}" for to, line in ours(path, name) if to not in reach]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_kernels_do_not_import_each_other_through_the_package() -> None:
    """A kernel is one file: with no ``__init__.py`` in the folder it can be tested alone."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not [name for path, name in product() if place(name) == "kernels" and list(ours(path, name))]


def test_the_broker_and_the_workers_never_import_each_other() -> None:
    """They share messages, not code."""
    for path, name in product():
        forbidden = {"broker": "workers", "workers": "broker"}.get(place(name))
        assert forbidden not in {to for to, _ in ours(path, name)}, name


def test_commands_import_a_daemon_only_inside_their_function() -> None:
    """``reelwire --help`` imports neither a daemon nor a pipeline."""
    for path, name in product():
        if place(name) in FACE:
            loaded = {to for to, _ in ours(path, name, top_level=True)}
            assert not loaded.intersection(LINKED), f"{name} loads {loaded.intersection(LINKED)} when it is imported"


def test_zmq_is_imported_only_by_the_loops_and_the_client() -> None:
    """Sockets are in one file per process."""
    wrong = [
        f"{name}:{line}"
        for path, name in product()
        for package, line in outside(path, name)
        if package in ZMQ
        and place(name) not in SDK_ZMQ_FILES
        and name.split(".")[-1] not in ZMQ_FILES.get(place(name), set())
    ]
    assert not wrong, wrong


def test_clock_and_threads_are_imported_only_where_the_table_says() -> None:
    """Cores, messages, pipelines and kernels have no clock and no threads."""
    wrong = [
        f"{name}:{line} imports {package}"
        for path, name in product()
        for package, line in outside(path, name)
        if package in CLOCK | THREADS
        and (place(name) not in FACE or place(name) in SDK_PURE)
        and name.split(".")[-1] not in CLOCK_FILES.get(place(name), set())
    ]
    assert not wrong, wrong


def test_torch_is_imported_only_by_pipelines_kernels_and_the_runners() -> None:
    """The broker, the SDK and the commands install and start without torch."""
    wrong = [
        f"{name}:{line} imports {package}"
        for path, name in product()
        for package, line in outside(path, name)
        if package in TORCH
        and place(name) not in {"pipeline", "kernels"}
        and name not in DOCTOR
        and not (place(name) == "workers" and name.split(".")[-1] in WORKER_TORCH_FILES)
    ]
    assert not wrong, wrong


def test_triton_is_imported_only_by_kernels() -> None:
    """Model code is arithmetic; what is written for one kind of device stands in kernels."""
    wrong = [
        f"{name}:{line}"
        for path, name in product()
        for package, line in outside(path, name)
        if package in TRITON and place(name) != "kernels"
    ]
    assert not wrong, wrong


def test_cores_import_nothing_that_reaches_the_world() -> None:
    """Events in, actions out: no sockets, files, threads, logging, clock or randomness inside a core."""
    pure = {
        name
        for _, name in product()
        if place(name) in IMPURE and name.rsplit(".", maxsplit=1)[-1] not in IMPURE[place(name)]
    }
    pure |= {f"reelwire.{name}" for name in {*DOWNWARD, *SDK_PURE} - {"media", "controls"}}
    wrong = [
        f"{name}:{line} imports {package}"
        for path, name in product()
        if name in pure
        for package, line in outside(path, name)
        if package in WORLD | CLOCK | THREADS | ZMQ
    ]
    assert not wrong, wrong


def test_nothing_is_pickled() -> None:
    """Nothing that crosses a border or lies on a disk can run code when it is read."""
    wrong = []
    for path, name in product():
        wrong += [f"{name}:{line} imports {package}" for package, line in outside(path, name) if package in PICKLED]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if called == "torch.load" and given.get("weights_only") != "True":
                    wrong.append(f"{name}:{node.lineno} torch.load without weights_only=True")
                if given.get("allow_pickle") == "True":
                    wrong.append(f"{name}:{node.lineno} allow_pickle=True")
    assert not wrong, wrong


def test_nothing_sleeps() -> None:
    """Neither the product nor a test waits for a duration where it could wait for an event."""
    wrong = []
    for path in [path for path, _ in product()] + sources(ROOT / "tests") + sources(ROOT / "scripts"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "asyncio.sleep", "sleep"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in {a.name for a in node.names}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def test_the_four_links_lead_to_the_folders() -> None:
    """The folders stand at the top of the tree and are imported as ``reelwire.broker`` and so on."""
    for name in LINKED:
        link = PACKAGE / name
        assert link.is_symlink(), f"{link} is no link: was the tree checked out without support for links?"
        assert str(link.readlink()) == f"../../{name}"
        assert link.resolve() == ROOT / name


def test_linked_folders_never_become_top_level_packages() -> None:
    """After importing every module there is no ``kernels`` or ``broker`` beside ``reelwire`` in sys.modules."""
    names = [name for _, name in product() if not name.endswith("__main__")]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert (error.name or '').split('.')[0] in {'triton', 'flash_attn'}, (name, error)\n"
        f"print(sorted(set(sys.modules).intersection({LINKED!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=110, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_face_starts_without_torch() -> None:
    """``import reelwire``, the commands and the broker's modules load neither torch nor a pipeline."""
    names = [name for _, name in product() if place(name) in {*DOWNWARD, *FACE, "broker"} and "__main__" not in name]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(sorted(set(sys.modules).intersection({sorted(TORCH | TRITON)!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("table", ["transitions", "job_states"])
def test_the_diagram_in_the_docs_is_printed_from_the_table(table: str) -> None:
    """ARCHITECTURE.md shows the states of a session, and those of a job, as the broker has them."""
    module = importlib.import_module(f"reelwire.broker.{table}")
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    start, end = DIAGRAM[0].format(table), DIAGRAM[1]
    assert start in text
    assert text.split(start)[1].split(end)[0] == module.mermaid()


def test_the_readme_has_a_caption_for_every_file() -> None:
    """Each file of the product stands in the README's tree once, in its folder and with a few words, and no other does."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown: list[str] = []
    folders: list[str] = []
    for line in text.split("```")[-2].splitlines():
        name, _, caption = line.strip().partition(" ")
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        elif name.endswith(".py") and folders:
            assert caption.strip(), line
            shown.append("".join((*folders, name)))
    kept = {"src/reelwire/__init__.py", *(f"{name}/" for name in LINKED), "src/reelwire/"}
    files = {path.relative_to(ROOT).as_posix() for path, _ in product()}
    files = {name for name in files if not name.endswith("__init__.py") or name in kept}
    assert sorted(name for name in shown if name.startswith(tuple(kept))) == sorted(files)


def test_tests_have_no_init_files() -> None:
    """Tests are imported by path, so two folders may hold a file of one name only if no package joins them."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_are_small() -> None:
    """No file of the product, the tests or the scripts is longer than 500 lines, and half of them have 200 or less."""
    paths = [path for path, _ in product()] + sources(ROOT / "tests") + sources(ROOT / "scripts")
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    counted = {path.relative_to(ROOT).as_posix(): count for path, count in lines.items()}
    long = {name: count for name, count in counted.items() if count > FILE_LINES_MAX}
    assert not long, f"longer than {FILE_LINES_MAX} lines: {long}"
    written = [count for count in lines.values() if count]
    assert statistics.median(written) <= FILE_LINES_MEDIAN_MAX


def test_functions_are_short() -> None:
    """No function is longer than 70 lines; kernels are excepted, whose bodies are one formula."""
    long = []
    for path, name in product():
        if place(name) == "kernels":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > FUNCTION_LINES_MAX:
                    long.append(f"{name}.{node.name}: {count} lines")
    assert not long, long


def test_no_machine_stands_in_the_tree() -> None:
    """No absolute path of somebody's machine is written down in a tracked text file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    mine = Path(__file__).resolve()
    homes = (f"{ROOT}/", "/home/", "/root/", "/Users/")
    for entry in listed.stdout.split(b"\0"):
        path = ROOT / entry.decode()
        if not entry or path.is_symlink() or not path.is_file() or path == mine:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert not [home for home in homes if home in text], path.relative_to(ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel, built from a copy of the tree by the installed setuptools: no network, no build folder left behind."""
    copy = tmp_path_factory.mktemp("a tree with blanks") / "reelwire"
    left_out = shutil.ignore_patterns(*SKIPPED, "*.egg-info", ".*_cache", "tests", "docs", "examples", "benchmarks")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    out = copy.parent / "out"
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(copy)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("reelwire-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_four_packages_and_the_assets(wheel: zipfile.ZipFile) -> None:
    """Every module of the tree is in the wheel, with the type marker and the assets; nothing is beside ``reelwire``."""
    held = set(wheel.namelist())
    for path, name in product():
        inside = name.replace(".", "/")
        assert held.intersection({f"{inside}.py", f"{inside}/__init__.py"}), f"{path} is not in the wheel"
    assert "reelwire/py.typed" in held
    for asset in (PACKAGE / "assets").iterdir():
        assert f"reelwire/assets/{asset.name}" in held
    tops = {entry.split("/")[0] for entry in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"reelwire"}


def test_the_wheel_carries_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    """Licence and notices travel with the package, and the console script points at our own entry."""
    held = wheel.namelist()
    assert [entry for entry in held if entry.endswith("licenses/LICENSE")]
    assert [entry for entry in held if entry.endswith("licenses/NOTICE")]
    (script,) = [entry for entry in held if entry.endswith("entry_points.txt")]
    assert "reelwire = reelwire.cli:main" in wheel.read(script).decode()
