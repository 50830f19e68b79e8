-- Whether every advance fits its block and its counts fit the plan's dead rows, and every checkpoint's advances fit its steps.
-- One sentence per kind of problem and run; none where all is well.
CREATE OR REPLACE VIEW advance_problems AS
WITH
moved AS MATERIALIZED (FROM advances),
counted AS (
    SELECT DISTINCT run, cut_id, key_group, block, position_start, position_end, dead_rows
    FROM intervals
    WHERE kind = 'advance'
),
placed AS (
    SELECT m.*, b.block_rows, b.plan_id AS block_plan_id, b.pass AS block_pass, d.dead_rows,
        format('cut {}, key group {}, block {}, checkpoint {}: ', m.cut_id, m.key_group, m.block, m.checkpoint_id) AS place
    FROM moved AS m
    LEFT JOIN blocks AS b USING (cut_id, key_group, block)
    LEFT JOIN counted AS d USING (run, cut_id, key_group, block, position_start, position_end)
),
-- A key group's rows since the parent, in order, fall into steps of per_step rows each.
stepped AS (
    SELECT m.*, coalesce(p.step, 0) + 1 AS next_step, l.per_step,
        coalesce(sum(m.rows_consumed) OVER (
            PARTITION BY m.run, m.checkpoint_id, m.key_group
            ORDER BY m.leg, m.pass, m.block, m.position_start, m.position_end
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), 0)::BIGINT AS rows_before
    FROM placed AS m
    JOIN lineage AS c USING (run, checkpoint_id)
    JOIN legs AS l ON l.run = c.run AND l.leg = c.leg
    LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
),
in_steps AS (
    SELECT *,
        next_step + rows_before // per_step AS first_expected,
        next_step + (rows_before + coalesce(rows_consumed, 0) - 1) // per_step AS last_expected
    FROM stepped
),
skipped AS (
    SELECT c.run, c.checkpoint_id, c.skipped_steps, l.per_batch,
        coalesce(sum(m.rows_consumed) FILTER (NOT m.applied), 0)::BIGINT AS rows
    FROM lineage AS c
    JOIN legs AS l USING (run, leg)
    LEFT JOIN moved AS m ON m.run = c.run AND m.checkpoint_id = c.checkpoint_id
    GROUP BY ALL
),
found AS (
    SELECT run, 'block' AS kind, place || 'expected the block in the table slices, found none' AS problem
    FROM placed
    WHERE block_rows IS NULL
    UNION ALL
    SELECT run, 'cut', place || format('expected plan {} and pass {}, found plan {} and pass {}',
        block_plan_id, block_pass, plan_id, pass)
    FROM placed
    WHERE block_plan_id <> plan_id OR block_pass <> pass
    UNION ALL
    SELECT run, 'positions', place || format('expected positions within 0 to {}, found {} to {}',
        block_rows, position_start, position_end)
    FROM placed
    WHERE position_start < 0 OR position_start >= position_end OR position_end > block_rows
    UNION ALL
    SELECT run, 'rows', place || format('expected {} rows in positions {} to {}, found {} consumed, {} dead and {} quarantined',
        position_end - position_start, position_start, position_end,
        said(rows_consumed), said(rows_dead), said(rows_quarantined))
    FROM placed
    WHERE rows_consumed + rows_dead + rows_quarantined IS DISTINCT FROM position_end - position_start
    UNION ALL
    SELECT run, 'dead', place || format('expected {} dead rows in positions {} to {}, found {}',
        dead_rows, position_start, position_end, said(rows_dead))
    FROM placed
    WHERE rows_dead IS DISTINCT FROM dead_rows
    UNION ALL
    SELECT run, 'order', place || format('expected positions {} to {} in steps {} to {}, found them in steps {} to {}',
        position_start, position_end, first_expected, last_expected, said(first_step), said(last_step))
    FROM in_steps
    WHERE first_step IS DISTINCT FROM first_expected OR last_step IS DISTINCT FROM last_expected
    UNION ALL
    SELECT run, 'applied', format('checkpoint {}: ', checkpoint_id)
        || format('expected rows of {} steps that were not applied, found {} rows in batches of {}',
            said(skipped_steps), rows, per_batch)
    FROM skipped
    WHERE skipped_steps IS DISTINCT FROM (rows + per_batch - 1) // per_batch
    UNION ALL
    SELECT run, 'steps', format('checkpoint {}, key group {}: ', checkpoint_id, key_group)
        || format('expected {} rows of steps {} to {}, found {} of steps {} to {}', rows, first_step, last_step, rows_found,
            said(first_step_found), said(last_step_found))
    FROM shortfalls
    UNION ALL
    SELECT run, 'overlap', format('cut {}, key group {}, block {}: ', cut_id, key_group, block)
        || format('expected positions {} to {} once, found them again in checkpoint {}',
            position_start, position_end, checkpoint_id)
    FROM duplicates
    UNION ALL
    SELECT run, 'hole', format('cut {}, key group {}, block {}: ', cut_id, key_group, block)
        || format('expected positions {} to {} behind the cursor, found them in no advance', position_start, position_end)
    FROM gaps
)
SELECT run, min(problem) || CASE WHEN count(*) > 1 THEN format(' (and {} more like it)', count(*) - 1) ELSE '' END AS problem
FROM found
GROUP BY run, kind;
