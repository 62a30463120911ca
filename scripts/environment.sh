# Sourced by quickstart.sh and test.sh: makes .venv, installs the locked packages, builds the extension; does nothing that is already done.
# Use: source scripts/environment.sh requirements/lock.txt
lock=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "terapipe needs Python 3.11 to 3.13, $python is $("$python" --version 2>&1); name another one: PYTHON=python3.12 bash $0" >&2
  exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# A stamp holds what was installed last: the lock files and everything the extension is built from.
fingerprint=$(cat requirements/*.txt pyproject.toml setup.py CMakeLists.txt $(git ls-files -co --exclude-standard csrc 2>/dev/null | sort || find csrc -type f | sort) | sha256sum | cut -d' ' -f1)
stamp=.venv/terapipe-$(basename "$lock" .txt)
if [ "$(cat "$stamp" 2>/dev/null)" != "$fingerprint" ]; then
  echo "terapipe: installing $lock and building the extension into .venv"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$lock"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
  echo "$fingerprint" > "$stamp"
fi
