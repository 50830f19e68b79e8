-- One row per source, row of a relation, and checkpoint that has read it: FROM rows_seen('rows', 'run-000000010-1a2b'). It is
-- the given checkpoint or an ancestor. The relation has the columns plan_id, file_path and row. Rows that were dead, filtered
-- or quarantined do not count.
CREATE OR REPLACE MACRO rows_seen(places, checkpoint) AS TABLE
WITH
in_unit AS (
    SELECT u.plan_id, u.unit, u.dead, a.file_path, a.row, a.row - u.first_row AS unit_row
    FROM query_table(places) AS a JOIN units AS u
        ON u.plan_id = a.plan_id AND u.file_path = a.file_path AND a.row >= u.first_row AND a.row < u.first_row + u.rows
    WHERE len(list_filter(u.dead, lambda span: a.row - u.first_row >= span.first
        AND a.row - u.first_row < span.first + span.rows)) = 0
),
in_block AS (
    SELECT s.* EXCLUDE (plan_id), u.plan_id, u.file_path, u.row,
        (s.a_inv * ((s.base + u.unit_row - s.first_row - s.c + s.block_rows) % s.block_rows)) % s.block_rows AS position
    FROM cut_plans AS p
    JOIN in_unit AS u ON u.plan_id = p.plan_id
    JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.unit = u.unit
        AND u.unit_row >= s.first_row AND u.unit_row < s.first_row + s.rows
)
SELECT DISTINCT a.source, r.file_path, r.row, a.checkpoint_id
FROM in_block AS r JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
WHERE a.kind = 'advance'
    AND r.position >= a.position_start AND r.position < a.position_end
    AND NOT coalesce(list_contains(a.filtered, r.position), false)
    AND NOT coalesce(list_contains(a.quarantined, r.position), false)
    AND a.checkpoint_id IN (SELECT checkpoint_id FROM ancestors(checkpoint));
