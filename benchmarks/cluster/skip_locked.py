"""Publications as rows of a table, by `FOR UPDATE SKIP LOCKED` and nothing else: no retry, reason, fence.

skip_locked.py CONNINFO CLONES SHARE OF MOST: takes up to MOST rows at once until it is told to stop. With
CLONES, a folder with a clone of each site, it takes only its SHARE `OF` so many of the sites: else two would
push to one. Empty: a publication does nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psycopg

from benchmarks.cluster.pushing import push

TABLE = """
CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    site text NOT NULL, share int NOT NULL, path text NOT NULL, content bytea NOT NULL, message text NOT NULL
)
"""
PUT = "INSERT INTO jobs (site, share, path, content, message) VALUES (%s, %s, %s, %s, %s)"
_ANY = """
SELECT id, site, path, content, message FROM jobs ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
_SHARE = """
SELECT id, site, path, content, message FROM jobs WHERE share %% %s = %s
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""


def main() -> None:
    """Until a signal."""
    conninfo, clones, share, of, most = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    with psycopg.connect(conninfo) as connection:
        while True:
            with connection.transaction():
                if clones:
                    taken = connection.execute(_SHARE, (int(of), int(share), int(most))).fetchall()
                else:
                    taken = connection.execute(_ANY, (int(most),)).fetchall()
                for _, site, path, content, message in taken:
                    if clones:
                        push(Path(clones) / site, path, content, message)
                if taken:
                    connection.execute("DELETE FROM jobs WHERE id = ANY(%s)", ([row[0] for row in taken],))
            if not taken:
                time.sleep(0.01)


if __name__ == "__main__":
    main()
