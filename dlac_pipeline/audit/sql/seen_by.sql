-- One row per checkpoint that has read a row with this key since its parent, and place of the row: a pass, a data file and a row.
-- FROM seen_by(row_key(...)). It reads DLAC's own tables only. The descendants of the checkpoint have seen the row, too.
--
-- whole: the whole row was read, and not only its first tokens. survives: the head of the run descends from the checkpoint.
-- is_first: the first such row of the run, and of those that survive or do not. forks: other runs whose head descends from it.
-- Rows that were dead, filtered or quarantined do not count.
CREATE OR REPLACE MACRO seen_by(wanted_key) AS TABLE
WITH
-- The argument is renamed first, because it may be a column of a caller's table.
dlac_target AS (
    FROM (VALUES (wanted_key)) AS arguments (target_key)
),
dlac_places AS (
    SELECT DISTINCT f.table_uuid, f.file_path, k.row
    FROM dlac_target JOIN row_keys AS k ON k.key = target_key JOIN keyed_files AS f ON f.file = k.file
),
dlac_in_unit AS (
    SELECT u.plan_id, u.unit, p.source_table, u.file_path, a.row, a.row - u.first_row AS unit_row
    FROM dlac_places AS a
    JOIN plans AS p ON p.table_uuid = a.table_uuid
    JOIN units AS u
        ON u.plan_id = p.plan_id AND u.file_path = a.file_path AND a.row >= u.first_row AND a.row < u.first_row + u.rows
    WHERE len(list_filter(u.dead, lambda span: a.row - u.first_row >= span.first
        AND a.row - u.first_row < span.first + span.rows)) = 0
),
dlac_in_block AS (
    SELECT s.cut_id, u.plan_id, s.key_group, s.block, u.source_table, u.file_path, u.row,
        (s.a_inv * ((s.base + u.unit_row - s.first_row - s.c + s.block_rows) % s.block_rows)) % s.block_rows AS position
    FROM cut_plans AS p
    JOIN dlac_in_unit AS u ON u.plan_id = p.plan_id
    JOIN slices AS s
        ON s.cut_id = p.cut_id AND s.unit = u.unit
        AND u.unit_row >= s.first_row AND u.unit_row < s.first_row + s.rows
),
dlac_readings AS (
    SELECT a.run, a.seq, a.checkpoint_id, a.pass, a.source, r.source_table, r.file_path, r.row,
        min(a.first_step) AS first_step, max(a.last_step) AS last_step,
        bool_or(a.token_end IS NULL OR r.position < a.position_end - 1) AS whole, bool_or(a.applied) AS applied
    FROM dlac_in_block AS r JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
    WHERE a.kind IN ('advance', 'replay')
        AND r.position >= a.position_start AND r.position < a.position_end
        AND NOT coalesce(list_contains(a.filtered, r.position), false)
        AND NOT coalesce(list_contains(a.quarantined, r.position), false)
    GROUP BY ALL
),
dlac_descended AS (
    SELECT b.checkpoint_id, list(DISTINCT h.run ORDER BY h.run) AS runs
    FROM (SELECT DISTINCT checkpoint_id FROM dlac_readings) AS r
    JOIN branch_checkpoints AS b USING (checkpoint_id)
    JOIN (SELECT run, checkpoint_id FROM lineage WHERE is_head) AS h ON true
    JOIN ancestor_branches(h.checkpoint_id) AS walk
        ON walk.run = b.run AND walk.branch = b.branch AND b.seq <= walk.upto
    GROUP BY b.checkpoint_id
),
dlac_judged AS (
    SELECT r.*, coalesce(list_contains(d.runs, r.run), false) AS survives,
        list_filter(coalesce(d.runs, []), lambda run: run <> r.run) AS forks
    FROM dlac_readings AS r LEFT JOIN dlac_descended AS d USING (checkpoint_id)
)
SELECT run, checkpoint_id, first_step, last_step, pass, source, source_table, file_path, row, whole, applied, survives,
    row_number() OVER (PARTITION BY run, survives ORDER BY seq, pass, file_path, row) = 1 AS is_first, forks
FROM dlac_judged;
