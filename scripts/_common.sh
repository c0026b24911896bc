# Sourced by the other scripts: where the project is, how to speak, and one Python environment for all.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
  bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' blue=$'\e[36m' red=$'\e[31m' plain=$'\e[0m'
else
  bold='' dim='' green='' blue='' red='' plain=''
fi

step() { printf '%s==>%s %s%s%s\n' "$blue" "$plain" "$bold" "$*" "$plain"; }
note() { printf '    %s%s%s\n' "$dim" "$*" "$plain"; }

# die MESSAGE: what is wrong and what to do about it, on one line.
die() {
  printf '%serror:%s %s\n' "$red" "$plain" "$*" >&2
  exit 1
}

# find_python: the first Python on this machine that is new enough.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die 'Python 3.11 or newer is missing: apt-get install python3.11 python3.11-venv (or set PYTHON=/path/to/python)'
}

# pip_install ARGUMENTS: quiet while it works, everything it said when it does not.
pip_install() {
  local said
  if ! said=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --constraint "$root/constraints.txt" "$@" 2>&1); then
    printf '%s\n' "$said" >&2
    die 'pip could not install what constraints.txt pins; is the package index reachable?'
  fi
}

# ensure_venv runtime|cluster|dev: .venv holds what pyproject.toml and constraints.txt say; `cluster` is the
# runtime with what speaks to Postgres. Does nothing when it already does; never takes anything away.
ensure_venv() {
  local want=$1 stamp=$venv/.briter-setup print have
  command -v git >/dev/null || die 'git is missing: apt-get install git'
  # Two scripts at once: the second one waits, then finds the work done.
  if command -v flock >/dev/null; then
    exec 9<"$root/pyproject.toml"
    flock 9
  fi
  print=$({ printf '%s\n' "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | git hash-object --stdin)
  have=$(cat "$stamp" 2>/dev/null || true)
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    if [ "$have" = "$print dev" ] || [ "$have" = "$print $want" ] ||
      { [ "$want" = runtime ] && [ "$have" = "$print cluster" ]; }; then
      exec 9<&-
      return
    fi
    # Added to, never taken away from: `dev` stays `dev`.
    case $have in
      *' dev') want=dev ;;
      *' cluster') [ "$want" = dev ] || want=cluster ;;
    esac
  fi
  local python
  python=$(find_python)
  step "Preparing .venv ($want), once"
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null || [ "$(cat "$venv/.briter-root" 2>/dev/null || echo "$root")" != "$root" ]; then
    rm -rf "$venv"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      die 'python3-venv is missing: apt-get install python3-venv'
    "$python" -m venv "$venv" || die 'python3-venv is missing: apt-get install python3-venv'
  fi
  printf '%s\n' "$root" >"$venv/.briter-root"
  rm -f "$stamp"
  local project=$root
  case $want in
    cluster) project="$root[postgres]" ;;
    dev) project="$root[dev,docs,web,webhooks,metrics,postgres]" ;;
  esac
  # The build backend is pinned like all else: it is installed first, and pip builds with it.
  pip_install hatchling editables
  pip_install --no-build-isolation --editable "$project"
  printf '%s\n' "$print $want" >"$stamp"
  exec 9<&-
}
