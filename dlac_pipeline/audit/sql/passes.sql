-- One row per pass that a run has entered, of each source, with the number of its rows by outcome. rows_missing are before a
-- cursor, and rows_pending after it. A row that was read in part is pending. Rows that were excluded unread are not live.
CREATE OR REPLACE VIEW passes AS
WITH
entered AS (
    SELECT
        run, source, pass, cut_id, arg_max(plan_id, {'seq': seq, 'position': position_end}) AS plan_id, min(leg) AS leg,
        coalesce(sum(rows_consumed) FILTER (NOT applied), 0)::BIGINT AS rows_not_applied
    FROM advances
    GROUP BY ALL
),
-- A row is partial if an advance ends inside it and no other advance continues it.
split AS (
    SELECT run, source, pass, cut_id, token_end IS NOT NULL AND lead(token_start) OVER (
        PARTITION BY run, source, key_group ORDER BY pass, block, position_start, coalesce(token_start, 0), position_end
    ) IS NULL AS partial
    FROM advances
),
partial AS (
    SELECT run, source, pass, cut_id, count_if(partial) AS rows_partial FROM split GROUP BY ALL
),
replayed AS (
    SELECT run, source, pass, cut_id, sum(rows_consumed)::BIGINT AS rows FROM replays WHERE applied GROUP BY ALL
),
sized AS (
    SELECT cut_id, any_value(plan_id) AS plan_id FROM slices GROUP BY cut_id
),
counted AS (
    SELECT
        run, source, pass, cut_id,
        coalesce(sum(live_rows) FILTER (kind = 'advance'), 0)::BIGINT AS rows_read,
        coalesce(sum(live_rows) FILTER (kind = 'overlap'), 0)::BIGINT AS rows_duplicated,
        coalesce(sum(live_rows) FILTER (kind = 'hole'), 0)::BIGINT AS rows_missing,
        coalesce(sum(live_rows) FILTER (kind = 'ahead'), 0)::BIGINT AS rows_pending,
        coalesce(sum(filtered_rows) FILTER (kind = 'advance'), 0)::BIGINT AS rows_filtered,
        coalesce(sum(quarantined_rows) FILTER (kind = 'advance'), 0)::BIGINT AS rows_quarantined
    FROM intervals
    GROUP BY ALL
)
SELECT
    e.run, e.source, e.pass, e.cut_id, e.plan_id, e.leg, p.rows,
    c.rows_read - c.rows_duplicated + c.rows_filtered + c.rows_quarantined + c.rows_missing + c.rows_pending AS rows_live,
    c.rows_read - c.rows_duplicated AS rows_consumed, c.rows_duplicated, c.rows_missing, c.rows_pending,
    c.rows_filtered, c.rows_quarantined, e.rows_not_applied - coalesce(y.rows, 0) AS rows_not_applied, l.rows_partial
FROM entered AS e
JOIN counted AS c USING (run, source, pass, cut_id)
JOIN partial AS l USING (run, source, pass, cut_id)
LEFT JOIN replayed AS y USING (run, source, pass, cut_id)
LEFT JOIN sized AS s USING (cut_id)
LEFT JOIN plans AS p ON p.plan_id = s.plan_id;
