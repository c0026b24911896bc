-- What a search compares: a word of the texts, after the site's identity, begins with a word of the search.
-- Separators are ASCII and blocks of Unicode, so that a database in the locale C finds letters, too; Japanese and
-- Chinese have no spaces, and each character is a word. Longer words than 100 characters do not fit an index.
CREATE FUNCTION search_words(site text, texts text, failure text) RETURNS tsvector
LANGUAGE sql IMMUTABLE PARALLEL SAFE COST 1000 AS $$
    SELECT array_to_tsvector(array_agg(DISTINCT lower(site || '/' || left(word, 100)))
        || CASE WHEN failure = '' THEN '{}' ELSE ARRAY[lower(site || '/!' || failure)] END)
    FROM regexp_split_to_table(
        regexp_replace(left(texts, 4000), '([\u3040-\u30ff\u3400-\u9fff])', ' \1 ', 'g'),
        '[\u0001-\u002f\u003a-\u0040\u005b-\u0060\u007b-\u00bf\u2000-\u206f\u3000-\u303f]+'
    ) AS word
    WHERE word <> ''
$$;
