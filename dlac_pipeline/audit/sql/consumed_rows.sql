-- One row per row that was consumed on the surviving lineage of a run: `row` is its position in the data file.
CREATE OR REPLACE VIEW consumed_rows AS
WITH moved AS (
    SELECT run, checkpoint_id, cut_id, plan_id, pass, key_group, block, applied,
        unnest(range(position_start, position_end)) AS position
    FROM advances
),
live AS (
    SELECT m.* FROM moved AS m ANTI JOIN dead_positions AS d USING (cut_id, key_group, block, position)
),
placed AS (
    SELECT m.run, m.checkpoint_id, m.cut_id, m.plan_id, m.pass, m.applied, s.unit,
        s.first_row + (s.a * m.position + s.c) % s.block_rows - s.base AS unit_row
    FROM live AS m JOIN slices AS s
        ON s.cut_id = m.cut_id AND s.key_group = m.key_group AND s.block = m.block
        AND (s.a * m.position + s.c) % s.block_rows >= s.base
        AND (s.a * m.position + s.c) % s.block_rows < s.base + s.rows
)
SELECT
    p.run, p.checkpoint_id, p.cut_id, p.pass, u.file_path, u.row_group, u.first_row + p.unit_row AS row, p.applied
FROM placed AS p JOIN units AS u USING (plan_id, unit);
