-- One row per leg, source, and passes first_pass to last_pass (NULL: all later ones): the plan that is cut for these passes,
-- and the plan whose dead rows the leg passes over in them. An entered pass is in each leg until all key groups have
-- finished it.
CREATE OR REPLACE VIEW leg_cuts AS
WITH opened AS (
    SELECT run, leg, source, unnest(open) AS cut FROM leg_sources
),
queued AS (
    SELECT run, leg, source, next_pass, unnest(range(len(upcoming))) AS place, unnest(upcoming) AS item FROM leg_sources
),
numbered AS (
    SELECT *, item[2]::BIGINT AS passes, next_pass + coalesce(sum(item[2]::BIGINT) OVER (
        PARTITION BY run, leg, source ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ), 0)::BIGINT AS first_pass
    FROM queued
)
SELECT run, leg, source, cut.pass_index AS first_pass, cut.pass_index AS last_pass, cut.plan_id, cut.live_plan_id
FROM opened
UNION ALL
SELECT run, leg, source, first_pass, CASE WHEN passes > 0 THEN first_pass + passes - 1 END, item[1], item[1]
FROM numbered;
