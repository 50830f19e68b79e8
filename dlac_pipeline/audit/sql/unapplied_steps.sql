-- One row per step on a surviving lineage that was not applied, with its rows, and the step that replayed them (NULL: none).
-- `applied` is true if that step was applied.
CREATE OR REPLACE VIEW unapplied_steps AS
WITH skipped AS (
    FROM advances WHERE NOT applied
)
SELECT s.run, s.first_step AS step, sum(s.rows_consumed)::BIGINT AS rows, any_value(r.step) AS replayed_in,
    coalesce(bool_and(r.applied), false) AS applied
FROM skipped AS s
LEFT JOIN (
    SELECT run, source, cut_id, key_group, block, position_start, max(step) AS step, bool_or(applied) AS applied
    FROM replays
    GROUP BY ALL
) AS r USING (run, source, cut_id, key_group, block, position_start)
GROUP BY s.run, s.first_step;
