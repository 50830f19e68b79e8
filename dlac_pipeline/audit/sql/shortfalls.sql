-- Every optimizer step takes the same number of samples from every key group. One row per key group from which a checkpoint of
-- a surviving lineage records other steps, or another number of rows, than those since its parent.
-- At the very end of a run key groups are exhausted: where the steps before the head and the rows of the head make up all live
-- rows of the passes that were entered, the last step may be short of samples.
CREATE OR REPLACE VIEW shortfalls AS
WITH
moved AS MATERIALIZED (FROM advances),
expected AS (
    SELECT
        c.run, c.checkpoint_id, c.is_head, coalesce(p.step, 0) AS from_step, c.step, g.key_group,
        s.per_step
    FROM lineage AS c
    JOIN legs AS s USING (run, leg)
    LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
    CROSS JOIN LATERAL (SELECT unnest(range(s.key_groups)) AS key_group) AS g
),
steps AS (
    SELECT run, checkpoint_id, key_group, min(first_step) AS first_step, max(last_step) AS last_step
    FROM moved
    GROUP BY ALL
),
read AS (
    SELECT run, checkpoint_id, key_group, sum(live_rows)::BIGINT AS rows
    FROM intervals
    WHERE kind = 'advance'
    GROUP BY ALL
),
found AS (
    FROM steps JOIN read USING (run, checkpoint_id, key_group)
),
live AS (
    SELECT e.run, s.key_group, sum(s.live_rows) AS rows
    FROM (SELECT DISTINCT run, cut_id FROM moved) AS e JOIN slices AS s USING (cut_id)
    GROUP BY ALL
)
SELECT
    e.run, e.checkpoint_id, e.key_group, e.from_step + 1 AS first_step, e.step AS last_step,
    f.first_step AS first_step_found, f.last_step AS last_step_found,
    (e.step - e.from_step) * e.per_step AS rows, coalesce(f.rows, 0) AS rows_found
FROM expected AS e
LEFT JOIN found AS f USING (run, checkpoint_id, key_group)
LEFT JOIN live AS x USING (run, key_group)
WHERE NOT coalesce(
    f.first_step = e.from_step + 1 AND f.last_step = e.step AND f.rows = (e.step - e.from_step) * e.per_step, false
)
AND NOT (
    e.is_head AND e.from_step * e.per_step + coalesce(f.rows, 0) >= x.rows
    AND coalesce(f.rows, 0) BETWEEN (e.step - e.from_step - 1) * e.per_step AND (e.step - e.from_step) * e.per_step
    AND coalesce(f.first_step, e.step) = e.from_step + 1
    AND coalesce(f.last_step, e.step - 1) IN (e.step - 1, e.step)
);
