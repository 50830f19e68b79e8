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
    SELECT run, 'steps', format('checkpoint {}, key group {}: ', checkpoint_id, key_group)
        || format('expected {} rows of steps {} to {}, found {} of steps {} to {}', rows, first_step, last_step, rows_found,
            said(first_step_found), said(last_step_found))
    FROM shortfalls
    UNION ALL
    SELECT run, 'overlap', format('cut {}, key group {}, block {}: expected positions {} to {} once, found them again in checkpoint {}',
        cut_id, key_group, block, position_start, position_end, checkpoint_id)
    FROM duplicates
    UNION ALL
    SELECT run, 'hole', format('cut {}, key group {}, block {}: expected positions {} to {} behind the cursor, found them in no advance',
        cut_id, key_group, block, position_start, position_end)
    FROM gaps
)
SELECT run, min(problem) || CASE WHEN count(*) > 1 THEN format(' (and {} more like it)', count(*) - 1) ELSE '' END AS problem
FROM found
GROUP BY run, kind;
