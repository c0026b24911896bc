-- The webhook outbox of one site in SQLite. Postgres has the same tables: queues/postgres/sql.

-- Messages that are not received yet. Addresses hold secrets. `lease`: the sender that is sending it.
CREATE TABLE IF NOT EXISTS messages (
  id INTEGER PRIMARY KEY AUTOINCREMENT, message TEXT NOT NULL, url TEXT NOT NULL,
  build INTEGER NOT NULL DEFAULT 0, content_type TEXT NOT NULL DEFAULT '', body TEXT NOT NULL DEFAULT '',
  created REAL NOT NULL, due REAL NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, lease TEXT,
  error TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX IF NOT EXISTS messages_by_due ON messages (due, id);
CREATE INDEX IF NOT EXISTS messages_by_url ON messages (url, id);

-- When each build hook was last called.
CREATE TABLE IF NOT EXISTS builds (url TEXT PRIMARY KEY, called REAL NOT NULL) STRICT;
