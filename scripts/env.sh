#!/usr/bin/env bash
# Runs a command in this repository's own environment and makes that environment when it is missing.
#
#     bash scripts/env.sh python scripts/train.py configs/tiny_cpu_deepseek_v3.yaml
#     bash scripts/env.sh pytest
#
# Policy.
#   .venv holds the packages of .ci/constraints.txt, checked by hash, and this project as an editable
#   install, with the CUDA library where a toolkit is here (MOK_CUDA and CUDA_HOME: csrc/build_backend.py).
#   Two marks inside .venv, each written last, say what it was made from. Another list of packages,
#   another place or no mark (a start that was interrupted): .venv is made anew. Other sources of the
#   library or another toolkit: only the project is installed again. Otherwise nothing is done.
#   One start prepares at a time; the lock belongs to a file descriptor and ends with its process.
#   The command runs in the caller's folder and gets standard output and the exit code for itself.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

say() { echo "mok: $*" >&2; }
stop() {
  say "$*"
  exit 1
}

usage() {
  echo "usage: bash scripts/env.sh COMMAND [ARGUMENT ...]"
  echo "Runs COMMAND in the environment $venv, which is made first where it is missing."
}

digest() { # of standard input
  if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d ' ' -f 1
}

packages_mark() { # what the packages depend on
  { echo "$venv"; cat "$root/.ci/constraints.txt"; } | digest
}

project_mark() { # what the installed project depends on
  local nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
  {
    echo "${MOK_CUDA:-} ${CUDA_HOME:-} $(ls -lL "$nvcc" 2>/dev/null || echo 'no toolkit')"
    cat "$root/pyproject.toml"
    (
      cd "$root"
      find csrc -type f ! -path '*/__pycache__/*' | LC_ALL=C sort |
        while IFS= read -r file; do echo "$file" && cat "$file"; done
    )
  } | digest
}

ready() { # is the mark in .venv the one that this tree asks for?
  [ -x "$venv/bin/python" ] && [ "$(cat "$venv/$1.mark" 2>/dev/null)" = "$2" ]
}

mark() {
  echo "$2" >"$venv/$1.mark.new"
  mv "$venv/$1.mark.new" "$venv/$1.mark"
}

fits() { # can this interpreter carry the environment?
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1 </dev/null
}

find_python() { # prints a Python 3.12 or 3.13, 3.12 first
  local version name path
  for version in 3.12 3.13; do
    {
      for name in "python$version" python3 python; do type -aP "$name" || true; done
      printf '%s\n' "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python3
      printf '%s\n' {/usr,/usr/local,/opt/homebrew}/bin/"python$version" /opt/python*"$version"*/bin/python3
      if command -v uv >/dev/null; then uv python find --no-project --no-python-downloads "$version" || true; fi
    } 2>/dev/null | while IFS= read -r path; do
      if [ -x "$path" ] && fits "$path" &&
        "$path" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"; then
        echo "$path"
        break
      fi
    done
  done | sed -n 1p
}

install_packages() {
  local python
  python=$(find_python)
  [ -n "$python" ] || stop "needs Python 3.12 or 3.13 with its venv module, got none on PATH," \
    "in pyenv or known to uv; install one (Debian: python3.12-venv)"
  lock "$python"
  if ready packages "$packages"; then return; fi
  say "making .venv with $("$python" --version) (once; about 3 GB of packages)"
  rm -rf "$venv"
  "$python" -m venv "$venv" >&2 || stop "making .venv failed; see the lines above"
  local list=(--no-deps --require-hashes -r "$root/.ci/constraints.txt")
  if ! { uv --version >/dev/null 2>&1 && uv pip install --compile-bytecode --python "$venv/bin/python" "${list[@]}" >&2; }; then
    # no uv here, or one that does not get through where pip may
    "$venv/bin/python" -m pip install --progress-bar off "${list[@]}" >&2 ||
      stop "installing the packages of .ci/constraints.txt failed; see the lines above and start again"
  fi
  mark packages "$packages"
}

install_project() {
  lock "$venv/bin/python"
  if ready project "$project"; then return; fi
  say "installing the project into .venv (again only when csrc, pyproject.toml or the toolkit changes)"
  rm -f "$venv/project.mark"
  local log=$venv/project.log
  if ! "$venv/bin/python" -m pip install --no-index --no-deps --no-build-isolation \
    --disable-pip-version-check -e "$root" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    stop "$(sed -n 's/^.*mok: //p' "$log" | tail -n 1 | grep . || echo 'installing the project failed; see the lines above')"
  fi
  mark project "$project"
}

locked=
lock() { # flock(2) on descriptor 9, which this shell keeps; Python because flock(1) is not everywhere
  if [ -n "$locked" ]; then return; fi
  exec 9>"$root/.venv.lock" || stop "must be able to write to $root; use a copy that is yours"
  if ! "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
    say "another start is preparing .venv; waiting for it"
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  fi
  locked=yes
}

case ${1:-} in
"" | -h | --help)
  usage
  if [ $# -eq 0 ]; then exit 2; else exit 0; fi
  ;;
esac

unset PYTHONHOME
packages=$(packages_mark)
ready packages "$packages" || install_packages
project=$(project_mark)
ready project "$project" || install_project
if [ -n "$locked" ]; then exec 9>&-; fi

export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
exec "$@"
