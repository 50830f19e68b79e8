-- One row per row group of each pass that a run has entered: its live rows, how many of them are consumed, and how often one
-- of them was consumed again.
CREATE OR REPLACE VIEW coverage AS
WITH
entered AS (
    SELECT DISTINCT run, cut_id FROM advances
),
planned AS (
    SELECT e.run, e.cut_id, s.pass, u.file_path, u.row_group, sum(s.live_rows) AS live_rows
    FROM entered AS e
    JOIN slices AS s USING (cut_id)
    JOIN units AS u USING (plan_id, unit)
    GROUP BY ALL
),
read AS (
    SELECT run, cut_id, file_path, row_group, count(DISTINCT row) AS rows_consumed, count(*) AS times_consumed
    FROM consumed_rows
    GROUP BY ALL
)
SELECT
    p.run, p.cut_id, p.pass, p.file_path, p.row_group, p.live_rows::BIGINT AS live_rows,
    coalesce(r.rows_consumed, 0) AS rows_consumed,
    coalesce(r.times_consumed - r.rows_consumed, 0) AS rows_repeated
FROM planned AS p LEFT JOIN read AS r USING (run, cut_id, file_path, row_group);
