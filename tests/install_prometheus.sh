#!/bin/sh
# A real Prometheus for the tests of what it scrapes, from Debian. As root, it is installed if it is missing, or this
# fails; without root, nothing is done, and those tests are skipped with the reason.
set -eu

if { command -v prometheus && command -v promtool; } >/dev/null || [ "$(id -u)" != 0 ]; then
  exit 0
fi

# The tests start their own: Debian's must not start when its package is installed.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod 755 $policy
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus
