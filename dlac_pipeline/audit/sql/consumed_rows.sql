-- One row per position that was consumed on a surviving lineage, with its row in the data file. Advances, slices and units are
-- joined before positions are expanded: a query for one file or one checkpoint expands only those of both.
CREATE OR REPLACE VIEW consumed_positions AS
WITH expanded AS (
    SELECT a.run, a.checkpoint_id, a.source, a.cut_id, a.plan_id, a.pass, a.key_group, a.block,
        coalesce(y.applied, a.applied) AS applied, u.file_path, u.row_group, u.first_row, s.base, s.rows, s.first_row - s.base AS unit_base, s.a, s.c, s.block_rows,
        coalesce(d.dead, []) AS dead, unnest(range(a.position_start, a.read_to)) AS position
    FROM advances AS a
    JOIN slices AS s USING (cut_id, key_group, block)
    JOIN units AS u ON u.plan_id = s.plan_id AND u.unit = s.unit
    -- The same unit in the plan under which it was read: exclusions add dead rows.
    LEFT JOIN units AS d ON d.plan_id = a.plan_id AND d.unit = s.unit
    LEFT JOIN (
        SELECT run, source, cut_id, key_group, block, position_start, true AS applied FROM replays WHERE applied
    ) AS y USING (run, source, cut_id, key_group, block, position_start)
),
placed AS (
    SELECT *, (a * position + c) % block_rows AS block_row FROM expanded
)
SELECT run, checkpoint_id, source, cut_id, plan_id, pass, key_group, block, applied, position, file_path, row_group,
    first_row + unit_base + block_row AS row
FROM placed
ANTI JOIN passed_over USING (run, checkpoint_id, cut_id, key_group, block, position)
WHERE block_row >= base AND block_row < base + rows
    AND len(list_filter(dead, lambda span: unit_base + block_row >= span.first
        AND unit_base + block_row < span.first + span.rows)) = 0;

-- One row per row that was consumed on the surviving lineage of a run. `row` is its position in the data file.
CREATE OR REPLACE VIEW consumed_rows AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, row, applied
FROM consumed_positions;

-- One row per row that the transform of a source left out or refused, on the surviving lineage of a run.
CREATE OR REPLACE VIEW passed_over_rows AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, row, kind, reason
FROM rows_at('passed_over');
