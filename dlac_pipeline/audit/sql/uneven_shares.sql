-- One row per key group and checkpoint of a surviving lineage with other steps or another number of rows than most key groups.
-- Every optimizer step takes the same number of samples from every key group. In a streamed leg a sample is not a row, so only
-- the steps are checked and `rows` is NULL. A key group may be short at the end of a leg in which it has nothing more to read:
-- such a row is_due, and no other one is.
CREATE OR REPLACE VIEW uneven_shares AS
WITH
-- The steps of a checkpoint without its replays, which follow all others.
reached AS (
    SELECT c.* REPLACE (c.step - coalesce(r.steps, 0) AS step)
    FROM lineage AS c
    LEFT JOIN (SELECT run, checkpoint_id, count(DISTINCT step) AS steps FROM replays GROUP BY ALL) AS r USING (run, checkpoint_id)
),
expected AS (
    SELECT
        c.run, c.leg, c.checkpoint_id, coalesce(p.step, 0) AS from_step, c.step, g.key_group,
        CASE WHEN NOT s.streamed THEN s.per_step END AS per_step
    FROM reached AS c ANTI JOIN audited USING (checkpoint_id)
    JOIN legs AS s USING (run, leg)
    LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
    CROSS JOIN LATERAL (SELECT unnest(range(s.key_groups)) AS key_group) AS g
    WHERE c.step > coalesce(p.step, 0)
),
found AS (
    SELECT run, checkpoint_id, key_group, min(first_step) AS first_step, max(last_step) AS last_step,
        sum(live_rows)::BIGINT AS rows
    FROM intervals
    WHERE kind = 'advance'
    GROUP BY ALL
),
-- The last pass of each active source in a leg. An endless source has 1 << 30.
bounds AS (
    SELECT s.run, s.leg, s.source,
        CASE WHEN s.active AND (s.passes = 0 OR s.follow = 'appends') THEN 1 << 30
            ELSE (SELECT max(c.last_pass) FROM leg_cuts AS c
                WHERE c.run = s.run AND c.leg = s.leg AND c.source = s.source) END AS last_pass
    FROM leg_sources AS s
    WHERE s.active
),
-- Key groups that have more to read in a leg. NULL: all of them.
left_over AS (
    -- The leg has a pass that the run has not entered yet, with rows for every key group.
    SELECT b.run, b.leg, NULL AS key_group
    FROM bounds AS b
    LEFT JOIN (SELECT run, source, max(pass) AS pass FROM cuts GROUP BY run, source) AS c USING (run, source)
    WHERE b.last_pass = 1 << 30 OR EXISTS (
        FROM leg_cuts AS l JOIN plans AS p ON p.plan_id = l.live_plan_id
        WHERE l.run = b.run AND l.leg = b.leg AND l.source = b.source AND l.last_pass > coalesce(c.pass, -1)
            AND p.base_plan_id IS NULL AND p.live_rows >= (SELECT max(key_groups) FROM legs WHERE legs.run = b.run)
    )
    UNION
    SELECT b.run, b.leg, i.key_group
    FROM bounds AS b JOIN intervals AS i
        ON i.run = b.run AND i.source = b.source AND i.pass <= b.last_pass AND i.kind = 'ahead' AND i.live_rows > 0
    UNION
    SELECT b.run, b.leg, m.key_group
    FROM bounds AS b JOIN advances AS m
        ON m.run = b.run AND m.source = b.source AND m.pass <= b.last_pass AND m.leg > b.leg AND m.rows_consumed > 0
),
last_moved AS (
    SELECT m.run, m.leg, m.key_group, max(c.step) AS step
    FROM advances AS m JOIN reached AS c USING (run, checkpoint_id)
    GROUP BY ALL
),
judged AS (
    SELECT e.*, f.first_step, f.last_step, coalesce(f.rows, 0) AS rows, (e.step - e.from_step) * e.per_step AS rows_due,
        e.step >= coalesce(m.step, 0) AND NOT EXISTS (
            FROM left_over AS o
            WHERE o.run = e.run AND o.leg = e.leg AND coalesce(o.key_group, e.key_group) = e.key_group
        ) AS exhausted
    FROM expected AS e
    LEFT JOIN found AS f USING (run, checkpoint_id, key_group)
    LEFT JOIN last_moved AS m ON m.run = e.run AND m.leg = e.leg AND m.key_group = e.key_group
)
SELECT
    run, checkpoint_id, key_group, from_step + 1 AS first_step, step AS last_step,
    first_step AS first_step_found, last_step AS last_step_found, rows_due AS rows, rows AS rows_found,
    exhausted
        AND coalesce(first_step, from_step + 1) = from_step + 1
        AND coalesce(last_step, from_step) BETWEEN from_step AND step
        AND (per_step IS NULL
            OR (rows <= rows_due AND coalesce(last_step, from_step) = from_step + (rows + per_step - 1) // per_step))
        AS is_due
FROM judged
WHERE NOT coalesce(
    first_step = from_step + 1 AND last_step = step AND coalesce(rows = rows_due, true), false
);
