-- One row per row of these tables that has one of these keys, consumed or not.
SELECT DISTINCT f.identity, f.file_path, k.row, k.key
FROM row_keys AS k JOIN keyed_files AS f ON f.file = k.file
WHERE list_contains($keys, k.key) AND list_contains($uuids, f.table_uuid)
ORDER BY ALL;
