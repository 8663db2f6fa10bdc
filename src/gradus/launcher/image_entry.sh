#!/bin/sh
# The first program in a container: starts what follows, a Python command line, with the image's Python or with the one
# outside of it.     image_entry.sh image|environment PYTHON [ARGUMENT...]
trap '' TERM USR1  # a runtime that passes signals on must not end the ranks: a stop is a request in the run's folder
mode=$1; shift
here=${0%/*}
if [ ! -d "$HOME" ] || [ ! -w "$HOME" ]; then  # caches of compilers go there
  HOME=$here/home; export HOME
fi
if [ "$mode" = environment ]; then
  "$1" -c '' || {
    echo "gradus: $1 does not start in the image: another C library, or a folder that is not bound" >&2
    exit 93
  }
  exec "$@"
fi
shift  # the interpreter outside
unset PYTHONHOME VIRTUAL_ENV
for python in python3 python; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" "$here/image_entry.py" "$@"; fi
done
echo "gradus: the image has no Python (looked for python3 in $PATH). Take an image with torch, or container.python: environment" >&2
exit 93
