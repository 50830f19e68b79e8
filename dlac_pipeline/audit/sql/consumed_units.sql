-- One row per row group and checkpoint of a surviving lineage: the checkpoint consumed rows of the group since its parent.
CREATE OR REPLACE VIEW consumed_units AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, count(*) AS rows
FROM consumed_rows
GROUP BY ALL;
