-- oldest: 1
-- What the CMS's copy of a path started from, for merging its next save with what others did to it meanwhile.
-- A null blob: there was nothing.

CREATE TABLE starts (
    site text NOT NULL REFERENCES sites (name),
    path bytea NOT NULL,
    start text,
    -- After a conflict: both versions. The same content of ours conflicts again; any other is the answer to theirs.
    is_conflict boolean NOT NULL DEFAULT false,
    ours text,
    theirs text,
    PRIMARY KEY (site, path)
);

-- Contents of starts that are on no remote, as they were merged on their way there.
CREATE TABLE start_contents (
    site text NOT NULL REFERENCES sites (name),
    blob text NOT NULL,
    bytes bytea NOT NULL,
    PRIMARY KEY (site, blob)
);
CREATE INDEX starts_blob ON starts (site, start);
