-- One row per data file whose rows have keys: `file` is its number in `row_keys`, `identity` its columns and their types. The
-- other rows of `row_keys` have the key, the file and the row of each row.
CREATE OR REPLACE VIEW keyed_files AS
SELECT DISTINCT table_uuid, identity, salt, file_path, file FROM row_keys WHERE key IS NULL;
