-- When to look next for edits of others on the remote. Null: with the interval, at once; without one, never.
ALTER TABLE sites ADD COLUMN pull_at double precision;
