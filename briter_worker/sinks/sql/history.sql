-- The history of one site in SQLite. Postgres has the same tables: queues/postgres/sql.

-- One drain: what its attempts share. Phases: [[phase, began, ended or null], ...] in order.
CREATE TABLE IF NOT EXISTS drains (
  id INTEGER PRIMARY KEY, began REAL NOT NULL, phase TEXT NOT NULL, done INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL DEFAULT 0, phases TEXT NOT NULL
) STRICT;

-- One attempt; a receipt once it has an outcome.
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY AUTOINCREMENT, site TEXT NOT NULL DEFAULT '', drain INTEGER,
  job_id TEXT NOT NULL, slug TEXT NOT NULL,
  title TEXT NOT NULL DEFAULT '', author TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0, saved_at REAL, due_at REAL,
  began REAL, ended REAL, outcome TEXT, duration_ms INTEGER, "commit" TEXT, branch TEXT, remote TEXT,
  dry_run INTEGER NOT NULL DEFAULT 0, href TEXT, error TEXT, failure TEXT, fix TEXT, retry_at REAL,
  rejected_paths TEXT NOT NULL DEFAULT '[]', superseded_by TEXT, changes TEXT NOT NULL DEFAULT '[]',
  files_changed INTEGER NOT NULL DEFAULT 0, signed_with TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_open ON attempts (job_id) WHERE outcome IS NULL;
CREATE INDEX IF NOT EXISTS attempts_by_slug ON attempts (slug, id);
CREATE INDEX IF NOT EXISTS attempts_by_job ON attempts (job_id, id);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome, id);
CREATE INDEX IF NOT EXISTS attempts_by_end ON attempts (ended);

-- The live stream: events of the last days, in order.
CREATE TABLE IF NOT EXISTS moments (
  id INTEGER PRIMARY KEY AUTOINCREMENT, site TEXT NOT NULL DEFAULT '', at REAL NOT NULL,
  event TEXT NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS moments_by_time ON moments (at);

-- Counters that only grow, for the metrics.
CREATE TABLE IF NOT EXISTS tallies (
  site TEXT NOT NULL, kind TEXT NOT NULL, outcome TEXT NOT NULL, number INTEGER NOT NULL,
  waits INTEGER NOT NULL DEFAULT 0, waited REAL NOT NULL DEFAULT 0, PRIMARY KEY (site, kind, outcome)
) STRICT;

-- What saves declared that ended unpublished: a path that one of them knew is not missing. Not in Postgres,
-- where jobs carry their contents.
CREATE TABLE IF NOT EXISTS declared (
  slug TEXT NOT NULL, path TEXT NOT NULL, job_id TEXT NOT NULL, saved_at REAL NOT NULL, at REAL NOT NULL,
  PRIMARY KEY (slug, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS declared_by_time ON declared (at);

-- The site condition; without a failure, the last one has ended.
CREATE TABLE IF NOT EXISTS conditions (
  site TEXT PRIMARY KEY, failure TEXT, condition TEXT, fix TEXT NOT NULL DEFAULT '', changed_at REAL NOT NULL
) STRICT;
