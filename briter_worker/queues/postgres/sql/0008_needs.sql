-- The lowest schema version that a program has to know to work with the database from this migration on.
-- A migration that an earlier program would misread raises the number; one that only adds leaves it.
ALTER TABLE migrations ADD COLUMN needs integer NOT NULL DEFAULT 0;
