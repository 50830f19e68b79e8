-- One row per interval of positions with live rows, before the cursor of its key group, that was never consumed.
CREATE OR REPLACE VIEW gaps AS
SELECT run, source, cut_id, pass, key_group, block, position_start, position_end, live_rows AS rows
FROM intervals
WHERE kind = 'hole' AND live_rows > 0;
