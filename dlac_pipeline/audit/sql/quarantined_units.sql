-- One row per row group that a leg of the surviving lineage leaves out because it does not decode, or of which it leaves out
-- rows at which ranks died. `rows` of them were live.
CREATE OR REPLACE VIEW quarantined_units AS
SELECT DISTINCT c.run, c.leg, c.source, c.quarantined_rows.path AS file_path, c.quarantined_rows.row_group,
    c.quarantined_rows.rows, c.reason
FROM consumption AS c JOIN legs AS l ON l.run = c.run AND l.leg = c.leg AND l.seq = c.seq
WHERE c.kind = 'quarantined_rows';
