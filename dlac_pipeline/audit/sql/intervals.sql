-- Every interval of positions that matters, with its live and dead rows, on the surviving lineages. Its kind is
--   advance   what a checkpoint consumed,
--   overlap   what was consumed before already (once more for each time),
--   hole      what was passed over though the key group went on, or the run is finished.
CREATE OR REPLACE VIEW intervals AS
WITH
moved AS MATERIALIZED (FROM advances),
entered AS (
    SELECT run, cut_id, min(leg) AS leg, min(pass) AS pass
    FROM moved
    GROUP BY run, cut_id
),
cursors AS (
    SELECT run, key_group, max({'leg': e.leg, 'pass': e.pass, 'block': m.block}) AS place
    FROM moved AS m JOIN entered AS e USING (run, cut_id)
    GROUP BY run, key_group
),
finished AS (
    SELECT DISTINCT run FROM consumption WHERE kind = 'finish'
),
-- Blocks that must be consumed to their end: all of them before the block in which the key group's cursor stands.
behind AS (
    SELECT e.run, b.cut_id, b.pass, b.key_group, b.block, b.block_rows
    FROM entered AS e
    JOIN blocks AS b USING (cut_id)
    LEFT JOIN cursors AS k ON k.run = e.run AND k.key_group = b.key_group
    WHERE e.run IN (FROM finished) OR {'leg': e.leg, 'pass': e.pass, 'block': b.block} < k.place
),
-- Each such block ends with an empty interval, so that what is missing at its end is a hole like any other.
laid_out AS (
    SELECT run, cut_id, pass, key_group, block, position_start, position_end, checkpoint_id, seq FROM moved
    UNION ALL
    SELECT run, cut_id, pass, key_group, block, block_rows, block_rows, NULL, NULL FROM behind
),
seen AS (
    SELECT *, coalesce(max(position_end) OVER (
        PARTITION BY run, cut_id, key_group, block
        ORDER BY position_start, position_end, seq NULLS LAST
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), 0) AS covered_to
    FROM laid_out
),
found AS (
    SELECT * EXCLUDE (seq, covered_to), 'advance' AS kind FROM seen WHERE checkpoint_id IS NOT NULL
    UNION ALL
    SELECT * EXCLUDE (seq, covered_to) REPLACE (least(position_end, covered_to) AS position_end), 'overlap'
    FROM seen WHERE least(position_end, covered_to) > position_start
    UNION ALL
    SELECT
        * EXCLUDE (seq, covered_to) REPLACE (covered_to AS position_start, position_start AS position_end), 'hole'
    FROM seen WHERE covered_to < position_start
),
dead AS MATERIALIZED (FROM dead_positions),
counted AS (
    SELECT f.*, coalesce(until.dead_upto, 0) - coalesce(before.dead_upto, 0) AS dead_rows
    FROM found AS f
    ASOF LEFT JOIN dead AS before
        ON before.cut_id = f.cut_id AND before.key_group = f.key_group AND before.block = f.block
        AND f.position_start > before.position
    ASOF LEFT JOIN dead AS until
        ON until.cut_id = f.cut_id AND until.key_group = f.key_group AND until.block = f.block
        AND f.position_end > until.position
)
SELECT *, position_end - position_start - dead_rows AS live_rows
FROM counted;
