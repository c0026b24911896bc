-- Tokens of the API: each opens some sites for some kinds of request. Of the token itself, only a digest is here.
CREATE TABLE tokens (
    name text PRIMARY KEY,
    digest bytea NOT NULL UNIQUE,
    sites text[] NOT NULL,
    rights text[] NOT NULL,
    created_at double precision NOT NULL DEFAULT extract(epoch FROM clock_timestamp()),
    created_by text NOT NULL
);
