-- One row per row of a relation, and plan that reads it: FROM live_places('rows'). The relation has the columns plan_id, file_path
-- and row. Rows that are dead in the plan (deleted, left out by its filter, or excluded) are left out.
CREATE OR REPLACE MACRO live_places(places) AS TABLE
SELECT u.plan_id, u.unit, a.file_path, a.row, a.row - u.first_row AS unit_row
FROM query_table(places) AS a JOIN units AS u
    ON u.plan_id = a.plan_id AND u.file_path = a.file_path AND a.row >= u.first_row AND a.row < u.first_row + u.rows
WHERE len(list_filter(u.dead, lambda span: a.row - u.first_row >= span.first
    AND a.row - u.first_row < span.first + span.rows)) = 0;

-- One row per run, source, row of such a relation, and checkpoint that has read it itself, at least in part. Its ancestors do
-- not count. Rows that were dead, filtered or quarantined do not count either.
CREATE OR REPLACE MACRO readers(places) AS TABLE
WITH dlac_in_block AS (
    SELECT s.* EXCLUDE (plan_id), u.plan_id, u.file_path, u.row,
        (s.a_inv * ((s.base + u.unit_row - s.first_row - s.c + s.block_rows) % s.block_rows)) % s.block_rows AS position
    FROM cut_plans AS p
    JOIN live_places(places) AS u ON u.plan_id = p.plan_id
    JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.unit = u.unit
        AND u.unit_row >= s.first_row AND u.unit_row < s.first_row + s.rows
)
SELECT DISTINCT a.run, a.source, r.file_path, r.row, a.checkpoint_id
FROM dlac_in_block AS r JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
WHERE a.kind = 'advance'
    AND r.position >= a.position_start AND r.position < a.position_end
    AND NOT coalesce(list_contains(a.filtered, r.position), false)
    AND NOT coalesce(list_contains(a.quarantined, r.position), false);
