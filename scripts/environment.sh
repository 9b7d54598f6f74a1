# Sourced by demo, test and check: one virtual environment, installed only when what it depends on has changed.
#
#   PYTHON              the interpreter that makes .venv (3.11 or later)
#   REELWIRE_VENV       another place than .venv beside this folder
#   REELWIRE_TORCH      another torch than the pinned one, as pip writes it: "torch==2.11.0"
#   REELWIRE_PIP_ARGS   more options for pip, separated by blanks: an index, a folder of wheels
#
# A torch that is in the environment already is kept when it is recent enough. Needs: bash, coreutils, Python.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${REELWIRE_VENV:-$ROOT/.venv}"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    # 3.11 first: constraints.txt was written with it.
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
        if [ -n "${PYTHON:-}" ] && [ "$candidate" = "$PYTHON" ]; then
            say "PYTHON: $PYTHON is no Python 3.11 or later"
            return 1
        fi
    done
    say "no Python 3.11 or later was found: install one, or name it in PYTHON"
    return 1
}

make_venv() {
    [ -x "$VENV/bin/python" ] && return 0
    local python
    python="$(find_python)" || return 1
    say "making $VENV with $python"
    if ! "$python" -m venv "$VENV" >&2; then
        rm -rf "$VENV"
        say "$python could not make a virtual environment; on Debian and Ubuntu the package python3-venv is needed"
        return 1
    fi
}

# Prints the constraints that hold here, without those on torch when the user's own torch is to be kept.
constraints() {
    if [ -n "${REELWIRE_TORCH:-}" ] || "$VENV/bin/python" - <<'PYTHON' 2>/dev/null; then
import sys
from importlib.metadata import version
release = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
sys.exit(release < (2, 11))
PYTHON
        grep -v -E '^(torch|triton)==' "$ROOT/constraints.txt"
    else
        cat "$ROOT/constraints.txt"
    fi
}

# install EXTRAS: the package, editable, with these extras ("worker" or "worker,dev").
install() {
    local extras="$1" stamp="$VENV/reelwire-$1.stamp" wanted limits status
    make_venv || return 1
    wanted="$({
        printf '%s\n' "$ROOT" "${REELWIRE_TORCH:-}" "${REELWIRE_PIP_ARGS:-}"
        cat "$ROOT/pyproject.toml" "$ROOT/setup.cfg" "$ROOT/constraints.txt"
    } | sha256sum)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    say "installing reelwire[$extras]; the first time this takes minutes, and some GB where torch comes with CUDA"
    limits="$(mktemp)" || return 1
    constraints >"$limits"
    status=0
    # shellcheck disable=SC2086  # REELWIRE_PIP_ARGS is a list of options
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check ${REELWIRE_PIP_ARGS:-} -c "$limits" \
        -e "$ROOT[$extras]" ${REELWIRE_TORCH:+"$REELWIRE_TORCH"} >&2 || status=$?
    rm -f "$limits"
    if [ "$status" -ne 0 ]; then
        say "pip could not install reelwire[$extras] (exit code $status); what it printed is above"
        return 1
    fi
    printf '%s\n' "$wanted" >"$stamp"
    if [ "$extras" = "worker,dev" ]; then printf '%s\n' "$wanted" >"$VENV/reelwire-worker.stamp"; fi
}
