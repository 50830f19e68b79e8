-- The rows of seen_by for one key: in these tables, and of one run or all. A run has seen what a run that it forked has seen.
SELECT s.*
FROM seen_by($key) AS s
WHERE ($run IS NULL OR run = $run OR list_contains(forks, $run))
    AND source_table IN (SELECT source_table FROM plans WHERE list_contains($uuids, table_uuid))
ORDER BY run, survives DESC, first_step, pass, file_path, row;
