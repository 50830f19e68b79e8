-- One row per interval of positions in the cuts that were entered, on the surviving lineages. Its kind is
--   advance   passed by a checkpoint,
--   overlap   passed again by a checkpoint (one row for each time),
--   hole      in no advance, although the cursor of the key group is past it or the source was read to its end,
--   ahead     still to be read.
-- live_rows are neither dead under plan_id, nor filtered, nor quarantined. A row that was read in part is ahead.
CREATE OR REPLACE VIEW intervals AS
WITH
-- A key group walks the blocks of a source in order of (pass, block), here one number.
places AS (
    SELECT run, source, key_group, pass * (1::BIGINT << 32) + block AS place, min(leg) AS leg FROM advances GROUP BY ALL
),
cursors AS (
    SELECT run, source, key_group, max(place) AS place FROM places GROUP BY ALL
),
entered AS (
    SELECT c.run, c.source, c.pass, c.cut_id, b.plan_id, b.key_group, b.block, b.block_rows,
        c.pass * (1::BIGINT << 32) + b.block AS place,
        1 << 30 AS newest
    FROM cuts AS c JOIN blocks AS b USING (cut_id)
),
-- A block must be consumed to its end if the cursor of the key group is past it. The leg in which the cursor moved to the next
-- block decides which rows of this one are dead.
passed_in AS (
    SELECT e.*, coalesce(n.leg, e.newest) AS leg,
        coalesce(e.place < k.place, false) OR d.source IS NOT NULL AS is_past
    FROM entered AS e
    LEFT JOIN cursors AS k ON k.run = e.run AND k.source = e.source AND k.key_group = e.key_group
    LEFT JOIN complete_sources AS d ON d.run = e.run AND d.source = e.source
    ASOF LEFT JOIN places AS n
        ON n.run = e.run AND n.source = e.source AND n.key_group = e.key_group AND e.place < n.place
),
ends AS (
    SELECT b.* EXCLUDE (plan_id), coalesce(p.live_plan_id, b.plan_id) AS plan_id
    FROM passed_in AS b ASOF LEFT JOIN live_plans AS p
        ON p.run = b.run AND p.source = b.source AND p.pass = b.pass AND b.leg >= p.leg
),
tiled AS (
    FROM block_tiles WHERE is_tiled
),
-- The blocks that are not tiled are sorted. Each ends with an empty interval, so that rows missing at its end are found like
-- others.
laid_out AS (
    SELECT run, source, cut_id, pass, key_group, block, position_start, read_to AS position_end, checkpoint_id, seq, plan_id,
        first_step, last_step, filtered, quarantined, true AS is_past
    FROM advances ANTI JOIN tiled USING (run, source, cut_id, key_group, block)
    UNION ALL
    SELECT run, source, cut_id, pass, key_group, block, block_rows, block_rows, NULL, NULL, plan_id, NULL, NULL, NULL, NULL, is_past
    FROM ends ANTI JOIN tiled USING (run, source, cut_id, key_group, block)
),
seen AS (
    SELECT *, coalesce(max(position_end) OVER (
        PARTITION BY run, source, cut_id, key_group, block
        ORDER BY position_start, position_end, seq NULLS LAST
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), 0) AS covered_to
    FROM laid_out
),
found AS (
    SELECT * EXCLUDE (seq, covered_to, is_past), 'advance' AS kind FROM seen WHERE checkpoint_id IS NOT NULL
    UNION ALL
    SELECT * EXCLUDE (seq, covered_to, is_past) REPLACE (least(position_end, covered_to) AS position_end), 'overlap'
    FROM seen WHERE least(position_end, covered_to) > position_start
    UNION ALL
    SELECT
        * EXCLUDE (seq, covered_to, is_past)
        REPLACE (covered_to AS position_start, position_start AS position_end, NULL AS filtered, NULL AS quarantined),
        CASE WHEN is_past THEN 'hole' ELSE 'ahead' END
    FROM seen WHERE covered_to < position_start
    UNION ALL
    SELECT run, source, cut_id, pass, key_group, block, position_start, read_to, checkpoint_id, plan_id, first_step, last_step,
        filtered, quarantined, 'advance'
    FROM advances SEMI JOIN tiled USING (run, source, cut_id, key_group, block)
    UNION ALL
    SELECT e.run, e.source, e.cut_id, e.pass, e.key_group, e.block, t.covered_to, e.block_rows, NULL, e.plan_id, NULL, NULL,
        NULL, NULL, CASE WHEN e.is_past THEN 'hole' ELSE 'ahead' END
    FROM ends AS e JOIN tiled AS t USING (run, source, cut_id, key_group, block)
    WHERE t.covered_to < e.block_rows
),
-- Most blocks have no dead row. The others are looked up in order of their positions.
dead_blocks AS (
    SELECT DISTINCT plan_id, cut_id, key_group, block FROM dead_positions
),
counted AS (
    SELECT f.*, coalesce(until.dead_upto, 0) - coalesce(before.dead_upto, 0) AS dead_rows
    FROM (FROM found SEMI JOIN dead_blocks USING (plan_id, cut_id, key_group, block)) AS f
    ASOF LEFT JOIN dead_positions AS before
        ON before.plan_id = f.plan_id AND before.cut_id = f.cut_id AND before.key_group = f.key_group
        AND before.block = f.block AND f.position_start > before.position
    ASOF LEFT JOIN dead_positions AS until
        ON until.plan_id = f.plan_id AND until.cut_id = f.cut_id AND until.key_group = f.key_group
        AND until.block = f.block AND f.position_end > until.position
    UNION ALL
    SELECT *, 0 FROM found ANTI JOIN dead_blocks USING (plan_id, cut_id, key_group, block)
),
rejected AS (
    SELECT * EXCLUDE (filtered, quarantined),
        coalesce(len(list_filter(filtered, lambda p: p >= position_start AND p < position_end)), 0) AS filtered_rows,
        coalesce(len(list_filter(quarantined, lambda p: p >= position_start AND p < position_end)), 0) AS quarantined_rows
    FROM counted
)
SELECT *, position_end - position_start - dead_rows - filtered_rows - quarantined_rows AS live_rows
FROM rejected;
