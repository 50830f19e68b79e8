-- One row per interval of positions that was consumed more than once in one pass. checkpoint_id is the later of the two.
CREATE OR REPLACE VIEW duplicates AS
SELECT run, source, cut_id, pass, key_group, block, position_start, position_end, checkpoint_id, live_rows AS rows
FROM intervals
WHERE kind = 'overlap' AND live_rows > 0;
