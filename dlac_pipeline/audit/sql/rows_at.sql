-- One row per position of a relation, with its row in the data file: FROM rows_at('passed_over'). The relation has the columns
-- cut_id, key_group, block and position. The result has all of its columns, and file_path, row_group and row.
CREATE OR REPLACE MACRO rows_at(places) AS TABLE
WITH dlac_in_block AS (
    SELECT p.*, s.plan_id AS cut_plan_id, s.unit, s.first_row + (s.a * p.position + s.c) % s.block_rows - s.base AS unit_row
    FROM query_table(places) AS p JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.key_group = p.key_group AND s.block = p.block
        AND (s.a * p.position + s.c) % s.block_rows >= s.base
        AND (s.a * p.position + s.c) % s.block_rows < s.base + s.rows
)
SELECT b.* EXCLUDE (cut_plan_id, unit_row), u.file_path, u.row_group, u.first_row + b.unit_row AS row
FROM dlac_in_block AS b JOIN units AS u ON u.plan_id = b.cut_plan_id AND u.unit = b.unit;
