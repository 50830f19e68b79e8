-- One row per reason why keys_seen of a checkpoint may miss documents.
WITH ancestry AS (
    SELECT checkpoint_id FROM ancestors($1)
),
unkeyed AS (
    SELECT p.source_table, count(DISTINCT u.file_path) AS files
    FROM (SELECT DISTINCT plan_id FROM consumption WHERE kind = 'advance' AND checkpoint_id IN (FROM ancestry)) AS a
    JOIN plans AS p USING (plan_id)
    JOIN units AS u USING (plan_id)
    WHERE NOT EXISTS (FROM keyed_files AS f WHERE f.table_uuid = p.table_uuid AND f.file_path = u.file_path)
    GROUP BY p.source_table
)
SELECT format('{} data files of {} have no keys', files, source_table) AS reason FROM unkeyed
UNION ALL
SELECT format('training before checkpoint {} was elsewhere ({})', checkpoint_id, adopted)
FROM checkpoints
WHERE adopted IS NOT NULL AND forked_from IS NULL AND checkpoint_id IN (FROM ancestry)
ORDER BY reason;
