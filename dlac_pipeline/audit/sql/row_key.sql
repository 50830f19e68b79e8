-- The key of a row: 64 bits of the MD5 of the salt, the identity, and the values of the identity as texts in JSON, moved into the
-- range of a BIGINT. The salt and the identity are those of `keyed_files`. A value is a text as DuckDB casts it, a timestamp in
-- UTC: row_key(salt, '{"doc_id": "BIGINT"}', ['4711']).
CREATE OR REPLACE MACRO row_key(salt, identity, identity_values) AS
    (md5_number_lower(salt || identity || to_json(identity_values)::VARCHAR)::HUGEINT - 9223372036854775808)::BIGINT;
