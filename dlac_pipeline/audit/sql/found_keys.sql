-- The rows to add to `row_keys`, at first one per data file: found_keys(table, identity, salt, paths).
CREATE TABLE found AS
SELECT $1::VARCHAR AS table_uuid, $2::VARCHAR AS identity, $3::VARCHAR AS salt, file_path,
    row_key($3, $2, [$1, file_path]) AS file, NULL::BIGINT AS key, NULL::BIGINT AS row
FROM (SELECT unnest($4::VARCHAR[]) AS file_path);
