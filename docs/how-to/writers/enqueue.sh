#!/bin/sh
# Enqueue a post: enqueue.sh QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]
# Any POSIX shell, no jq.
set -eu
case $# in
  4 | 6 | 7) ;;
  *)
    echo "usage: enqueue.sh QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]" >&2
    exit 1
    ;;
esac
queue=$1 slug=$2 path=$3 message=$4

tab=$(printf '\t') return=$(printf '\r')
# json TEXT: the text as a JSON string.
json() {
  printf '%s\n' "$1" |
    sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e "s/$tab/\\\\t/g" -e "s/$return/\\\\r/g" |
    awk 'BEGIN { printf "\"" } { printf "%s%s", (NR > 1 ? "\\n" : ""), $0 } END { printf "\"" }'
}

more=
[ $# -lt 6 ] || more=", \"author\": {\"name\": $(json "$5"), \"email\": $(json "$6")}"
[ $# -lt 7 ] || more="$more, \"scheduledFor\": $(json "$7")"
mkdir -p "$queue"
aside=$(mktemp "$queue/.job-XXXXXXXXXX")
chmod 0644 "$aside" # mktemp hides it from everybody else, the worker's user included
id=${aside##*/.}
printf '{"id": "%s", "slug": %s, "paths": [%s], "message": %s%s}\n' \
  "$id" "$(json "$slug")" "$(json "$path")" "$(json "$message")" "$more" >"$aside"
# Without `createdAt` the file's own time orders two saves, and that is finer than `date` is everywhere.
# Written aside, then renamed: the worker never sees half a file.
mv "$aside" "$queue/$id.json"
echo "$id"
