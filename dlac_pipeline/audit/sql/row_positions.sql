-- Where one row of one data file lies in every pass that was cut, once for each plan whose dead rows were passed over in it:
-- FROM row_positions('/lake/t/data/a.parquet', 17).
CREATE OR REPLACE MACRO row_positions(file, file_row) AS TABLE
WITH
-- The arguments get names of their own before anything else is in sight: they may be columns of a caller's table.
asked AS (
    FROM (VALUES (bare_path(file), file_row)) AS arguments (asked_file, asked_row)
),
-- 1. The row lies in one work unit (a row group) of each plan that reads the file, at an offset in it.
in_unit AS (
    SELECT plan_id, unit, asked_row - first_row AS unit_row, dead
    FROM asked JOIN units
        ON bare_path(file_path) = asked_file AND asked_row >= first_row AND asked_row < first_row + rows
),
-- 2. In each pass the unit is cut into slices; the row lies in one of them, and so at a row of that slice's block. A cut may
--    be read under several plans, one after the other: they have the same units, and exclusions add dead rows.
in_block AS (
    SELECT s.* EXCLUDE (plan_id), u.plan_id, u.unit_row, u.dead, s.base + u.unit_row - s.first_row AS block_row
    FROM cut_plans AS p
    JOIN in_unit AS u ON u.plan_id = p.plan_id
    JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.unit = u.unit
        AND u.unit_row >= s.first_row AND u.unit_row < s.first_row + s.rows
)
-- 3. Blocks are read in a shuffled order, row = (a * position + c) mod block_rows. This is its inverse;
--    + block_rows keeps the remainder positive.
SELECT
    cut_id, plan_id, pass, key_group, block, block_row,
    (a_inv * ((block_row - c + block_rows) % block_rows)) % block_rows AS position,
    -- 4. A dead row (deleted, left out by the filter, or excluded) has a position too, and is passed over.
    len(list_filter(dead, lambda span: unit_row >= span.first AND unit_row < span.first + span.rows)) > 0 AS is_dead
FROM in_block;
