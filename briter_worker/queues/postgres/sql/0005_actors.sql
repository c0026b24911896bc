-- Who added or changed the site last.
ALTER TABLE sites ADD COLUMN changed_by text NOT NULL DEFAULT '';
