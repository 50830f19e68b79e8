-- One row per run and kind of problem in its replays, as a sentence. A sound run has none. A replay has rows of a step before it
-- that was not applied, and they are applied once.
CREATE OR REPLACE VIEW replay_problems AS
WITH
matched AS (
    SELECT r.*, m.position_start AS skipped_start, m.rows_consumed AS skipped_rows,
        CASE WHEN m.first_step = m.last_step THEN m.first_step END AS skipped_step,
        format('cut {}, key group {}, block {}: ', r.cut_id, r.key_group, r.block) AS place
    FROM replays AS r LEFT JOIN advances AS m
        ON m.run = r.run AND m.source = r.source AND m.cut_id = r.cut_id AND m.key_group = r.key_group AND m.block = r.block
        AND r.position_start >= m.position_start AND r.position_end <= m.position_end
        AND NOT m.applied AND m.last_step < r.step
),
-- An earlier audit may have merged the advances of several steps. Their rows are in neither of the two sums.
parts AS (
    SELECT run, step, skipped_step, sum(rows_consumed)::BIGINT AS rows FROM matched WHERE skipped_step IS NOT NULL GROUP BY ALL
),
wholes AS (
    SELECT run, first_step AS skipped_step, sum(rows_consumed)::BIGINT AS rows
    FROM advances
    WHERE NOT applied AND first_step = last_step
    GROUP BY ALL
),
-- Each step of a checkpoint after its last advance is a replay.
ends AS (
    SELECT c.run, c.checkpoint_id, c.step,
        greatest(coalesce(p.step, 0), coalesce((SELECT max(m.last_step) FROM advances AS m
            WHERE m.run = c.run AND m.checkpoint_id = c.checkpoint_id), 0)) AS last_step,
        (SELECT count(DISTINCT r.step) FROM replays AS r
            WHERE r.run = c.run AND r.checkpoint_id = c.checkpoint_id) AS replays
    FROM lineage AS c ANTI JOIN audited USING (checkpoint_id)
    SEMI JOIN (FROM legs WHERE NOT streamed) AS s USING (run, leg)
    LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
),
found AS (
    SELECT run, 'skipped' AS kind, place || format('expected positions {} to {} in a step before step {} that was not applied, '
        || 'found none', position_start, position_end, step) AS problem
    FROM matched
    WHERE skipped_start IS NULL
    UNION ALL
    SELECT run, 'whole', format('expected the {} rows of step {} in step {}, found {}', w.rows, skipped_step, p.step, p.rows)
    FROM parts AS p JOIN wholes AS w USING (run, skipped_step)
    WHERE p.rows <> w.rows
    UNION ALL
    SELECT run, 'again', place || format('expected the {} rows from position {} that were not applied in one replay, found {}',
        any_value(skipped_rows), skipped_start, sum(rows_consumed)::BIGINT)
    FROM matched
    WHERE applied AND skipped_start IS NOT NULL
    GROUP BY run, place, source, cut_id, skipped_start
    HAVING sum(rows_consumed) > any_value(skipped_rows)
    UNION ALL
    SELECT run, 'missing', format('checkpoint {}: expected {} replays after step {}, found {}',
        checkpoint_id, step - last_step, last_step, replays)
    FROM ends
    WHERE step - last_step > replays
)
SELECT run, min(problem) || CASE WHEN count(*) > 1 THEN format(' (and {} more like it)', count(*) - 1) ELSE '' END AS problem
FROM found
GROUP BY run, kind;
