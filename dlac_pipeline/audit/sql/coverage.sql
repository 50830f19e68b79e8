-- One row per block of an entered pass. is_whole: it was read from end to end under one plan.
CREATE OR REPLACE VIEW block_states AS
WITH
newest AS (
    SELECT run, cut_id, arg_max(live_plan_id, leg) AS plan_id FROM live_plans GROUP BY run, cut_id
)
SELECT i.run, i.source, i.cut_id, i.pass, i.key_group, i.block,
    bool_and(i.kind = 'advance' OR i.live_rows = 0) AND min(i.plan_id) = max(i.plan_id) AS is_whole,
    -- The plan that decides which rows of the block are live: the one under which it was read, or the newest.
    CASE WHEN is_whole THEN min(i.plan_id) ELSE any_value(coalesce(n.plan_id, b.plan_id)) END AS plan_id
FROM intervals AS i
JOIN blocks AS b USING (cut_id, key_group, block)
LEFT JOIN newest AS n ON n.run = i.run AND n.cut_id = i.cut_id
GROUP BY i.run, i.source, i.cut_id, i.pass, i.key_group, i.block;

CREATE OR REPLACE VIEW part_advances AS
SELECT a.* FROM advances AS a JOIN block_states AS b USING (run, source, cut_id, key_group, block) WHERE NOT b.is_whole;

CREATE OR REPLACE VIEW part_positions AS
FROM consumed_at('part_advances');

-- One row per row group of each pass that a run has entered: its live rows, the number that was consumed, the number that the
-- transform passed over, and how often one was consumed again. Only blocks that are not whole are expanded into rows.
CREATE OR REPLACE VIEW coverage AS
WITH
dead AS (
    SELECT plan_id, cut_id, key_group, block, unit, count(*) AS rows FROM dead_positions GROUP BY ALL
),
sliced AS (
    SELECT b.run, b.source, b.cut_id, b.pass, s.plan_id, s.unit, b.is_whole,
        s.rows - coalesce(d.rows, 0) AS live_rows
    FROM block_states AS b
    JOIN slices AS s USING (cut_id, key_group, block)
    LEFT JOIN dead AS d ON d.plan_id = b.plan_id AND d.cut_id = s.cut_id AND d.key_group = s.key_group
        AND d.block = s.block AND d.unit = s.unit
),
planned AS (
    SELECT s.run, s.source, s.cut_id, s.pass, u.file_path, u.row_group, sum(s.live_rows) AS live_rows,
        coalesce(sum(s.live_rows) FILTER (s.is_whole), 0) AS whole_rows
    FROM sliced AS s JOIN units AS u USING (plan_id, unit)
    GROUP BY ALL
),
-- Rows that were consumed before they were excluded count as live.
part AS (
    SELECT p.run, p.cut_id, p.file_path, p.row_group, count(DISTINCT p.row) AS rows_consumed, count(*) AS times_consumed,
        count(DISTINCT p.row) FILTER (d.position IS NOT NULL) AS rows_excluded_later
    FROM rows_at('part_positions') AS p
    JOIN block_states AS b USING (run, source, cut_id, key_group, block)
    LEFT JOIN dead_positions AS d ON d.plan_id = b.plan_id AND d.cut_id = p.cut_id AND d.key_group = p.key_group
        AND d.block = p.block AND d.position = p.position
    GROUP BY ALL
),
passed AS (
    SELECT p.run, p.cut_id, p.file_path, p.row_group, count(*) AS rows_passed, count_if(b.is_whole) AS of_whole
    FROM rows_at('passed_over') AS p JOIN block_states AS b USING (run, source, cut_id, key_group, block)
    GROUP BY ALL
)
SELECT
    p.run, p.source, p.cut_id, p.pass, p.file_path, p.row_group,
    (p.live_rows + coalesce(r.rows_excluded_later, 0))::BIGINT AS live_rows,
    (p.whole_rows - coalesce(o.of_whole, 0) + coalesce(r.rows_consumed, 0))::BIGINT AS rows_consumed,
    coalesce(r.times_consumed - r.rows_consumed, 0) AS rows_repeated,
    coalesce(o.rows_passed, 0) AS rows_passed
FROM planned AS p
LEFT JOIN part AS r USING (run, cut_id, file_path, row_group)
LEFT JOIN passed AS o USING (run, cut_id, file_path, row_group);
