"""The history's file: its tables."""

from __future__ import annotations

from briter_worker.sinks.sqlite import Schema

_TABLES = """
-- One drain: what its attempts share.
CREATE TABLE IF NOT EXISTS drains (
  id INTEGER PRIMARY KEY,
  began REAL NOT NULL,
  phase TEXT NOT NULL,
  done INTEGER NOT NULL DEFAULT 0,
  total INTEGER NOT NULL DEFAULT 0,
  -- [[phase, began, ended or null], ...] in order
  phases TEXT NOT NULL
) STRICT;

-- One attempt; a receipt once it has an outcome.
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  drain INTEGER REFERENCES drains (id),
  job_id TEXT NOT NULL,
  slug TEXT NOT NULL,
  title TEXT NOT NULL DEFAULT '',
  attempt INTEGER NOT NULL DEFAULT 0,
  saved_at REAL,
  due_at REAL,
  began REAL,
  ended REAL,
  outcome TEXT,
  duration_ms INTEGER,
  "commit" TEXT,
  branch TEXT,
  remote TEXT,
  dry_run INTEGER NOT NULL DEFAULT 0,
  href TEXT,
  error TEXT,
  failure TEXT,
  retry_at REAL,
  rejected_paths TEXT NOT NULL DEFAULT '[]',
  superseded_by TEXT,
  stale INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_open ON attempts (job_id) WHERE outcome IS NULL;
CREATE INDEX IF NOT EXISTS attempts_by_slug ON attempts (slug, id);
CREATE INDEX IF NOT EXISTS attempts_by_job ON attempts (job_id, id);
CREATE INDEX IF NOT EXISTS attempts_by_outcome ON attempts (outcome, id);
CREATE INDEX IF NOT EXISTS attempts_by_end ON attempts (stale, ended);

-- Everything that happened lately, in order: the live stream.
CREATE TABLE IF NOT EXISTS moments (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  event TEXT NOT NULL,
  data TEXT NOT NULL
) STRICT;
"""

SCHEMA = Schema(1, _TABLES)
