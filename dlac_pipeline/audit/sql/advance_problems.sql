-- One row per run and kind of problem in its advances, as a sentence. A sound run has none. Checked are the positions and
-- counts of each advance, the position at which each key group continues, and the steps of each checkpoint.
CREATE OR REPLACE VIEW advance_problems AS
WITH
counted AS (
    SELECT DISTINCT run, source, cut_id, plan_id, key_group, block, position_start, position_end AS read_to, dead_rows
    FROM intervals
    WHERE kind = 'advance' AND dead_rows <> 0
),
-- A key group's rows of a source, in reading order.
walked AS (
    SELECT * EXCLUDE (filtered, quarantined, quarantine_reasons),
        coalesce(len(filtered), 0) AS filtered_named, coalesce(len(quarantined), 0) AS quarantined_named,
        lag(pass) OVER walk IS NOT DISTINCT FROM pass AND lag(block) OVER walk IS NOT DISTINCT FROM block AS continues,
        lag(read_to) OVER walk AS previous_position, lag(token_end) OVER walk AS previous_token,
        lag(last_step) OVER walk AS previous_step, lag(seq) OVER walk AS previous_seq,
        coalesce(sum(rows_consumed) OVER (
            PARTITION BY run, source, checkpoint_id, key_group
            ORDER BY pass, block, position_start, coalesce(token_start, 0), position_end
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), 0)::BIGINT AS rows_before
    FROM advances
    WINDOW walk AS (
        PARTITION BY run, source, key_group
        ORDER BY pass, block, position_start, coalesce(token_start, 0), position_end, seq
    )
),
placed AS (
    SELECT m.*, b.block_rows, b.pass AS block_pass, coalesce(d.dead_rows, 0) AS dead_rows, c.leg AS checkpoint_leg,
        l.streamed, l.per_step, l.per_batch, l.active, coalesce(p.step, 0) + 1 AS next_step, c.step AS checkpoint_step
    FROM walked AS m
    JOIN lineage AS c USING (run, checkpoint_id)
    LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
    LEFT JOIN legs AS l ON l.run = c.run AND l.leg = c.leg
    LEFT JOIN (SELECT * EXCLUDE (plan_id) FROM blocks) AS b USING (cut_id, key_group, block)
    LEFT JOIN counted AS d USING (run, source, cut_id, plan_id, key_group, block, position_start, read_to)
),
-- If the run has one source whose rows are the samples, each step has per_step rows. Otherwise steps only increase.
in_steps AS (
    SELECT *,
        next_step + rows_before // per_step AS first_expected,
        next_step + (rows_before + coalesce(rows_consumed, 0) - 1) // per_step AS last_expected
    FROM placed
),
-- The advances with a problem, and some without. A sound run has few, and its advances are read once.
suspects AS MATERIALIZED (
    SELECT *, format('cut {}, key group {}, block {}, checkpoint {}: ', cut_id, key_group, block, checkpoint_id) AS place
    FROM in_steps ANTI JOIN audited USING (checkpoint_id)
    WHERE block_rows IS NULL
        OR block_pass <> pass OR leg IS DISTINCT FROM checkpoint_leg
        OR position_start < 0 OR position_start >= position_end OR position_end > block_rows
        OR rows_consumed + rows_dead + coalesce(rows_filtered, 0) + rows_quarantined IS DISTINCT FROM read_to - position_start
        OR rows_consumed < 0 OR rows_dead < 0 OR rows_dead IS DISTINCT FROM dead_rows
        OR filtered_named <> coalesce(rows_filtered, 0) OR quarantined_named IS DISTINCT FROM rows_quarantined
        OR (NOT streamed AND (filtered_named > 0 OR quarantined_named > 0))
        OR token_start IS NOT NULL OR token_end IS NOT NULL
        OR position_start <> CASE WHEN continues THEN previous_position ELSE 0 END
        OR token_start IS DISTINCT FROM CASE WHEN continues THEN previous_token END
        OR (active = 1 AND NOT streamed
            AND (first_step IS DISTINCT FROM first_expected OR last_step IS DISTINCT FROM last_expected))
        OR NOT coalesce(first_step >= next_step AND last_step >= first_step AND last_step <= checkpoint_step
            AND first_step >= coalesce(previous_step, 1) AND seq >= coalesce(previous_seq, seq), false)
        OR NOT applied
),
rejected AS (
    SELECT run, format('cut {}, key group {}, block {}, checkpoint {}: ', cut_id, key_group, block, checkpoint_id) AS place,
        unnest(list_concat(coalesce(filtered, []), coalesce(quarantined, []))) AS position, position_start, read_to
    FROM advances
    WHERE filtered IS NOT NULL OR quarantined IS NOT NULL
),
dead_rejected AS (
    SELECT o.run, o.cut_id, o.key_group, o.block, o.checkpoint_id, o.position
    FROM passed_over AS o
    JOIN advances AS m USING (run, checkpoint_id, cut_id, key_group, block)
    JOIN dead_positions AS d ON d.plan_id = m.plan_id AND d.cut_id = o.cut_id AND d.key_group = o.key_group
        AND d.block = o.block AND d.position = o.position
    WHERE o.position >= m.position_start AND o.position < m.read_to
),
-- An advance that was not applied has rows of skipped steps only. Its first and last steps were skipped, others between may be.
skipped_at_least AS (
    SELECT run, checkpoint_id, unnest([first_step, last_step]) AS step
    FROM advances ANTI JOIN audited USING (checkpoint_id)
    WHERE NOT applied
),
skipped_at_most AS (
    SELECT DISTINCT run, checkpoint_id, unnest(range(first_step, least(last_step, checkpoint_step) + 1)) AS step
    FROM suspects WHERE NOT applied
),
skipped AS (
    SELECT c.run, c.checkpoint_id, c.step, c.skipped_steps - (SELECT count(DISTINCT r.step) FROM replays AS r
            WHERE r.run = c.run AND r.checkpoint_id = c.checkpoint_id AND NOT r.applied) AS skipped_steps,
        coalesce((SELECT count(DISTINCT u.step) FROM skipped_at_least AS u
            WHERE u.run = c.run AND u.checkpoint_id = c.checkpoint_id), 0) AS at_least,
        coalesce((SELECT count(*) FROM skipped_at_most AS u
            WHERE u.run = c.run AND u.checkpoint_id = c.checkpoint_id), 0) AS at_most,
        coalesce((SELECT sum(m.rows_consumed) FROM advances AS m
            WHERE m.run = c.run AND m.checkpoint_id = c.checkpoint_id AND NOT m.applied), 0)::BIGINT AS rows
    FROM lineage AS c ANTI JOIN audited USING (checkpoint_id)
),
found AS (
    SELECT run, 'block' AS kind, place || 'expected the block in the table slices, found none' AS problem
    FROM suspects
    WHERE block_rows IS NULL
    UNION ALL
    SELECT run, 'cut', place || format('expected pass {} of leg {}, found pass {} of leg {}',
        block_pass, checkpoint_leg, pass, or_nothing(leg))
    FROM suspects
    WHERE block_pass <> pass OR leg IS DISTINCT FROM checkpoint_leg
    UNION ALL
    SELECT run, 'positions', place || format('expected positions within 0 to {}, found {} to {}',
        block_rows, position_start, position_end)
    FROM suspects
    WHERE position_start < 0 OR position_start >= position_end OR position_end > block_rows
    UNION ALL
    SELECT run, 'rows', place || format('expected {} rows in positions {} to {}, found {} consumed, {} dead, {} filtered and '
        || '{} quarantined',
        read_to - position_start, position_start, read_to,
        or_nothing(rows_consumed), or_nothing(rows_dead), or_nothing(rows_filtered), or_nothing(rows_quarantined))
    FROM suspects
    WHERE rows_consumed + rows_dead + coalesce(rows_filtered, 0) + rows_quarantined IS DISTINCT FROM read_to - position_start
        OR rows_consumed < 0 OR rows_dead < 0
    UNION ALL
    SELECT run, 'dead', place || format('expected {} dead rows in positions {} to {}, found {}',
        dead_rows, position_start, read_to, or_nothing(rows_dead))
    FROM suspects
    WHERE rows_dead IS DISTINCT FROM dead_rows
    UNION ALL
    SELECT run, 'rejected', place || format('expected {} filtered and {} quarantined positions to be named, found {} and {}',
        or_nothing(rows_filtered), or_nothing(rows_quarantined), filtered_named, quarantined_named)
    FROM suspects
    WHERE filtered_named <> coalesce(rows_filtered, 0) OR quarantined_named IS DISTINCT FROM rows_quarantined
    UNION ALL
    SELECT run, 'rejected', place || format('expected filtered and quarantined rows once and in positions {} to {}, found {}',
        position_start, read_to, position)
    FROM rejected
    GROUP BY run, place, position_start, read_to, position
    HAVING count(*) > 1 OR position < position_start OR position >= read_to
    UNION ALL
    SELECT run, 'rejected', format('cut {}, key group {}, block {}, checkpoint {}: ', cut_id, key_group, block, checkpoint_id)
        || format('expected filtered and quarantined rows to be live, found position {} dead', position)
    FROM dead_rejected
    UNION ALL
    SELECT run, 'counted', place || 'expected whole rows of a source whose rows are the samples, found rows filtered, '
        || 'quarantined or read in part'
    FROM suspects
    WHERE NOT streamed
        AND (token_start IS NOT NULL OR token_end IS NOT NULL OR filtered_named > 0 OR quarantined_named > 0)
    UNION ALL
    -- A row that was read in part and then excluded is not finished, but skipped.
    SELECT w.run, 'continues', w.place || format('expected the next advance at position {}, token {}, found it at {}, token {}',
        CASE WHEN continues THEN previous_position ELSE 0 END, coalesce(CASE WHEN continues THEN previous_token END, 0),
        position_start, coalesce(token_start, 0))
    FROM suspects AS w
    WHERE (position_start <> CASE WHEN continues THEN previous_position ELSE 0 END
            OR token_start IS DISTINCT FROM CASE WHEN continues THEN previous_token END)
        AND NOT (continues AND previous_token > 0 AND position_start = previous_position + 1 AND token_start IS NULL AND EXISTS (
            FROM dead_positions AS d WHERE d.plan_id = w.plan_id AND d.cut_id = w.cut_id AND d.key_group = w.key_group
                AND d.block = w.block AND d.position = w.previous_position))
    UNION ALL
    SELECT run, 'tokens', place || format('expected tokens before {} of the row at position {} to be read, found {} before them',
        token_end, read_to, or_nothing(token_start))
    FROM suspects
    WHERE token_end < 1 OR token_start < 1 OR (read_to = position_start AND token_start >= token_end)
    UNION ALL
    SELECT run, 'order', place || format('expected positions {} to {} in steps {} to {}, found them in steps {} to {}',
        position_start, position_end, first_expected, last_expected, or_nothing(first_step), or_nothing(last_step))
    FROM suspects
    WHERE active = 1 AND NOT streamed
        AND (first_step IS DISTINCT FROM first_expected OR last_step IS DISTINCT FROM last_expected)
    UNION ALL
    SELECT run, 'order', place || format('expected positions {} to {} in steps {} to {}, none before step {}, found {} to {}',
        position_start, position_end, next_step, checkpoint_step, coalesce(previous_step, 1),
        or_nothing(first_step), or_nothing(last_step))
    FROM suspects
    WHERE NOT coalesce(first_step >= next_step AND last_step >= first_step AND last_step <= checkpoint_step
        AND first_step >= coalesce(previous_step, 1) AND seq >= coalesce(previous_seq, seq), false)
    UNION ALL
    SELECT run, 'applied', format('checkpoint {}: ', checkpoint_id)
        || format('expected rows of {} steps that were not applied, found {} rows of {} to {} steps',
            or_nothing(skipped_steps), rows, at_least, at_most)
    FROM skipped
    WHERE NOT coalesce(skipped_steps BETWEEN at_least AND at_most, false)
    UNION ALL
    SELECT run, 'applied', format('checkpoint {}: expected step {} to be applied or skipped, found rows of both',
        checkpoint_id, step)
    FROM (
        SELECT run, checkpoint_id, step FROM skipped_at_least
        INTERSECT
        SELECT run, checkpoint_id, unnest([first_step, last_step]) FROM advances
        WHERE applied AND (run, checkpoint_id) IN (SELECT (run, checkpoint_id) FROM skipped_at_least)
    )
    UNION ALL
    SELECT run, 'steps', format('checkpoint {}, key group {}: ', checkpoint_id, key_group)
        || format('expected {} rows of steps {} to {}, found {} of steps {} to {}', coalesce(rows::VARCHAR, 'some'),
            first_step, last_step, rows_found, or_nothing(first_step_found), or_nothing(last_step_found))
    FROM shortfalls
    UNION ALL
    SELECT run, 'overlap', format('cut {}, key group {}, block {}: ', cut_id, key_group, block)
        || format('expected positions {} to {} once, found them again in checkpoint {}',
            position_start, position_end, checkpoint_id)
    FROM duplicates
    UNION ALL
    SELECT run, 'hole', format('cut {}, key group {}, block {}: ', cut_id, key_group, block)
        || format('expected positions {} to {} before the cursor in an advance, found none', position_start, position_end)
    FROM gaps
    UNION ALL
    SELECT run, 'again', format('expected row {} of {} in one pass of a followed table, found it in passes {}',
        row, file_path, passes)
    FROM repeats
)
SELECT run, min(problem) || CASE WHEN count(*) > 1 THEN format(' (and {} more like it)', count(*) - 1) ELSE '' END AS problem
FROM found
GROUP BY run, kind;
