-- Who a site is: the key of its history. A site that is added again under the name of a removed one is
-- another site, perhaps somebody else's, and sees nothing of the former one. No name contains an @.
ALTER TABLE sites ADD COLUMN identity text;
UPDATE sites SET identity = name;
ALTER TABLE sites ALTER COLUMN identity SET NOT NULL;
CREATE UNIQUE INDEX sites_identity ON sites (identity);

-- In the database, so that it holds for programs of earlier versions, too.
CREATE FUNCTION identify_site() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' AND NEW.identity IS NULL THEN
        NEW.identity := NEW.name;
    ELSIF TG_OP = 'UPDATE' THEN
        NEW.identity := NEW.name || '@' || gen_random_uuid();
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER sites_inserted BEFORE INSERT ON sites FOR EACH ROW EXECUTE FUNCTION identify_site();
CREATE TRIGGER sites_added_again BEFORE UPDATE OF removed ON sites FOR EACH ROW
    WHEN (OLD.removed AND NOT NEW.removed) EXECUTE FUNCTION identify_site();

-- What was recorded before a site was added is the history of a removed one of its name.
UPDATE attempts h SET site = s.name || '@former' FROM sites s
WHERE h.site = s.name AND NOT s.removed AND coalesce(h.ended, h.began) < s.created_at;
UPDATE moments h SET site = s.name || '@former' FROM sites s
WHERE h.site = s.name AND NOT s.removed AND h.at < s.created_at;
DELETE FROM conditions h USING sites s
WHERE h.site = s.name AND NOT s.removed AND h.changed_at < s.created_at;
