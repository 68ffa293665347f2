#!/usr/bin/env bash
# Installs Chromium from the system's packages, which the tests of report pages open (tests/unit/reports). Immediate where
# there is one. Ends with 1 where none can be had: those tests are skipped then, and the end of `make test` names them.
set -uo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi
apt=(timeout 300 "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=1
  -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=60)
if "${apt[@]}" update && "${apt[@]}" install -y chromium; then exit 0; fi
echo "There is no Chromium, and apt-get could not install it. Install it as your system does; the tests of report pages" \
  "look for chromium, chromium-browser or google-chrome." >&2
exit 1
