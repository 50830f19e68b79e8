-- One row per row that has one of the keys in `row_keys`, consumed or not.
SELECT DISTINCT f.identity, f.file_path, k.row, k.key
FROM row_keys AS k JOIN keyed_files AS f ON f.file = k.file
WHERE k.key IS NOT NULL
ORDER BY ALL;
