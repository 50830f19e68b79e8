-- One row per row group and pass over a followed table, if several passes share the row group.
CREATE OR REPLACE VIEW shared_units AS
WITH planned AS (
    SELECT DISTINCT c.run, c.source, c.pass, c.cut_id, s.unit, bare_path(u.file_path) AS file, u.row_group
    FROM cuts AS c
    JOIN slices AS s USING (cut_id)
    JOIN units AS u USING (plan_id, unit)
    WHERE (c.run, c.source) IN (SELECT (run, source) FROM leg_sources WHERE follow = 'appends')
)
FROM planned
QUALIFY min(pass) OVER (PARTITION BY run, source, file, row_group) < max(pass) OVER (PARTITION BY run, source, file, row_group);

CREATE OR REPLACE VIEW shared_advances AS
FROM advances
WHERE (run, cut_id, key_group, block) IN (
    SELECT (u.run, s.cut_id, s.key_group, s.block) FROM shared_units AS u JOIN slices AS s USING (cut_id, unit)
);

CREATE OR REPLACE VIEW shared_positions AS
FROM consumed_at('shared_advances');

-- One row per row of a followed table that was consumed in more than one pass. Each pass over such a table must have other rows.
-- Only row groups that several passes share are expanded into rows.
CREATE OR REPLACE VIEW repeats AS
SELECT run, source, bare_path(file_path) AS file_path, row_group, row, list(DISTINCT pass ORDER BY pass) AS passes,
    count(DISTINCT pass) - 1 AS times_repeated
FROM rows_at('shared_positions')
GROUP BY run, source, bare_path(file_path), row_group, row
HAVING count(DISTINCT pass) > 1;
