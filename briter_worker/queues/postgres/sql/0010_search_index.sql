-- Concurrently: nodes record receipts while the index is made. An upgrade that was interrupted leaves a part of
-- it. Without fastupdate, no receipt has to wait for the words of thousands before.
DROP INDEX CONCURRENTLY IF EXISTS attempts_words;
CREATE INDEX CONCURRENTLY attempts_words ON attempts USING gin (search_words(
    site,
    slug || ' ' || title || ' ' || author || ' ' || COALESCE(error, '') || ' ' || COALESCE(commit, ''),
    COALESCE(failure, '')
)) WITH (fastupdate = off) WHERE outcome IS NOT NULL;
