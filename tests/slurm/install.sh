#!/bin/sh
# What tests with a real scheduler need, from Debian. As root, what is missing is installed, or this fails; without
# root, nothing is done, and those tests are skipped with the reason.
set -eu

missing=
for package in slurm-wlm munge libpmix-dev openmpi-bin charliecloud lmod; do
  # libpmix-dev: Slurm's pmix plugin opens libpmix.so, a name that only the -dev package has.
  case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) in
    installed) ;;
    *) missing="$missing $package" ;;
  esac
done
if [ -z "$missing" ] || [ "$(id -u)" != 0 ]; then
  exit 0
fi

# The lab has daemons of its own: Debian's must not start when their packages are installed.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' > $policy
  chmod 755 $policy
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing
