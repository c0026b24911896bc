-- Sites' numbers that were accepted as 30.0, in text or as a number, are whole numbers from now on.
UPDATE sites SET settings = (
    SELECT jsonb_object_agg(key, CASE
        WHEN key IN ('gitTimeoutMs', 'workerQuietMs', 'workerQuietMaxMs', 'workerMaxAttempts',
            'workerBackoffMs', 'workerMaxFileBytes', 'historyKeepDays')
        THEN regexp_replace(value::text, '([0-9])\.0+(?![0-9])', '\1', 'g')::jsonb
        ELSE value END)
    FROM jsonb_each(settings)
)
WHERE settings::text ~ '[0-9]\.0+(?![0-9])';
