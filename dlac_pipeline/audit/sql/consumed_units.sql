-- One row per row group that a checkpoint of a surviving lineage consumed rows of, since its parent.
CREATE OR REPLACE VIEW consumed_units AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, count(*) AS rows
FROM consumed_rows
GROUP BY ALL;
