-- Which plan a leg cuts, or has cut, for the passes first_pass to last_pass (NULL: for ever) of a source, and which plan's dead
-- rows it passes over there. A pass that an earlier leg entered is named by each leg until every key group has finished it.
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
