-- One row per position that was consumed on a surviving lineage.
CREATE OR REPLACE VIEW consumed_positions AS
FROM consumed_at('advances');

-- One row per row that was consumed on the surviving lineage of a run. `row` is its position in the data file.
CREATE OR REPLACE VIEW consumed_rows AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, row, applied
FROM rows_at('consumed_positions');

-- One row per row that the transform of a source left out or refused, on the surviving lineage of a run.
CREATE OR REPLACE VIEW passed_over_rows AS
SELECT run, checkpoint_id, source, cut_id, pass, file_path, row_group, row, kind, reason
FROM rows_at('passed_over');
