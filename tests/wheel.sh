#!/usr/bin/env bash
# Builds the wheel, installs it alone into a fresh environment of the given
# Python (default: the one that builds) and runs the library's tests there,
# from another folder. Usage: wheel.sh BUILD_PYTHON [TEST_PYTHON]
set -euo pipefail
build_python=$1
test_python=${2:-$1}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$build_python" -m build --wheel --outdir "$work" "$root" >"$work/build.log" 2>&1 ||
  { cat "$work/build.log"; exit 1; }
"$test_python" -m venv "$work/venv"
python="$work/venv/bin/python"
"$python" -m pip install --quiet "$work"/*.whl 'pytest>=8.3' 'pytest-xdist>=3.6'
cp -r "$root/tests/sr_optax" "$work/tests"
cd "$work"
"$python" -c 'import sr_optax, sys, jax; print(f"wheel under Python {sys.version.split()[0]}, jax {jax.__version__}")'
if "$python" -c 'import train' 2>/dev/null; then
  echo 'error: the wheel must not contain train' >&2
  exit 1
fi
"$python" -m pytest tests -q -p no:cacheprovider --import-mode=importlib \
  -c /dev/null --rootdir "$work" -n auto --dist loadfile \
  -m 'not slow and not gpu'
