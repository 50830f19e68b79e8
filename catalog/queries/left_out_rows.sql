-- Rows that a surviving lineage leaves out: by a transform, in a quarantined row group, or by the exclusion of a rewind.
SELECT run, source, kind, file_path, count(*) AS rows, any_value(reason) AS reason FROM passed_over_rows GROUP BY ALL
UNION ALL
SELECT run, source, 'row group', file_path, rows, reason FROM quarantined_units
UNION ALL
SELECT run, each.source, 'rewind', NULL, NULL, each.where FROM (SELECT run, unnest(excluded) AS each FROM rewinds)
ORDER BY run, source, kind;
