-- Sentences about rows that no key tells of: of data files without keys of these identities, those that a checkpoint of others
-- has seen, and those of lost appends.
SELECT 'unknown for ' || count(DISTINCT u.file_path) || CASE WHEN count(DISTINCT u.file_path) = 1
    THEN ' data file of ' ELSE ' data files of ' END || p.source_table
    || ' without keys: set row_keys = true in [source], then run `dlac plan SPEC` while they exist' AS note
FROM plans AS p JOIN units AS u USING (plan_id)
WHERE list_contains($uuids, p.table_uuid) AND NOT EXISTS (
    FROM keyed_files AS f
    WHERE f.table_uuid = p.table_uuid AND f.file_path = u.file_path AND list_contains($identities, f.identity)
)
GROUP BY p.source_table
UNION ALL
SELECT DISTINCT 'unknown for the rows that ' || adopted || ' had seen, with which run ' || run || ' began'
FROM checkpoints
WHERE adopted IS NOT NULL AND forked_from IS NULL AND ($run IS NULL OR run = $run OR checkpoint_id IN (
    SELECT a.checkpoint_id FROM lineage AS h JOIN ancestors(h.checkpoint_id) AS a ON true WHERE h.is_head AND h.run = $run
))
UNION ALL
SELECT format('unknown for run {}, of whose {} appends the ledger has {}: run `dlac ledger rebuild`', run, last_seq, found)
FROM lost_appends
WHERE $run IS NULL OR run = $run OR run IN (SELECT forked_run FROM checkpoints)
ORDER BY note;
