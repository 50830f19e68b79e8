-- One row per snapshot and schema of the table with uuid $1: the plans that read it so. With a checkpoint $2 only the plans from
-- which it, or an ancestor, has read.
SELECT list(p.plan_id) AS plan_ids, p.snapshot_id, p.schema_id
FROM plans AS p
WHERE p.table_uuid = $1
    AND ($2 IS NULL OR p.plan_id IN (
        SELECT plan_id FROM consumption
        WHERE kind = 'advance' AND checkpoint_id IN (SELECT checkpoint_id FROM ancestors($2))
    ))
GROUP BY ALL;
