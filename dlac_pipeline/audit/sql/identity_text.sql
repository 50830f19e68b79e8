-- The text of an identity's value as row_key takes it, from a text that a person wrote, or NULL if that is none of this type.
CREATE OR REPLACE MACRO identity_text(value, kind) AS CASE
    WHEN kind = 'VARCHAR' THEN value
    WHEN kind IN ('INTEGER', 'BIGINT')
        THEN CASE WHEN regexp_full_match(value, '\s*[+-]?\d+\s*') THEN TRY_CAST(value AS BIGINT)::VARCHAR END
    -- Timestamps are in UTC. A cast to TIMESTAMP would ignore an offset.
    WHEN kind IN ('TIMESTAMP', 'TIMESTAMP_NS') AND regexp_matches(value, ':\d\d(\.\d+)?\s*(Z|[+-]\d\d(:?\d\d)?)\s*$')
        THEN make_timestamp(epoch_us(TRY_CAST(value AS TIMESTAMPTZ)))::VARCHAR
    WHEN kind = 'TIMESTAMP' THEN TRY_CAST(value AS TIMESTAMP)::VARCHAR
    WHEN kind = 'TIMESTAMP_NS' THEN TRY_CAST(value AS TIMESTAMP_NS)::VARCHAR
    WHEN kind = 'DATE' THEN TRY_CAST(value AS DATE)::VARCHAR
    -- A cast would take a date for midnight.
    WHEN kind = 'TIME' AND regexp_matches(value, '^\s*\d+:') THEN TRY_CAST(value AS TIME)::VARCHAR
    WHEN kind = 'UUID' THEN TRY_CAST(value AS UUID)::VARCHAR
    WHEN kind = 'BOOLEAN' THEN TRY_CAST(value AS BOOLEAN)::VARCHAR
    -- 0.0 and -0.0 are one value, 0.0.
    WHEN kind = 'FLOAT' THEN (TRY_CAST(value AS FLOAT) + 0::FLOAT)::VARCHAR
    WHEN kind = 'DOUBLE' THEN (TRY_CAST(value AS DOUBLE) + 0::DOUBLE)::VARCHAR
    WHEN kind = 'BLOB' THEN TRY_CAST(value AS BLOB)::VARCHAR
    -- DuckDB writes all digits of a decimal's scale, and no digit before them where the scale is the precision. Further digits
    -- must be zeros.
    WHEN kind LIKE 'DECIMAL%' AND regexp_full_match(value, '\s*[+-]?\d+(\.\d+)?\s*')
            AND regexp_extract(value, '\.(\d+)', 1)[TRY_CAST(regexp_extract(kind, ',(\d+)', 1) AS INT) + 1:] SIMILAR TO '0*'
        THEN CASE WHEN value SIMILAR TO '.*[1-9].*' THEN regexp_extract(value, '-') ELSE '' END
            || CASE WHEN regexp_extract(kind, '\((\d+)', 1) = regexp_extract(kind, ',(\d+)', 1) THEN ''
                ELSE coalesce(nullif(ltrim(regexp_extract(value, '\d+'), '0'), ''), '0') END
            || CASE WHEN regexp_extract(kind, ',(\d+)', 1) <> '0' THEN
                '.' || rpad(regexp_extract(value, '\.(\d+)', 1)[:TRY_CAST(regexp_extract(kind, ',(\d+)', 1) AS INT)],
                    TRY_CAST(regexp_extract(kind, ',(\d+)', 1) AS INT), '0') ELSE '' END
END;
