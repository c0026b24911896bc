-- When the last save of the site arrived, by this server's clock: arrival orders the saves of a post.
ALTER TABLE sites ADD COLUMN last_save double precision NOT NULL DEFAULT 0;
-- The last drain timed out or crawled: the next one has a lane of its own.
ALTER TABLE sites ADD COLUMN slow boolean NOT NULL DEFAULT false;
-- The remote's tip after the last push: commits of ours beyond it show that a backup was restored.
ALTER TABLE sites ADD COLUMN pushed_tip text;
-- The commit that was found there: earlier saves of the path are outdated.
ALTER TABLE published ADD COLUMN outdated_by text;

-- What each running node says of itself, in JSON.
CREATE TABLE nodes (
    name text PRIMARY KEY,
    seen_at double precision NOT NULL,
    facts jsonb NOT NULL
);
