-- One row per cut that has a row of a data file, and plan under which it was read: the position of the row in its block.
-- FROM row_positions('/lake/t/data/a.parquet', 17).
CREATE OR REPLACE MACRO row_positions(file, file_row) AS TABLE
WITH
-- The arguments are renamed first, because they may be columns of a caller's table.
dlac_target AS (
    FROM (VALUES (bare_path(file), file_row)) AS arguments (target_file, target_row)
),
-- 1. The row is in one work unit (a row group) of each plan that reads the file, at an offset in it.
dlac_in_unit AS (
    SELECT plan_id, unit, target_row - first_row AS unit_row, dead
    FROM dlac_target JOIN units
        ON bare_path(file_path) = target_file AND target_row >= first_row AND target_row < first_row + rows
),
-- 2. In each pass the unit is cut into slices. The row is in one slice, which gives its row in the block of the slice. A cut may
--    be read under several plans in turn. They have the same units, and exclusions add dead rows.
dlac_in_block AS (
    SELECT s.* EXCLUDE (plan_id), u.plan_id, u.unit_row, u.dead, s.base + u.unit_row - s.first_row AS block_row
    FROM cut_plans AS p
    JOIN dlac_in_unit AS u ON u.plan_id = p.plan_id
    JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.unit = u.unit
        AND u.unit_row >= s.first_row AND u.unit_row < s.first_row + s.rows
)
-- 3. Blocks are read in a shuffled order, row = (a * position + c) mod block_rows. This is the inverse.
--    + block_rows keeps the remainder positive.
SELECT
    cut_id, plan_id, pass, key_group, block, block_row,
    (a_inv * ((block_row - c + block_rows) % block_rows)) % block_rows AS position,
    -- 4. A dead row (deleted, left out by the filter, or excluded) has a position too, and is passed over.
    len(list_filter(dead, lambda span: unit_row >= span.first AND unit_row < span.first + span.rows)) > 0 AS is_dead
FROM dlac_in_block;
