-- One row per key of a row that a checkpoint or one of its ancestors has read, at least in part. Rows of data files without keys
-- are missing. It expands all consumed positions, so it takes long for many rows. FROM keys_seen('run-000000010-1a2b').
CREATE OR REPLACE MACRO keys_seen(checkpoint) AS TABLE
WITH
-- The ancestors are found first, where no table's columns hide the argument.
dlac_seen AS (
    SELECT checkpoint_id FROM ancestors(checkpoint)
),
dlac_moved AS (
    SELECT a.cut_id, a.plan_id, a.key_group, a.block, a.filtered, a.quarantined,
        unnest(range(a.position_start, a.position_end)) AS position
    FROM consumption AS a
    WHERE a.kind = 'advance' AND a.checkpoint_id IN (FROM dlac_seen)
),
dlac_placed AS (
    SELECT m.plan_id, s.plan_id AS cut_plan_id, s.unit,
        s.first_row - s.base + (s.a * m.position + s.c) % s.block_rows AS unit_row
    FROM dlac_moved AS m JOIN slices AS s ON s.cut_id = m.cut_id AND s.key_group = m.key_group AND s.block = m.block
        AND (s.a * m.position + s.c) % s.block_rows >= s.base
        AND (s.a * m.position + s.c) % s.block_rows < s.base + s.rows
    WHERE NOT coalesce(list_contains(m.filtered, m.position), false)
        AND NOT coalesce(list_contains(m.quarantined, m.position), false)
)
SELECT DISTINCT k.key, f.identity, p.source_table, u.file_path, k.row
FROM dlac_placed AS r
JOIN units AS u ON u.plan_id = r.cut_plan_id AND u.unit = r.unit
JOIN units AS d ON d.plan_id = r.plan_id AND d.unit = r.unit
JOIN plans AS p ON p.plan_id = u.plan_id
JOIN keyed_files AS f ON f.table_uuid = p.table_uuid AND f.file_path = u.file_path
JOIN row_keys AS k ON k.file = f.file AND k.row = u.first_row + r.unit_row
WHERE len(list_filter(d.dead, lambda span: r.unit_row >= span.first AND r.unit_row < span.first + span.rows)) = 0;
