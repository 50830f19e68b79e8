-- One row per key that a document with these values of its identity columns, as texts in their order, may have in keyed data
-- files. FROM keys_of(['4711']).
CREATE OR REPLACE MACRO keys_of(texts) AS TABLE
WITH candidates AS (
    SELECT DISTINCT identity, salt, texts AS given, identity::JSON ->> '$.*' AS kinds FROM keyed_files
),
typed AS (
    SELECT identity, salt,
        list_transform(range(1, len(given) + 1), lambda place: identity_text(given[place], kinds[place])) AS typed_texts
    FROM candidates
    WHERE len(kinds) = len(given)
)
SELECT row_key(salt, identity, typed_texts) AS key, identity FROM typed WHERE list_count(typed_texts) = len(typed_texts);
