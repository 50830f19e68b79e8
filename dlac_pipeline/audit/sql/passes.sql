-- One row per pass that a run has entered: its live rows, and what became of them. rows_missing are behind a cursor.
CREATE OR REPLACE VIEW passes AS
WITH
planned AS (
    SELECT cut_id, sum(live_rows)::BIGINT AS rows_live FROM slices GROUP BY cut_id
),
entered AS (
    SELECT
        run, cut_id, any_value(plan_id) AS plan_id, min(leg) AS leg, min(pass) AS pass,
        sum(rows_quarantined)::BIGINT AS rows_quarantined,
        coalesce(sum(rows_consumed) FILTER (NOT applied), 0)::BIGINT AS rows_not_applied
    FROM advances
    GROUP BY run, cut_id
),
-- A row is partly read where the last advance of a block ends inside it.
last AS (
    SELECT run, cut_id, arg_max_null(token_end, position_end) IS NOT NULL AS partial
    FROM advances
    GROUP BY run, cut_id, key_group, block
),
partial AS (
    SELECT run, cut_id, count_if(partial) AS rows_partial FROM last GROUP BY run, cut_id
),
counted AS (
    SELECT
        run, cut_id,
        coalesce(sum(live_rows) FILTER (kind = 'advance'), 0)::BIGINT AS rows_read,
        coalesce(sum(live_rows) FILTER (kind = 'overlap'), 0)::BIGINT AS rows_duplicated,
        coalesce(sum(live_rows) FILTER (kind = 'hole'), 0)::BIGINT AS rows_missing
    FROM intervals
    GROUP BY run, cut_id
)
SELECT
    e.run, e.cut_id, e.plan_id, e.leg, e.pass, coalesce(p.rows_live, 0) AS rows_live,
    c.rows_read - c.rows_duplicated AS rows_consumed, c.rows_duplicated, c.rows_missing,
    e.rows_quarantined, e.rows_not_applied, l.rows_partial
FROM entered AS e
JOIN counted AS c USING (run, cut_id)
JOIN partial AS l USING (run, cut_id)
LEFT JOIN planned AS p USING (cut_id);
