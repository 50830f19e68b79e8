-- One row per reason why keys_seen of a checkpoint may miss documents.
WITH ancestry AS (
    SELECT checkpoint_id FROM ancestors($1)
),
read_files AS (
    SELECT DISTINCT p.source_table, p.table_uuid, u.file_path
    FROM (SELECT DISTINCT plan_id FROM consumption WHERE kind = 'advance' AND checkpoint_id IN (FROM ancestry)) AS a
    JOIN plans AS p USING (plan_id)
    JOIN units AS u USING (plan_id)
),
-- A document is asked for by one identity. Files that have keys of another one only cannot answer.
wanted AS (
    SELECT DISTINCT table_uuid, f.identity FROM read_files JOIN keyed_files AS f USING (table_uuid, file_path)
),
unkeyed AS (
    SELECT r.source_table, w.identity, count(DISTINCT r.file_path) AS files
    FROM read_files AS r LEFT JOIN wanted AS w USING (table_uuid)
    WHERE NOT EXISTS (FROM keyed_files AS f
        WHERE f.table_uuid = r.table_uuid AND f.file_path = r.file_path AND f.identity = coalesce(w.identity, f.identity))
    GROUP BY ALL
)
SELECT format('{} data files of {} have no keys', files, source_table) || coalesce(' of ' || identity, '') AS reason FROM unkeyed
UNION ALL
SELECT format('training before checkpoint {} was elsewhere ({})', checkpoint_id, adopted)
FROM checkpoints
WHERE adopted IS NOT NULL AND forked_from IS NULL AND checkpoint_id IN (FROM ancestry)
UNION ALL
SELECT format('the ledger has {} of the {} appends of run {}', found, last_seq, run)
FROM lost_appends
WHERE run IN (SELECT run FROM ancestors($1) UNION SELECT forked_run FROM checkpoints WHERE checkpoint_id IN (FROM ancestry))
ORDER BY reason;
