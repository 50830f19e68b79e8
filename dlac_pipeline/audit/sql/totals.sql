-- One row per run: its head, and the number of rows by outcome in the passes that it has entered.
CREATE OR REPLACE VIEW totals AS
WITH
launched AS (
    SELECT run,
        count(DISTINCT seq) FILTER (kind = 'claim') AS attempts,
        count(DISTINCT checkpoint_id) FILTER (kind = 'checkpoint') AS committed,
        run IN (SELECT run FROM finishes) AS finished
    FROM consumption
    GROUP BY run
),
heads AS (
    SELECT run, count(*) AS checkpoints, arg_max(checkpoint_id, seq) AS head_checkpoint, arg_max(step, seq) AS step,
        any_value(adopted) AS adopted_from, any_value(forked_from) AS forked_from
    FROM lineage
    GROUP BY run
),
healed AS (
    SELECT run, count(*) AS recoveries FROM recoveries WHERE outcome = 'resumed' GROUP BY run
),
read AS (
    SELECT run,
        sum(passes_entered)::BIGINT AS passes_entered,
        sum(passes_finished)::BIGINT AS passes_finished,
        sum(rows)::BIGINT AS rows,
        sum(rows_live)::BIGINT AS rows_live,
        sum(rows_pending + rows_missing)::BIGINT AS rows_left,
        sum(rows_consumed)::BIGINT AS rows_consumed,
        sum(rows_duplicated)::BIGINT AS rows_duplicated,
        sum(rows_filtered)::BIGINT AS rows_filtered,
        sum(rows_quarantined)::BIGINT AS rows_quarantined,
        sum(rows_not_applied)::BIGINT AS rows_not_applied,
        sum(rows_partial)::BIGINT AS rows_partial
    FROM sources
    GROUP BY run
),
-- Rows of quarantined row groups are not live any more. They count as quarantined (in sources), not as excluded.
damaged AS (
    SELECT run, sum(rows)::BIGINT AS rows FROM quarantined_units GROUP BY run
),
-- Rows are missing before a cursor, or from the steps of a checkpoint. If a key group lacks both, these are the same rows.
holes AS (
    SELECT run, key_group, sum(rows) AS rows FROM gaps GROUP BY ALL
),
short AS (
    SELECT run, key_group, sum(greatest(0, rows - rows_found)) AS rows FROM shortfalls GROUP BY ALL
),
missing AS (
    SELECT run, sum(greatest(coalesce(h.rows, 0), coalesce(s.rows, 0)))::BIGINT AS rows
    FROM holes AS h FULL JOIN short AS s USING (run, key_group)
    GROUP BY run
)
SELECT
    l.run, h.head_checkpoint, coalesce(h.step, 0) AS step, l.finished, l.attempts,
    coalesce(h.checkpoints, 0) AS checkpoints,
    l.committed - coalesce(h.checkpoints, 0) AS checkpoints_abandoned,
    coalesce(k.recoveries, 0) AS recoveries,
    coalesce(r.passes_entered, 0) AS passes_entered,
    coalesce(r.passes_finished, 0) AS passes_finished,
    coalesce(r.rows_live, 0) AS rows_live,
    coalesce(r.rows_consumed, 0) AS rows_consumed,
    coalesce(r.rows_duplicated, 0) AS rows_duplicated,
    coalesce(m.rows, 0) AS rows_missing,
    greatest(0, coalesce(r.rows_left, 0) - coalesce(m.rows, 0)) AS rows_pending,
    coalesce(r.rows_filtered, 0) AS rows_filtered,
    coalesce(r.rows_quarantined, 0) AS rows_quarantined,
    greatest(0, coalesce(r.rows - r.rows_live, 0) - coalesce(d.rows, 0)) AS rows_excluded,
    coalesce(r.rows_partial, 0) AS rows_partial,
    coalesce(r.rows_not_applied, 0) AS rows_not_applied,
    h.adopted_from, h.forked_from
FROM launched AS l
LEFT JOIN heads AS h USING (run)
LEFT JOIN healed AS k USING (run)
LEFT JOIN read AS r USING (run)
LEFT JOIN missing AS m USING (run)
LEFT JOIN damaged AS d USING (run);
