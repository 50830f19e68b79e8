-- One row per source of each run, with the number of its rows by outcome, over all passes. rows and rows_live are of one pass,
-- the last one that was entered. For a followed table they are of all passes, because each pass has other rows.
CREATE OR REPLACE VIEW sources AS
WITH
named AS (
    SELECT run, source, arg_max(name, seq) AS name, arg_max(follow, seq) AS follow, arg_max(passes, seq) AS passes
    FROM leg_sources
    GROUP BY run, source
),
repeated AS (
    SELECT run, source, sum(times_repeated)::BIGINT AS rows FROM repeats GROUP BY run, source
),
-- Rows of quarantined row groups are in no pass, because they are not live any more.
outcomes AS (
    FROM passes
    UNION ALL BY NAME
    SELECT run, source, 0 AS rows, 0 AS rows_live, 0 AS rows_consumed, 0 AS rows_duplicated, 0 AS rows_missing, 0 AS rows_pending,
        0 AS rows_filtered, rows AS rows_quarantined, 0 AS rows_partial, 0 AS rows_not_applied
    FROM quarantined_units
),
read AS (
    SELECT run, source, count(pass) AS passes_entered, count_if(pass IS NOT NULL AND rows_pending = 0 AND rows_missing = 0)
            AS passes_finished,
        sum(rows_live)::BIGINT AS rows_entered,
        arg_max(rows, pass) AS last_rows, arg_max(rows_live, pass) AS last_rows_live, sum(rows)::BIGINT AS all_rows,
        sum(rows_consumed)::BIGINT AS rows_consumed, sum(rows_duplicated)::BIGINT AS rows_duplicated,
        sum(rows_missing)::BIGINT AS rows_missing, sum(rows_pending)::BIGINT AS rows_pending,
        sum(rows_filtered)::BIGINT AS rows_filtered, sum(rows_quarantined)::BIGINT AS rows_quarantined,
        sum(rows_partial)::BIGINT AS rows_partial, sum(rows_not_applied)::BIGINT AS rows_not_applied
    FROM outcomes
    GROUP BY run, source
)
SELECT
    r.run, r.source, n.name, n.passes, n.follow, r.passes_entered, r.passes_finished,
    CASE WHEN n.follow = 'appends' THEN r.all_rows ELSE r.last_rows END AS rows,
    CASE WHEN n.follow = 'appends' THEN r.rows_entered ELSE r.last_rows_live END AS rows_live,
    r.rows_entered, r.rows_consumed, r.rows_duplicated + coalesce(d.rows, 0) AS rows_duplicated, r.rows_missing, r.rows_pending,
    r.rows_filtered, r.rows_quarantined, r.rows_partial, r.rows_not_applied
FROM read AS r
LEFT JOIN named AS n USING (run, source)
LEFT JOIN repeated AS d USING (run, source);
