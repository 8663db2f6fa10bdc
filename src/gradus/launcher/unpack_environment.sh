#!/bin/bash
# Unpacks an environment to this node's own disk, once, however many jobs want it at the same time.
#     unpack_environment.sh ARCHIVE TARGET OLD_PREFIX
# It stays for the next attempt or job, which then starts at once. Others of this user go when they have not been started
# from for a day and no process runs from them; a day, since a job between two attempts has no process for some seconds.
set -euo pipefail
archive=$1 target=$2 old=$3
folder=${target%/*}
fail() { echo "gradus: on ${SLURMD_NODENAME:-$HOSTNAME}: the environment cannot be unpacked: $*" >&2; exit 93; }

umask 077
mkdir -p "$folder" || fail "no folder $folder"
[ -O "$folder" ] || fail "$folder belongs to somebody else"
exec 9> "$target.lock"
flock 9
if [ -e "$target/.used" ]; then touch "$target/.used"; exit 0; fi

for other in "$folder"/environment-*/; do
  other=${other%/}
  [ -n "$(find "$other/.used" -mmin +1440 2>/dev/null)" ] || continue
  readlink /proc/[0-9]*/exe 2>/dev/null | grep -qF "$other/" && continue
  rm -rf "$other" "$other.lock"
done

work=$folder/.unpacking-${target##*/}  # whatever a killed job left there is done over, under the lock
rm -rf "$work"
mkdir "$work"
case $archive in
  *.zst) command -v zstd >/dev/null || fail "zstd is not installed here; with environment.pack: tar it is not needed"
         zstd -dc "$archive" | tar -x --no-same-owner -f - -C "$work" || fail "see above" ;;
  *)     tar -x --no-same-owner -f "$archive" -C "$work" || fail "see above" ;;
esac

if [ -d "$work/base" ]; then  # the interpreter came along
  while IFS= read -r line; do
    case $line in
      home\ *|home=*) printf 'home = %s/base/bin\n' "$target" ;;
      executable*|command*) ;;
      *) printf '%s\n' "$line" ;;
    esac
  done < "$work/env/pyvenv.cfg" > "$work/pyvenv.cfg"
  mv "$work/pyvenv.cfg" "$work/env/pyvenv.cfg"
  # An interpreter that is one with a shared library looks for it where it was installed. By itself in a folder, it can
  # be put before that without putting anything else before the system's libraries.
  for library in "$work"/base/lib/libpython3*.so*; do
    [ -e "$library" ] && mkdir -p "$work/library" && ln -s "../base/lib/${library##*/}" "$work/library/"
  done
fi
for file in "$work"/env/bin/*; do  # programs name their interpreter in the first line
  [ -f "$file" ] && [ ! -L "$file" ] && [ "$(head -c 2 "$file" | tr -d '\0')" = '#!' ] || continue
  IFS= read -r first < "$file" || continue
  case $first in "#!$old/bin/"*)
    { printf '#!%s\n' "$target/env/bin/${first#"#!$old/bin/"}"; tail -n +2 "$file"; } > "$work/program"
    chmod 700 "$work/program"
    mv "$work/program" "$file" ;;
  esac
done
touch "$work/.used"
mv -T "$work" "$target"
