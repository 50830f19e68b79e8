-- One row per key that a document with these values of its identity columns, as texts in their order, may have in keyed data
-- files. FROM keys_of(['4711']).
CREATE OR REPLACE MACRO keys_of(texts) AS TABLE
WITH
-- The argument is renamed first, because it may be a column of a caller's table.
dlac_target AS (
    FROM (VALUES (texts)) AS arguments (given)
),
dlac_candidates AS (
    SELECT DISTINCT f.identity, f.salt, given, f.identity::JSON ->> '$.*' AS kinds FROM dlac_target, keyed_files AS f
),
dlac_typed AS (
    SELECT identity, salt,
        list_transform(range(1, len(given) + 1), lambda place: identity_text(given[place], kinds[place])) AS typed_texts
    FROM dlac_candidates
    WHERE len(kinds) = len(given)
)
SELECT row_key(salt, identity, typed_texts) AS key, identity FROM dlac_typed WHERE list_count(typed_texts) = len(typed_texts);
