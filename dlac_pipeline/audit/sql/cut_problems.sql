-- One row per run and kind of problem in a cut that it has read, as a sentence. A sound cut has none. The slices must hold
-- every live row of the plan exactly once, the blocks must be permutations, and plans under which the cut was read later may
-- only have more dead rows. This is checked with the tables alone, without the code that wrote them.
CREATE OR REPLACE VIEW cut_problems AS
WITH
cut AS MATERIALIZED (
    SELECT DISTINCT cut_id, plan_id, pass FROM slices
),
plan_counts AS (
    SELECT u.plan_id, count(*) AS units, sum(u.rows) AS rows, sum(u.live_rows) AS live_rows
    FROM units AS u
    GROUP BY u.plan_id
),
spans AS (
    SELECT plan_id, unit, unnest(dead) AS span FROM units WHERE len(dead) > 0
),
dead_of_units AS (
    SELECT plan_id, unit, sum(span.rows) AS rows, min(span.first) AS lowest, max(span.first + span.rows) AS highest
    FROM spans
    GROUP BY ALL
),
dead_of_slices AS (
    SELECT s.cut_id, s.key_group, s.block, s.slice,
        sum(greatest(0, least(span.first + span.rows, s.first_row + s.rows) - greatest(span.first, s.first_row))) AS rows
    FROM slices AS s JOIN spans USING (plan_id, unit)
    GROUP BY ALL
),
laid_out AS (
    SELECT s.*, coalesce(d.rows, 0) AS dead_rows,
        max(s.first_row + s.rows) OVER (
            PARTITION BY s.cut_id, s.unit ORDER BY s.first_row, s.rows ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS covered_to,
        sum(s.rows) OVER (
            PARTITION BY s.cut_id, s.key_group, s.block ORDER BY s.slice ROWS UNBOUNDED PRECEDING
        ) - s.rows AS rows_before
    FROM slices AS s LEFT JOIN dead_of_slices AS d USING (cut_id, key_group, block, slice)
),
cut_units AS (
    SELECT c.cut_id, u.unit, u.file_path, u.row_group, u.live_rows, coalesce(s.live_rows, 0) AS in_slices
    FROM cut AS c
    JOIN units AS u USING (plan_id)
    LEFT JOIN (SELECT cut_id, unit, sum(live_rows) AS live_rows FROM slices GROUP BY ALL) AS s USING (cut_id, unit)
),
block_sums AS (
    SELECT cut_id, key_group, block, sum(rows) AS rows, sum(live_rows) AS live_rows,
        count(DISTINCT (block_rows, block_live_rows, a, a_inv, c)) AS settings
    FROM slices
    GROUP BY ALL
),
-- Plans with exclusions. They have the units of the plan that was cut, and its dead rows among their own.
later AS (
    SELECT DISTINCT c.cut_id, c.plan_id, r.plan_id AS live_plan_id
    FROM cut AS c JOIN cut_plans AS r ON r.cut_id = c.cut_id AND r.plan_id <> c.plan_id
),
offsets AS (
    SELECT plan_id, unit, unnest(range(span.first, span.first + span.rows)) AS unit_row
    FROM spans
    WHERE plan_id IN (SELECT unnest([plan_id, live_plan_id]) FROM later)
),
revived AS (
    SELECT l.cut_id, l.live_plan_id, count(*) AS rows
    FROM later AS l
    JOIN offsets AS o USING (plan_id)
    ANTI JOIN offsets AS n ON n.plan_id = l.live_plan_id AND n.unit = o.unit AND n.unit_row = o.unit_row
    GROUP BY ALL
),
other_units AS (
    SELECT l.cut_id, l.live_plan_id, count(*) AS units
    FROM later AS l
    JOIN units AS u USING (plan_id)
    ANTI JOIN units AS n ON n.plan_id = l.live_plan_id
        AND (n.unit, n.file_path, n.row_group, n.first_row, n.rows) = (u.unit, u.file_path, u.row_group, u.first_row, u.rows)
    GROUP BY ALL
),
found AS (
    SELECT l.cut_id, 'base' AS kind, format('expected plan {} to be plan {} with more dead rows, found one made from {}',
        l.live_plan_id, l.plan_id, or_nothing(n.base_plan_id)) AS problem
    FROM later AS l JOIN plans AS p USING (plan_id) LEFT JOIN plans AS n ON n.plan_id = l.live_plan_id
    WHERE n.base_plan_id IS DISTINCT FROM coalesce(p.base_plan_id, p.plan_id)
    UNION ALL
    SELECT cut_id, 'base', format('expected the dead rows of the plan that was cut to be dead in plan {}, found {} of them live',
        live_plan_id, rows)
    FROM revived
    UNION ALL
    SELECT cut_id, 'base', format('expected the units of the plan that was cut in plan {}, found {} of them missing or changed',
        live_plan_id, units)
    FROM other_units
    UNION ALL
    SELECT c.cut_id, 'plan' AS kind, 'expected plan ' || c.plan_id || ' once in the table plans, found it '
        || (SELECT count(*) FROM plans AS p WHERE p.plan_id = c.plan_id) || ' times' AS problem
    FROM cut AS c
    WHERE (SELECT count(*) FROM plans AS p WHERE p.plan_id = c.plan_id) <> 1
    UNION ALL
    SELECT c.cut_id, 'counts', format('expected {} units with {} rows, {} of them live, in plan {}, found {}, {} and {}',
        p.units, p.rows, p.live_rows, p.plan_id, coalesce(n.units, 0), coalesce(n.rows, 0), coalesce(n.live_rows, 0))
    FROM cut AS c JOIN plans AS p USING (plan_id) LEFT JOIN plan_counts AS n USING (plan_id)
    WHERE (n.units, n.rows, n.live_rows) IS DISTINCT FROM (p.units, p.rows, p.live_rows)
    UNION ALL
    SELECT c.cut_id, 'dead rows', format('expected the dead rows of {} row group {} to be {} of its {} rows, found {}',
        u.file_path, u.row_group, u.rows - u.live_rows, u.rows, coalesce(d.rows, 0))
    FROM cut AS c JOIN units AS u USING (plan_id) LEFT JOIN dead_of_units AS d USING (plan_id, unit)
    WHERE u.rows - u.live_rows <> coalesce(d.rows, 0) OR d.lowest < 0 OR d.highest > u.rows
    UNION ALL
    SELECT cut_id, 'live rows', format('expected {} live rows of {} row group {} in slices, found {}',
        live_rows, file_path, row_group, in_slices)
    FROM cut_units
    WHERE live_rows <> in_slices
    UNION ALL
    SELECT s.cut_id, 'slice', format('expected {} live rows in slice {} of key group {}, block {}, found {}',
        s.rows - s.dead_rows, s.slice, s.key_group, s.block, s.live_rows)
    FROM laid_out AS s
    WHERE s.live_rows <> s.rows - s.dead_rows
    UNION ALL
    SELECT s.cut_id, 'overlap', format('expected rows {} to {} of unit {} in one slice, found them in two',
        s.first_row, least(s.covered_to, s.first_row + s.rows) - 1, s.unit)
    FROM laid_out AS s
    WHERE s.covered_to > s.first_row
    UNION ALL
    SELECT s.cut_id, 'bounds', format(
        'expected slice {} of key group {}, block {} inside unit {} of plan {}, found rows {} to {}',
        s.slice, s.key_group, s.block, s.unit, s.plan_id, s.first_row, s.first_row + s.rows - 1)
    FROM slices AS s LEFT JOIN units AS u USING (plan_id, unit)
    WHERE u.unit IS NULL OR s.first_row < 0 OR s.rows < 1 OR s.first_row + s.rows > u.rows
    UNION ALL
    SELECT s.cut_id, 'place', format('expected slice {} of key group {}, block {} at row {} of its block, found it at row {}',
        s.slice, s.key_group, s.block, s.rows_before::BIGINT, s.base)
    FROM laid_out AS s
    WHERE s.base <> s.rows_before
    UNION ALL
    SELECT b.cut_id, 'permutation', format(
        'expected one permutation of {} rows, {} of them live, for key group {}, block {}, found {} of {} and {}',
        b.rows, b.live_rows, b.key_group, b.block, b.settings, s.block_rows, s.block_live_rows)
    FROM block_sums AS b JOIN blocks AS s USING (cut_id, key_group, block)
    WHERE b.settings <> 1 OR b.rows <> s.block_rows OR b.live_rows <> s.block_live_rows
    UNION ALL
    SELECT cut_id, 'inverse', format('expected a_inv to be the inverse of a={} modulo {} in key group {}, block {}, found {}',
        a, block_rows, key_group, block, a_inv)
    FROM blocks
    WHERE (a % block_rows) * (a_inv % block_rows) % block_rows <> 1 % block_rows OR c < 0 OR c >= block_rows
),
kinds AS (
    -- The first sentence of each kind, and the number of others.
    SELECT cut_id, min(problem) AS problem, count(DISTINCT problem) - 1 AS others
    FROM found
    GROUP BY cut_id, kind
)
SELECT DISTINCT a.run, format('cut {}: {}', k.cut_id, k.problem)
    || CASE WHEN k.others > 0 THEN format(' (and {} more like it)', k.others) ELSE '' END AS problem
FROM kinds AS k JOIN (SELECT DISTINCT run, cut_id FROM advances) AS a USING (cut_id);
